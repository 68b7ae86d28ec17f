"""One cache's keys and values on disk: whole blocks of tokens in a file, the last few in memory.

In the file each head's tokens follow each other, so that they are read at one go into the array that mlx-lm's own cache
would have, with the room behind them that its has: the same shapes and strides, so the same kernels and bits. What is
kept is one value, replaced by another when all of it is there: whoever has the one of before can go back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import QuantizedKVCache

from outcore.disk.layout import Extent
from outcore.modules.cache_rollback import KEEPER
from outcore.modules.hooks import handle
from outcore.sizes import BLOCK, round_up

from .away import Away, as_away, as_plain
from .scratch import Region, Scratch

TOKENS = 256
"""Of a block: mlx-lm's caches grow by as many (``KVCache.step``)."""

WRITTEN = 2048
"""Tokens that are copied out of the caches at a time."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """Keys or values, or a part of quantized ones: (1, ``heads``, tokens, ``features``)."""

    path: str
    heads: int
    features: int
    dtype: mx.Dtype

    @property
    def row(self) -> int:
        """Bytes of one token of one head."""
        return self.features * self.dtype.size


@dataclass(frozen=True)
class Form:
    """Where tensors lie in a region with room for so many ``tokens``."""

    tensors: tuple[Tensor, ...]
    tokens: int = 0

    def places(self) -> list[int]:
        """Of each tensor's first head in a region; and the region's end."""
        places = [0]
        for t in self.tensors:
            places.append(places[-1] + t.heads * self.head(t))
        return places

    def head(self, t: Tensor) -> int:
        """Bytes from one head to the next."""
        return round_up(self.tokens * t.row, BLOCK)

    def slot_places(self, room: int) -> list[int]:
        """Of each array with room for so many tokens in a slot; and their end."""
        places = [0]
        for t in self.tensors:
            places.append(round_up(places[-1] + t.heads * room * t.row, BLOCK))
        return places


@dataclass(frozen=True)
class HeldCache:
    """What is kept of a cache.

    Attributes:
        offset: tokens.
        room: for so many the cache's arrays had room.
        written: tokens in ``region``; those behind are in ``tail``, (heads, tokens, bytes) of each tensor.
        changes: how often tokens on disk were taken back, so that others took their places.
        bits: (group size, bits) that it is to be quantized with when it is needed next.
    """

    offset: int = 0
    room: int = 0
    form: Form = Form(())
    region: Region | None = None
    written: int = 0
    tail: tuple[Bytes, ...] = ()
    bits: tuple[int, int] | None = None
    changes: int = 0


class KeptTokens:
    """What keeps a cache's keys and values.

    Args:
        scratch: where; ``tokens``: room in it at first.
    """

    __slots__ = ("__weakref__", "held", "scratch", "tokens")

    def __init__(self, scratch: Scratch, tokens: int, held: HeldCache = HeldCache()) -> None:
        self.scratch, self.tokens, self.held = scratch, tokens, held

    def mark(self, cache: Any) -> Callable[[], None]:
        held, offset, away = self.held, cache.offset, isinstance(cache, Away)
        own = {} if away else {name: tree_map(handle, vars(cache)[name]) for name in ("keys", "values")}

        def back() -> None:
            self.held = held
            if away:
                self.leave(cache)
            else:
                # It could not be put away.
                as_plain(cache)
                cache.__dict__.update(own)
            cache.offset = offset

        return back

    # Out of memory

    def leave(self, cache: Any) -> None:
        """The cache holds nothing itself any more."""
        as_away(cache)
        cache.__dict__[KEEPER] = self

    def put_away(self, cache: Any, base: int) -> None:
        """Keep what a cache holds, of which the first ``base`` tokens are kept already.

        Raises:
            StoreError: it could not be written; nothing has changed.
        """
        if cache.keys is None:
            self.held = HeldCache()
        else:
            self.held = self._with(_arrays(cache), cache.offset, base)
        self.leave(cache)

    def _with(self, arrays: Sequence[tuple[str, mx.array]], offset: int, base: int) -> HeldCache:
        held = self.held
        tensors = tuple(Tensor(path, a.shape[1], a.shape[3], a.dtype) for path, a in arrays)
        if tensors != held.form.tensors or held.region is None or offset > held.form.tokens:
            form = Form(tensors, max(self.tokens, 1 << max(12, (offset - 1).bit_length())))
            held = HeldCache(form=form, region=self.scratch.take(form.places()[-1]))
            base = 0
        base = min(base, offset)
        if base < held.written:
            # Taken back, into what is on disk.
            held = replace(held, written=base, tail=(), changes=held.changes + 1)
        whole = offset // TOKENS * TOKENS
        plain = [a for _, a in arrays]
        if whole > held.written:
            self._write(held, plain, held.written // TOKENS * TOKENS, whole)
            tail = _copied(plain, whole, offset)
            held = replace(held, written=whole, tail=tuple(_with_room(t) for t in tail))
        elif offset > base or not held.tail:
            held = replace(held, tail=_longer(held, plain, base, offset))
        return replace(held, offset=offset, room=plain[0].shape[2], bits=None)

    def _write(self, held: HeldCache, arrays: Sequence[mx.array], begin: int, end: int) -> None:
        assert held.region is not None
        for t, a, place in zip(held.form.tensors, arrays, held.form.places(), strict=False):
            for first in range(begin, end, WRITTEN):
                (part,) = _copied([a], first, min(end, first + WRITTEN))
                for h in range(t.heads):
                    at = held.region.offset + place + h * held.form.head(t) + first * t.row
                    self.scratch.write(at, part[h].reshape(-1).data)

    # Into memory

    def on_disk(self, offset: int) -> int:
        """Of the cache's first ``offset`` tokens, those that have to be read."""
        return min(self.held.written, offset)

    def extents(self, offset: int, at: int) -> list[Extent]:
        """The reads that bring these tokens into a slot, in which the arrays begin at byte ``at``."""
        held, tokens = self.held, self.on_disk(offset)
        if not tokens or held.region is None:
            return []
        found = []
        for t, place, array in zip(
            held.form.tensors, held.form.places(), held.form.slot_places(held.room), strict=False
        ):
            for h in range(t.heads):
                start = held.region.offset + place + h * held.form.head(t)
                into = at + array + h * held.room * t.row
                whole = start % BLOCK == into % BLOCK == tokens * t.row % BLOCK == 0
                found.append(Extent(self.scratch.file.path, start, tokens * t.row, into, whole))
        return found

    def finish(self, offset: int, target: Bytes) -> None:
        """Put what is not on disk where it belongs in a slot, ``target`` beginning where the arrays do."""
        held, tokens = self.held, self.on_disk(offset)
        if tokens == offset:
            return
        for t, tail, array in zip(held.form.tensors, held.tail, held.form.slot_places(held.room), strict=False):
            whole = target[array : array + t.heads * held.room * t.row].reshape(t.heads, held.room, t.row)
            whole[:, tokens:offset] = tail[:, : offset - tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's arrays, in a slot or in memory."""
        return self.held.form.slot_places(self.held.room)[-1]

    def come(self, cache: Any, slot: mx.array) -> None:
        """The cache is mlx-lm's own again, with these bytes (uint8) as its arrays. Nothing is evaluated."""
        held = self.held
        as_plain(cache)
        if not cache.offset or held.region is None:
            cache.keys = cache.values = None
            return
        places = held.form.slot_places(held.room)
        arrays = []
        for t, at in zip(held.form.tensors, places, strict=False):
            view = slot[at : at + t.heads * held.room * t.row].view(t.dtype)
            arrays.append((t.path, view.reshape(1, t.heads, held.room, t.features)))
        pair = tree_unflatten(arrays)
        if held.bits is not None:
            group_size, bits = held.bits
            pair = [mx.quantize(a, group_size=group_size, bits=bits) for a in pair]
        cache.keys, cache.values = pair

    def bring_back(self, cache: Any) -> None:
        self.come(cache, mx.array(self.all_of(cache.offset)))
        cache.__dict__.pop(KEEPER, None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nobody keeps what is copied: while a cache is used, it holds all of its tokens itself."""
        return type(None), ()

    def all_of(self, offset: int) -> Bytes:
        """The arrays' bytes, as they would lie in a slot."""
        target = np.zeros(self.nbytes, np.uint8)
        view = target.data
        for e in self.extents(offset, 0):
            self.scratch.read(e.offset, view[e.at : e.at + e.nbytes])
        self.finish(offset, target)
        return target

    def quantized(self, cache: Any, group_size: int, bits: int) -> Any:
        """As in ``Keeper``."""
        made = QuantizedKVCache(group_size=group_size, bits=bits)
        made.offset = cache.offset
        kept = KeptTokens(self.scratch, self.tokens, replace(self.held, bits=(group_size, bits)))
        kept.leave(made)
        return made


def _arrays(cache: Any) -> list[tuple[str, mx.array]]:
    """A cache's arrays by their places in (keys, values)."""
    found: list[tuple[str, mx.array]] = tree_flatten((cache.keys, cache.values))
    return found


def _copied(arrays: Sequence[mx.array], begin: int, end: int) -> list[Bytes]:
    """Some tokens of arrays of shape (1, heads, tokens, features), as bytes (heads, tokens, bytes of a token)."""
    parts = [mx.contiguous(a[0, :, begin:end, :]).view(mx.uint8) for a in arrays]
    mx.eval(parts)
    return [np.array(p) for p in parts]


def _with_room(tail: Bytes) -> Bytes:
    made = np.empty((tail.shape[0], max(TOKENS, tail.shape[1]), tail.shape[2]), np.uint8)
    made[:, : tail.shape[1]] = tail
    return made


def _longer(held: HeldCache, arrays: Sequence[mx.array], base: int, offset: int) -> tuple[Bytes, ...]:
    """The tail with tokens behind the first ``base``. Who goes back to those finds them as they were."""
    if not held.tail:
        return tuple(_with_room(t) for t in _copied(arrays, held.written, offset))
    new = _copied(arrays, base, offset)
    first, end = base - held.written, offset - held.written
    for tail, more in zip(held.tail, new, strict=True):
        tail[:, first:end] = more
    return held.tail
