"""DFlash: a few layers that draft a block of tokens in one pass (z-lab's dflash, arXiv 2602.06036).

A block is the text's last token and mask tokens, which see each other and the text. Of the text the layers have keys
and values, made from the hidden states of several of the model's layers, joined by ``fc``; the block's are forgotten.
Row n of a block has the logits of its token n, so all rows are computed for the first token that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from .drafter import MOST_LAYERS, MOST_ROWS, BlockDrafter, Config, DraftedModel, Shapes, Shared

SLIDING = "sliding_attention"
# Names in the config of drafters that are built differently.
_OTHERS = ("gemma4dspark", "laguna", "deepseek_v4", "muse_glimmer")
# The mask token of drafters whose config has none, by the model's family.
_MASKS = {"gemma4": 4}
_Pair = tuple[mx.array, mx.array]
_Own = TypeVar("_Own", bound="DFlash")


def setting(config: Config, name: str, default: Any = None) -> Any:
    """Returns a value of the config's part ``dflash_config`` or, if it is not there, of the config itself."""
    found = (config.get("dflash_config") or {}).get(name)
    found = config.get(name) if found is None else found
    return default if found is None else found


def names_of(config: Config) -> list[str]:
    """Returns the model's type and classes in small letters."""
    return [str(name).lower() for name in (config.get("model_type"), *(config.get("architectures") or ()))]


def required(config: Config, name: str) -> Any:
    found = setting(config, name)
    if found is None:
        raise ValueError(f"config.json has no {name}")
    return found


@dataclass(frozen=True)
class Shape:
    """What a drafter's config says of its layers.

    Attributes:
        windows: for each layer the most tokens that a token sees, itself included; None: all.
        kept: the most tokens of a text that all layers see, whatever their windows; None: no such bound.
        causal: a block's tokens see only those before them.
        sinks: attention has a bias for seeing nothing.
    """

    hidden: int
    between: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    windows: tuple[int | None, ...]
    kept: int | None
    causal: bool
    sinks: bool

    @classmethod
    def of(cls, config: Config, eps: float) -> Shape:
        count, heads = required(config, "num_hidden_layers"), required(config, "num_attention_heads")
        hidden, window = required(config, "hidden_size"), setting(config, "swa_window_size")
        if not 0 < count <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {count}")
        types = config.get("layer_types") or ["full_attention"] * count
        window = config.get("sliding_window") if window is None else window
        if len(types) != count:
            raise ValueError("layer_types does not have one type for each layer")
        kept = setting(config, "draft_window_size") or None
        if SLIDING in types and (type(window) is not int or window < 3):
            raise ValueError("layers with sliding attention need a sliding_window of at least 3")
        if kept is not None and (type(kept) is not int or kept < 1):
            raise ValueError(f"draft_window_size is {kept}")
        causal = setting(config, "causal", setting(config, "dflash_query_causal", setting(config, "is_causal", False)))
        return cls(
            hidden,
            required(config, "intermediate_size"),
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            float(config.get("rms_norm_eps", eps)),
            tuple(window if kind == SLIDING else None for kind in types),
            kept,
            bool(causal),
            bool(setting(config, "attention_sink_bias", False)),
        )

    def rope(self, config: Config) -> Any:
        scaling = config.get("rope_parameters") or config.get("rope_scaling")
        base = (scaling or {}).get("rope_theta") or config.get("rope_theta", 1e7)
        interleaved = not config.get("rope_is_neox_style", True)
        return initialize_rope(self.dim, base, interleaved, scaling, config.get("max_position_embeddings", 262144))

    def caches(self) -> list[Any]:
        if self.kept is not None:
            return [LatestCache(self.kept) for _ in self.windows]
        return [KVCache() if w is None else RotatingKVCache(w - 1) for w in self.windows]

    def growing(self) -> tuple[tuple[int, int | None], ...]:
        """Returns what ``BlockDrafter.growing`` is, of the caches alone."""
        each = 2 * 2 * self.kv_heads * self.dim
        if self.kept is not None:
            return ((each * len(self.windows), self.kept + LatestCache.SPARE),)
        # A window's cache has up to a window more for a moment.
        return tuple((each, None if w is None else 2 * w) for w in self.windows)


class LatestCache:
    """Keys and values of a text's latest tokens: ``least - 1`` of them when some are let go, which is when there are
    more than ``SPARE`` besides ``least``."""

    SPARE = 64

    def __init__(self, least: int) -> None:
        self.least, self.offset, self._first = least, 0, 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> _Pair:
        count, more = 0 if self.keys is None else self.keys.shape[2], keys.shape[2]
        if self.keys is not None and self.values is not None:
            drop = 0
            if count + more > self.least + max(self.SPARE, more):
                drop = min(max(self.offset - self.least + 1 - self._first, 0), count)
            self._first += drop
            keys = mx.concatenate([self.keys[..., drop:, :], keys], axis=2)
            values = mx.concatenate([self.values[..., drop:, :], values], axis=2)
        self.keys, self.values = keys, values
        self.offset += more
        return keys, values

    def keys_and_values(self) -> _Pair:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values


class Attention(nn.Module):
    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        hidden, dim = shape.hidden, shape.dim
        self._shape, self._window = shape, window
        self.q_proj = nn.Linear(hidden, shape.heads * dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, shape.kv_heads * dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(shape.heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, shape.eps) for _ in range(2))
        if shape.sinks:
            self.attention_sink_bias = mx.zeros((shape.heads,))

    def follow(self, read: mx.array, rope: Any, cache: Any) -> None:
        """Takes in the text's next tokens, by what is read of them: (1, n, hidden)."""
        keys, values = self.k_proj(read), self.v_proj(read)
        if self._window is not None and (skipped := keys.shape[1] - (self._window - 1)) > 0:
            keys, values = keys[:, skipped:], values[:, skipped:]
            cache.offset += skipped
        rotated = rope(self.k_norm(self._split(keys, self._shape.kv_heads)), offset=cache.offset)
        cache.update_and_fetch(rotated, self._split(values, self._shape.kv_heads))

    def __call__(self, x: mx.array, rope: Any, cache: Any) -> mx.array:
        length, shape = x.shape[1], self._shape
        queries = rope(self.q_norm(self._split(self.q_proj(x), shape.heads)), offset=cache.offset)
        keys = rope(self.k_norm(self._split(self.k_proj(x), shape.kv_heads)), offset=cache.offset)
        before = cache.keys_and_values()
        keys = mx.concatenate([before[0], keys], axis=2)
        values = mx.concatenate([before[1], self._split(self.v_proj(x), shape.kv_heads)], axis=2)
        mask = create_causal_mask(length, keys.shape[2] - length, self._window) if shape.causal else None
        sinks = self.attention_sink_bias.astype(queries.dtype) if shape.sinks else None
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=shape.dim**-0.5, mask=mask, sinks=sinks)
        made: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, length, -1))
        return made

    def _split(self, x: mx.array, heads: int) -> mx.array:
        # A norm of single heads gives the same bits before and after the transposition.
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


class Layer(nn.Module):
    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, window), MLP(shape.hidden, shape.between)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(shape.hidden, shape.eps) for _ in range(2))

    def __call__(self, x: mx.array, rope: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        made: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return made


class DFlash(BlockDrafter):
    """The drafter of DFlash; those of DFlash2 and DSpark are made of it.

    Attributes:
        rows: how many tokens a block drafts. A smaller number than the published gives other guesses, since a block's
            tokens see each other, and takes less time.
    """

    kind = "DFlash"
    borrows_head = True
    # Where the config has none: the norms' epsilon, and the longest block in tokens, the text's last one included.
    eps = 1e-6
    longest: int | None = None
    # Its class among a config's architectures, in small letters.
    sign = "dflashdraftmodel"
    # How many rows of a block come before the first that drafts.
    leading = 1

    def __init__(self, config: Config, target: DraftedModel) -> None:
        super().__init__()
        self._shape, self._softcap = Shape.of(config, self.eps), setting(config, "final_logit_softcapping")
        self.taps = tuple(required(config, "target_layer_ids"))
        self._mask = _mask_token(config)
        self.rows = self.block_tokens(config) - 1
        if not 0 < self.rows <= MOST_ROWS or list(self.taps) != sorted(set(self.taps)):
            raise ValueError("its block_size or target_layer_ids have no meaning")
        if not 0 <= self._mask < (target.vocabulary or 0):
            raise ValueError(f"mask_token_id is {self._mask}, of {target.vocabulary} tokens")
        # A block's logits are kept until the text goes on.
        self.growing = (*self._shape.growing(), (2 * (target.vocabulary or 0), self.rows))
        self.fc = nn.Linear(len(self.taps) * (target.hidden or self._shape.hidden), self._shape.hidden, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(self._shape.hidden, self._shape.eps) for _ in range(2))
        self.layers = [self.layer(config, self._shape, window) for window in self._shape.windows]
        self._rope = self._shape.rope(config)

    def layer(self, config: Config, shape: Shape, window: int | None) -> Any:
        return Layer(shape, window)

    @classmethod
    def block_tokens(cls, config: Config) -> int:
        """Returns the tokens of a block, the text's last one included."""
        trained = int(required(config, "block_size"))
        return min(trained, int(setting(config, "runtime_block_size", cls.longest or trained)))

    @classmethod
    def claims(cls, config: Config) -> bool:
        names = names_of(config)
        return not any(n.startswith(_OTHERS) for n in names) and any([config.get("dflash_config"), cls.sign in names])

    @classmethod
    def made_for(cls, config: Config) -> DraftedModel:
        return DraftedModel(config.get("hidden_size"), config.get("vocab_size"), setting(config, "num_target_layers"))

    @classmethod
    def made(cls: type[_Own], config: Config, shapes: Shapes | None, target: DraftedModel) -> _Own:
        return cls(config, target)

    @classmethod
    def renamed(cls, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name.removeprefix("model."): a for name, a in weights.items()}

    def text(self, shared: Shared) -> BlockText:
        return BlockText(self, shared)

    def follow(self, states: mx.array, caches: Sequence[Any]) -> None:
        """Takes in the text's next tokens by the states (1, n, taps * hidden) of the model."""
        read = self.hidden_norm(self.fc(states.astype(self.norm.weight.dtype)))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.follow(read, self._rope, cache)

    def block(self, last: mx.array, shared: Shared, caches: Sequence[Any]) -> mx.array:
        """Returns the normed states (1, rows, hidden) of the rows that draft, after the text's ``last`` token (1,)."""
        masks = mx.full((self.rows + self.leading - 1,), self._mask, mx.int32)
        x = self.entering(shared.embedded(mx.concatenate([last, masks]))).astype(self.norm.weight.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, self._rope, cache)
        made: mx.array = self.norm(x)
        return made[:, self.leading :]

    def entering(self, embedded: mx.array) -> mx.array:
        return embedded

    def leaving(self, logits: mx.array) -> mx.array:
        return logits if self._softcap is None else mx.tanh(logits / self._softcap) * self._softcap

    def chosen(self, block: Block, row: int, before: mx.array) -> mx.array:
        """Returns logits (vocabulary,) of a row; ``before`` (1,): the token before the row's."""
        return block.logits[0, row]


@dataclass(frozen=True)
class Block:
    """A drafted block: its states (1, rows, hidden) and logits (1, rows, vocabulary)."""

    states: mx.array
    logits: mx.array


class BlockText:
    """A text in the caches of a drafter of blocks."""

    def __init__(self, network: DFlash, shared: Shared) -> None:
        self._network, self._shared = network, shared
        self._caches = network._shape.caches()
        self._last: mx.array | None = None  # (1,): the text's last token
        self._block: Block | None = None

    @property
    def arrays(self) -> list[mx.array]:
        held = [a for c in self._caches for a in (c.keys, c.values)]
        return [a for a in (*held, self._last) if a is not None]

    def begin(self, states: mx.array, following: mx.array) -> None:
        self._block = None
        self._network.follow(states, self._caches)
        self._last = following[-1:]

    def logits(self, drafted: Sequence[int]) -> mx.array | None:
        network, row = self._network, len(drafted)
        if self._last is None or row >= network.rows:
            return None
        if self._block is None:
            states = network.block(self._last, self._shared, self._caches)
            self._block = Block(states, network.leaving(self._shared.logits(states)))
        before = mx.array(list(drafted[-1:]), mx.int32) if drafted else self._last
        return network.chosen(self._block, row, before)

    def cut(self) -> None:
        self._block = None


def _mask_token(config: Config) -> int:
    family = str(config.get("model_type", "")).partition("_")[0]
    found = setting(config, "mask_token_id", _MASKS.get(family))
    if found is None:
        raise ValueError("config.json has no mask_token_id")
    return int(found)
