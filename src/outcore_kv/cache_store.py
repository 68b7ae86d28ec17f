"""Stores one cache's keys and values on disk: whole blocks of tokens in a file, the last few tokens in memory.

In the file the tokens of a head are contiguous, so one read brings them into an array like that of mlx-lm's own cache,
spare room included: with the same shapes and strides, kernels and bits are the same. The stored state is an immutable
value that is replaced after everything is written, so an earlier state can be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from outcore.disk.layout import Extent
from outcore.modules.cache_rollback import KEEPER
from outcore.modules.hooks import handle
from outcore.sizes import BLOCK, round_up

from .scratch import Region, Scratch

# Tokens of a block, by which mlx-lm's caches grow (``KVCache.step``).
TOKENS = 256

# Most tokens that are copied out of a cache at a time.
WRITTEN = 2048

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """Keys or values, or one of the arrays of quantized ones: (1, ``heads``, tokens, ``features``)."""

    path: str
    heads: int
    features: int
    dtype: mx.Dtype

    @property
    def row(self) -> int:
        return self.features * self.dtype.size


@dataclass(frozen=True)
class Form:
    """How tensors are laid out in a region of the file with room for ``tokens`` tokens."""

    tensors: tuple[Tensor, ...]
    tokens: int = 0

    def places(self) -> list[int]:
        """Returns the byte offset of each tensor's first head in a region, and the region's end."""
        places = [0]
        for t in self.tensors:
            places.append(places[-1] + t.heads * self.head(t))
        return places

    def head(self, t: Tensor) -> int:
        return round_up(self.tokens * t.row, BLOCK)

    def slot_places(self, room: int) -> list[int]:
        """Returns the byte offset in a slot of each array with room for ``room`` tokens, and the end of the last."""
        places = [0]
        for t in self.tensors:
            places.append(round_up(places[-1] + t.heads * room * t.row, BLOCK))
        return places


@dataclass(frozen=True)
class StoredTokens:
    """The stored state of a cache.

    Attributes:
        room: number of tokens that the cache's arrays had room for.
        written: how many tokens are in ``region``; later ones are in ``tail``, (heads, tokens, bytes) for each tensor.
        changes: how often tokens on disk were trimmed and replaced by others.
        bits: (group size, bits) with which the tokens are quantized when they are read next; None: not.
    """

    offset: int = 0
    room: int = 0
    form: Form = Form(())
    region: Region | None = None
    written: int = 0
    tail: tuple[Bytes, ...] = ()
    bits: tuple[int, int] | None = None
    changes: int = 0


class CacheStore:
    """Stores a cache's keys and values; the file has room for at least ``tokens`` tokens of it."""

    __slots__ = ("__weakref__", "held", "scratch", "tokens")

    def __init__(self, scratch: Scratch, tokens: int, held: StoredTokens = StoredTokens()) -> None:
        self.scratch, self.tokens, self.held = scratch, tokens, held

    def mark(self, cache: Any) -> Callable[[], None]:
        held, offset, away = self.held, cache.offset, isinstance(cache, Offloaded)
        own = {} if away else {name: tree_map(handle, vars(cache)[name]) for name in ("keys", "values")}

        def back() -> None:
            self.held = held
            if away:
                self.detach(cache)
            else:
                # It was in memory, since it could not be stored.
                as_plain(cache)
                cache.__dict__.update(own)
            cache.offset = offset

        return back

    # To disk

    def detach(self, cache: Any) -> None:
        """Drops the cache's arrays; their contents are in this store."""
        as_offloaded(cache)
        cache.__dict__[KEEPER] = self

    def save(self, cache: Any, base: int) -> None:
        """Stores a cache of which the first ``base`` tokens are stored already. Raises StoreError if it cannot be
        written; then nothing has changed."""
        if cache.keys is None:
            self.held = StoredTokens()
        else:
            self.held = self._with(_arrays(cache), cache.offset, base)
        self.detach(cache)

    def _with(self, arrays: Sequence[tuple[str, mx.array]], offset: int, base: int) -> StoredTokens:
        held = self.held
        tensors = tuple(Tensor(path, a.shape[1], a.shape[3], a.dtype) for path, a in arrays)
        if tensors != held.form.tensors or held.region is None or offset > held.form.tokens:
            form = Form(tensors, max(self.tokens, 1 << max(12, (offset - 1).bit_length())))
            held = StoredTokens(form=form, region=self.scratch.take(form.places()[-1]))
            base = 0
        base = min(base, offset)
        if base < held.written:
            # The cache was trimmed to fewer tokens than are on disk.
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

    def _write(self, held: StoredTokens, arrays: Sequence[mx.array], begin: int, end: int) -> None:
        assert held.region is not None
        for t, a, place in zip(held.form.tensors, arrays, held.form.places(), strict=False):
            for first in range(begin, end, WRITTEN):
                (part,) = _copied([a], first, min(end, first + WRITTEN))
                for h in range(t.heads):
                    at = held.region.offset + place + h * held.form.head(t) + first * t.row
                    self.scratch.write(at, part[h].reshape(-1).data)

    # To memory

    def on_disk(self, offset: int) -> int:
        return min(self.held.written, offset)

    def extents(self, offset: int, at: int) -> list[Extent]:
        """Returns the reads that bring the tokens on disk into a slot whose arrays begin at byte ``at``."""
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
        """Copies the tokens that are in memory into a slot; ``target`` begins where the slot's arrays do."""
        held, tokens = self.held, self.on_disk(offset)
        if tokens == offset:
            return
        for t, tail, array in zip(held.form.tensors, held.tail, held.form.slot_places(held.room), strict=False):
            whole = target[array : array + t.heads * held.room * t.row].reshape(t.heads, held.room, t.row)
            whole[:, tokens:offset] = tail[:, : offset - tokens]

    @property
    def nbytes(self) -> int:
        return self.held.form.slot_places(self.held.room)[-1]

    def attach(self, cache: Any, slot: mx.array) -> None:
        """Turns the cache back into mlx-lm's class, with views of ``slot``, uint8, as its arrays. Evaluates nothing."""
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
        self.attach(cache, mx.array(self.read_all(cache.offset)))
        cache.__dict__.pop(KEEPER, None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a cache has no store; it has all tokens in memory."""
        return type(None), ()

    def read_all(self, offset: int) -> Bytes:
        target = np.zeros(self.nbytes, np.uint8)
        view = target.data
        for e in self.extents(offset, 0):
            self.scratch.read(e.offset, view[e.at : e.at + e.nbytes])
        self.finish(offset, target)
        return target

    def quantized(self, cache: Any, group_size: int, bits: int) -> Any:
        made = QuantizedKVCache(group_size=group_size, bits=bits)
        made.offset = cache.offset
        store = CacheStore(self.scratch, self.tokens, replace(self.held, bits=(group_size, bits)))
        store.detach(made)
        return made


def _arrays(cache: Any) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = tree_flatten((cache.keys, cache.values))
    return found


def _copied(arrays: Sequence[mx.array], begin: int, end: int) -> list[Bytes]:
    """Copies tokens of arrays (1, heads, tokens, features) as bytes, uint8 (heads, tokens, bytes of a token)."""
    parts = [mx.contiguous(a[0, :, begin:end, :]).view(mx.uint8) for a in arrays]
    mx.eval(parts)
    return [np.array(p) for p in parts]


def _with_room(tail: Bytes) -> Bytes:
    made = np.empty((tail.shape[0], max(TOKENS, tail.shape[1]), tail.shape[2]), np.uint8)
    made[:, : tail.shape[1]] = tail
    return made


def _longer(held: StoredTokens, arrays: Sequence[mx.array], base: int, offset: int) -> tuple[Bytes, ...]:
    """Returns the tail with the tokens from ``base`` on written into it. Earlier states may use its first tokens, which
    do not change."""
    if not held.tail:
        return tuple(_with_room(t) for t in _copied(arrays, held.written, offset))
    new = _copied(arrays, base, offset)
    first, end = base - held.written, offset - held.written
    for tail, more in zip(held.tail, new, strict=True):
        tail[:, first:end] = more
    return held.tail


KEPT = ("keys", "values")


class Offloaded:
    """First base class of a cache while its keys and values are on disk. Trimming only changes the cache's offset.

    Reading keys or values loads them for the caller only. Assigning to them, or adding tokens outside of a streamed
    layer, brings them back into memory for good.
    """

    offset: int
    # Read by ``cache_rollback``.
    outcore_away = True

    def __getattr__(self, name: str) -> Any:
        if name not in KEPT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEPT:
            self._keeper.bring_back(self)
        object.__setattr__(self, name, value)

    def __deepcopy__(self, _: Any) -> Any:
        return self._whole()

    def __reduce_ex__(self, _: Any) -> Any:
        whole = self._whole()
        return _made, (type(whole), whole.__dict__)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self._keeper.bring_back(self)
        cache: Any = self  # ``bring_back`` has made it a ``KVCache`` again
        return cache.update_and_fetch(keys, values)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """As mlx-lm's, but quantizes when the cache is read next."""
        return self._keeper.quantized(self, group_size, bits)

    def empty(self) -> bool:
        return not self.offset

    @property
    def nbytes(self) -> int:
        return self._keeper.nbytes

    @property
    def _keeper(self) -> CacheStore:
        keeper: CacheStore = self.__dict__[KEEPER]
        return keeper

    def _whole(self) -> Any:
        made = _made(type(self), self.__dict__)
        self._keeper.bring_back(made)
        return made


def _made(kind: Any, attributes: dict[str, Any]) -> Any:
    made: Any = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


_OFFLOADED: dict[type, type] = {
    # Named like mlx-lm's classes, because files of prompt caches store the class name.
    KVCache: type("KVCache", (Offloaded, KVCache), {"__module__": __name__}),
    QuantizedKVCache: type(
        "QuantizedKVCache", (Offloaded, QuantizedKVCache), {"__module__": __name__, "to_quantized": property()}
    ),
}
_PLAIN = {away: plain for plain, away in _OFFLOADED.items()}

PLAIN = tuple(_OFFLOADED)


def as_offloaded(cache: Any) -> None:
    for name in KEPT:
        cache.__dict__.pop(name, None)
    cache.__class__ = _OFFLOADED.get(type(cache), type(cache))


def as_plain(cache: Any) -> None:
    cache.__class__ = _PLAIN.get(type(cache), type(cache))
