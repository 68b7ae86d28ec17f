"""Keys and values by token: cut into a prompt's blocks, and put together again, plain or as mlx-lm quantizes them.

mlx-lm quantizes (``maybe_quantize_kv_cache``) behind a whole chunk of its own, and before and behind a prompt's last
token. So what a text's caches are behind a block depends on how many tokens come before it, and on whether one comes
after it alone; but numbers that share a scale are those of one token, so what plain ones would be quantized to is the
same whenever that is done. Hence a block that may have been plain is kept as it was then, and another one quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

STEP = 256
"""Tokens by which mlx-lm's caches grow (``KVCache.step``): one that is restored has the room that it had."""

Pair = tuple[Any, Any]
"""A cache's keys and values, each (1, heads, tokens, features); or quantized, each three arrays: codes (uint32), scales
and biases."""


@dataclass(frozen=True)
class KvBits:
    """How mlx-lm quantizes a text's keys and values: ``kv_bits`` and what goes with it in ``generate_step``.

    Attributes:
        start: token from which it does.
        step: tokens of its chunks of a prompt, behind which it looks whether so many are there.
    """

    bits: int
    group_size: int
    start: int
    step: int

    def quantized(self, tokens: int, prompt: int) -> bool:
        """Whether caches that hold so many tokens of a prompt are quantized when what comes then is computed."""
        looked = tokens if tokens >= prompt - 1 else tokens // self.step * self.step
        return looked >= max(self.start, 1)

    def cuts(self, step: int, block: int) -> bool:
        """Whether chunks of ``step`` tokens, none of which passes the end of mlx-lm's, end where blocks do, and where
        mlx-lm's end, from the end of any block on."""
        each = min(step, self.step)
        return block % each == 0 and self.step % each == 0

    @property
    def share(self) -> float:
        """Bytes of quantized keys and values, for each of plain ones, at most: of numbers of 16 bits."""
        return self.bits / 16 + 2 / self.group_size


def by_token(cache: Any) -> bool:
    """Whether a cache can be cut by token, and holds all of them: mlx-lm's plain one."""
    return type(cache) is KVCache


def by_token_still(cache: Any) -> bool:
    """The same behind a prompt, where it may have been quantized."""
    return by_token(cache) or type(cache) is QuantizedKVCache


def pair_of(cache: Any) -> Pair:
    """Its keys and values."""
    return cache.keys, cache.values


def sequences(pair: Pair) -> int:
    """That they are of."""
    count: int = _arrays(pair[0])[0].shape[0]
    return count


def slices(pairs: Mapping[int, Pair], begin: int, end: int) -> dict[str, mx.array]:
    """What these caches, by their numbers, hold of these tokens."""
    found: dict[str, mx.array] = {}
    for i, pair in pairs.items():
        for which, held in zip("kv", pair, strict=True):
            plain = isinstance(held, mx.array)
            for n, array in enumerate(_arrays(held)):
                found[f"{i}.{which}" if plain else f"{i}.{which}.{n}"] = array[..., begin:end, :]
    return found


def put_together(
    cache: Any, parts: Sequence[dict[str, mx.array]], i: int, tokens: int, kv: KvBits | None = None
) -> Any:
    """A cache that holds these parts of number ``i``, one after the other, which are taken from them.

    Args:
        cache: a new, plain one.
        kv: it shall be quantized so; None: plain.

    Returns:
        the same, with the room that mlx-lm's would have; or a quantized one.

    Raises:
        KeyError, ValueError: they do not fit together; or they are quantized, and a plain one is wanted.
    """
    if any(f"{i}.k" in p or f"{i}.k.0" in p for p in parts):
        pair = [_joined([_taken(p, f"{i}.{which}", kv) for p in parts], tokens) for which in "kv"]
        mx.eval(pair)
        if kv is None:
            (cache.keys,), (cache.values,) = pair
        else:
            cache = QuantizedKVCache(group_size=kv.group_size, bits=kv.bits)
            cache.keys, cache.values = pair
        cache.offset = tokens
    elif kv is not None and kv.start <= 0:
        cache = cache.to_quantized(group_size=kv.group_size, bits=kv.bits)  # as mlx-lm does with those that are empty
    return cache


def _taken(part: dict[str, mx.array], name: str, kv: KvBits | None) -> list[mx.array]:
    if kv is None:
        return [part.pop(name)]
    if name in part:
        return _arrays(mx.quantize(part.pop(name), group_size=kv.group_size, bits=kv.bits))
    return [part.pop(f"{name}.{n}") for n in range(3)]


def _joined(parts: Sequence[Sequence[mx.array]], tokens: int) -> list[mx.array]:
    """Arrays of all parts, one after the other by token, and room behind them."""
    joined = []
    for arrays in zip(*parts, strict=True):
        if sum(a.shape[2] for a in arrays) != tokens:
            raise ValueError("of another number of tokens")
        *shape, _, features = arrays[0].shape
        room = [mx.zeros((*shape, -tokens % STEP, features), arrays[0].dtype)] if tokens % STEP else []
        joined.append(mx.concatenate([*arrays, *room], axis=2))
    return joined


def _arrays(held: Any) -> list[mx.array]:
    return [held] if isinstance(held, mx.array) else list(held)
