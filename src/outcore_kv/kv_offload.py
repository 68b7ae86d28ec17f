"""KV offload: reads each streamed layer's keys and values into a slot before the layer is computed, and stores them
after.

Two slots form a second ring, in step with the ring of weights. While its layer is computed, a cache is mlx-lm's own,
and its arrays are views of a slot. When MLX writes new tokens, it copies an array to which others refer, so it never
writes to a slot. Afterwards whole blocks are written to the file and the rest stays in memory.

Resident layers keep their keys and values in memory as well: a byte of them costs what a byte of weights does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from outcore.disk.layout import Unit
from outcore.disk.metrics import Metrics
from outcore.disk.reader import THREADS, FileReader, Read
from outcore.disk.ring import Lease, Partly, Ring
from outcore.errors import StoreError
from outcore.machine.cache_folder import make_cache
from outcore.machine.device import device_kind
from outcore.modules.cache_rollback import KEEPER, in_memory, keeper_of
from outcore.modules.hooks import flat
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.sizes import format_size

from .cache_store import PLAIN, CacheStore, Offloaded
from .scratch import Scratch, try_folder

if TYPE_CHECKING:
    from outcore.engine.seams import KVOffloader
    from outcore.engine.session import Session
    from outcore.engine.streaming import Streaming

__all__ = ["check_room", "offloader", "try_folder"]
SLOTS = 2

KV_FOLDER = "kv"
# Most tokens for which each cache has room in the file from the start. The file is sparse.
LONGEST = 1 << 20


@dataclass(frozen=True)
class KvLayer:
    """A layer whose caches are offloaded: the id of its module, its name, and the numbers of its caches."""

    module: int
    name: str
    caches: tuple[int, ...]


@dataclass
class _OpenLayer:
    """A layer whose caches are mlx-lm's own at the moment, because it is being computed.

    Attributes:
        slot: the slot of the caches' arrays; None: they exceed it and were read into other memory.
        caches: each with its store and how many of its tokens were stored before.
        needed: stores whose tokens are in the slot, and how many, even if their caches were replaced later.
        arrived: whether the slot's bytes have arrived.
    """

    slot: int | None
    caches: list[tuple[Any, CacheStore, int]] = field(default_factory=list)
    needed: list[tuple[CacheStore, int]] = field(default_factory=list)
    lease: Lease | None = None
    arrived: bool = False


# What a prefetch read: the store, its region and changes, the room of its arrays, and the number of tokens.
_Was = tuple[CacheStore, object, int, int]


class KvDisk:
    """Offloads the caches of a model.

    Args:
        layers: in the order of a pass.
        tokens: number of tokens for which each cache has room in the file at first.
        drain: waits for the layers that are being computed, so that slots are released.
    """

    def __init__(
        self,
        layers: Sequence[KvLayer],
        scratch: Scratch,
        *,
        slot_bytes: int,
        tokens: int,
        drain: Callable[[], None],
        metrics: Metrics,
        device: str,
        threads: int = THREADS,
    ) -> None:
        self._layers = list(layers)
        self._index: Mapping[int, int] = {layer.module: i for i, layer in enumerate(layers)}
        self._scratch, self._tokens, self._drain, self._device = scratch, tokens, drain, device
        self._metrics = metrics
        self._reader = FileReader([scratch.file], threads=threads, metrics=metrics)
        self._open: dict[int, _OpenLayer] = {}
        self._order: list[int] = []
        self._last: list[list[weakref.ref[Any]]] = [[] for _ in layers]  # caches that each layer used last
        self._nothing = mx.zeros((0,), dtype=mx.uint8)
        self._read: weakref.WeakKeyDictionary[Read, list[_Was]] = weakref.WeakKeyDictionary()
        self._ring = self._make_ring(slot_bytes)

    def _make_ring(self, slot_bytes: int) -> Ring:
        self.slot_bytes = slot_bytes
        units = [Unit(f"{layer.name}'s keys and values", (), (), slot_bytes) for layer in self._layers]
        order = self._order or range(len(units))
        ring = Ring(units, self._reader, slots=SLOTS, order=order, metrics=self._metrics, device=self._device)
        ring.partly = self._reads
        return ring

    def resize(self, slot_bytes: int) -> None:
        if slot_bytes != self.slot_bytes:
            self._ring.close(reader=False)
            self._ring = self._make_ring(slot_bytes)

    def expect(self, modules: Sequence[int]) -> None:
        order = [self._index[m] for m in modules if m in self._index]
        if order:
            self._order = order
            self._ring.reorder(order)

    def adopt(self, caches: Sequence[Any]) -> None:
        each = flat(caches)
        for layer in self._layers:
            for n in layer.caches:
                cache = each[n] if n < len(each) else None
                store = keeper_of(cache)
                if isinstance(store, CacheStore) and store.scratch is not self._scratch:
                    # Another model, perhaps with the same weights, stored it.
                    in_memory([cache])
                if type(cache) in PLAIN and keeper_of(cache) is None and _alone(cache):
                    CacheStore(self._scratch, self._tokens).save(cache, 0)

    # A pass

    def begin_pass(self) -> None:
        for turn in self._open.values():
            if turn.lease is not None:
                self._ring.release(turn.lease)
        self._open.clear()
        self._scratch.tidy()
        self._ring.begin_pass()

    def enter(self, module: int, caches: Sequence[Any], building: bool) -> None:
        """Gives a layer's caches their arrays before the layer's call. ``building``: only a graph is built, perhaps of
        several passes, and the read is waited for later (``arrive``)."""
        unit = self._index.get(module)
        if unit is None:
            return
        turn = self._open.get(unit)
        if turn is not None:
            # A further pass that shares this reading; quantizing may have replaced the caches.
            turn.caches = [self._replaced(old, c) for old, c in zip(turn.caches, _offloadable(caches), strict=True)]
            return
        mine = _offloadable(caches)
        self._last[unit] = [weakref.ref(c) for c in mine]
        slot = (self._ring.next_slot + sum(t.lease is None for t in self._open.values())) % SLOTS
        turn = self._open[unit] = _OpenLayer(slot)
        if not building:
            turn.lease = self._ring.take(unit)
        turn.caches = [(c, self._store_of(c), c.offset if isinstance(c, Offloaded) else 0) for c in mine]
        here = [(c, store) for c, store, base in turn.caches if base]
        turn.needed = [(store, base) for _, store, base in turn.caches if base]
        if not self._fit([store for _, store in here]):
            turn.slot = None
        at = self._ring.slots[slot].base
        for cache, store in here:
            end = at + store.nbytes
            if turn.slot is None:
                store.attach(cache, mx.array(store.read_all(cache.offset)))
            else:
                store.attach(cache, self._ring.slots[slot].array[at:end])
            at = end
        for cache in mine:
            if isinstance(cache, Offloaded):
                self._store_of(cache).attach(cache, self._nothing)

    def _store_of(self, cache: Any) -> CacheStore:
        store = keeper_of(cache)
        if not isinstance(store, CacheStore):
            store = cache.__dict__[KEEPER] = CacheStore(self._scratch, self._tokens)
        return store

    def _fit(self, store: Sequence[CacheStore]) -> bool:
        """Whether a slot has room for these caches. Texts that no room was reserved for may outgrow it."""
        return sum(k.nbytes for k in store) <= self.slot_bytes

    def arrive(self, module: int) -> None:
        unit = self._index.get(module)
        turn = None if unit is None else self._open.get(unit)
        if unit is None or turn is None or turn.arrived:
            return
        if turn.lease is None:
            turn.lease = self._ring.take(unit)
        if turn.slot is None:
            turn.arrived = True
            return
        assert turn.lease.slot == turn.slot
        if not self._matches(turn):
            self._ring.again(turn.lease)
        if not turn.lease.read.ready:
            self._drain()
        self._ring.wait(turn.lease)
        at, payload = 0, np.frombuffer(self._ring.slots[turn.slot].payload, np.uint8)
        for store, base in turn.needed:
            store.finish(base, payload[at : at + store.nbytes])
            at += store.nbytes
        turn.arrived = True

    def computed(self, module: int) -> None:
        """Stores the keys and values of a computed layer. Raises StoreError if that fails; they stay in memory then."""
        unit = self._index.get(module)
        turn = None if unit is None else self._open.get(unit)
        if unit is None or turn is None:
            return
        for cache, store, base in turn.caches:
            if not isinstance(cache, Offloaded):
                if _alone(cache):
                    store.save(cache, base)
                else:
                    cache.__dict__.pop(KEEPER, None)  # caches of several sequences stay in memory
        del self._open[unit]
        if turn.lease is not None:
            self._ring.release(turn.lease)

    def abandon(self) -> None:
        self._open.clear()
        self._ring.abandon()

    def close(self) -> None:
        self._open.clear()
        self._ring.close()
        self._scratch.close()

    # Reads

    def _reads(self, unit: int) -> Partly:
        """Returns the reads of a layer's keys and values: the stored tokens of the caches of its last call."""
        turn = self._open.get(unit)
        if turn is not None and not turn.arrived:
            # The layer's graph is built, but not computed yet.
            needed = turn.needed
        else:
            caches = [c for ref in self._last[unit] if isinstance(c := ref(), Offloaded) and c.offset]
            needed = [(self._store_of(c), c.offset) for c in caches]
        extents, at, was = [], 0, list[_Was]()
        for store, tokens in needed if self._fit([store for store, _ in needed]) else ():
            extents += store.extents(tokens, at)
            was.append((store, (store.held.region, store.held.changes), store.held.room, store.on_disk(tokens)))
            at += store.nbytes

        def begun(read: Read) -> None:
            self._read[read] = was

        return Partly(extents, (), begun)

    def _matches(self, turn: _OpenLayer) -> bool:
        assert turn.lease is not None
        needed = [(k, (k.held.region, k.held.changes), k.held.room, k.on_disk(base)) for k, base in turn.needed]
        was = self._read.get(turn.lease.read, [])
        return len(was) == len(needed) and all(
            a[:3] == b[:3] and a[3] >= b[3] for a, b in zip(was, needed, strict=True)
        )

    def _replaced(self, old: tuple[Any, CacheStore, int], now: Any) -> tuple[Any, CacheStore, int]:
        if old[0] is now:
            return old
        store = CacheStore(self._scratch, self._tokens)
        now.__dict__[KEEPER] = store
        return now, store, 0


def _offloadable(caches: Sequence[Any]) -> list[Any]:
    return [c for c in caches if (isinstance(c, Offloaded) or type(c) in PLAIN) and _alone(c)]


def _alone(cache: Any) -> bool:
    if isinstance(cache, Offloaded) or cache.keys is None:
        return True
    keys = cache.keys[0] if isinstance(cache.keys, list | tuple) else cache.keys
    return bool(keys.shape[0] == 1)


def check_room(size: ModelSize, plan: Plan, kv_dir: str | Path | None, io: str) -> None:
    _scratch(size, plan, kv_dir, io).close()


def _scratch(size: ModelSize, plan: Plan, kv_dir: str | Path | None, io: str) -> Scratch:
    """Returns a file with room for the keys and values of a plan's context, in ``kv_dir`` or the cache folder."""
    scratch = Scratch(make_cache() / KV_FOLDER if kv_dir is None else Path(kv_dir), io)
    need = sum(size.kv_read(i, plan.context) for i in plan.streamed)
    if need > (free := scratch.free_bytes):
        scratch.close()
        raise StoreError(
            f"{scratch.folder}: keys and values of {plan.context} tokens take {format_size(need)}, but only "
            f"{format_size(free)} may be used there: free some, name another folder (OUTCORE_CACHE, or kv_dir), or "
            "ask for fewer tokens"
        )
    return scratch


def offloader(streaming: Streaming, session: Session, plan: Plan) -> KVOffloader | None:
    kv = streaming.kv
    if kv is not None and plan.kv_slot:
        kv.resize(plan.kv_slot)
    if kv is not None or not plan.kv_slot:
        return kv
    profile, reading, there = session.profile, session.reading, weakref.ref(streaming)

    def drain() -> None:
        if (streaming := there()) is not None:
            streaming.drain()

    return KvDisk(
        [KvLayer(id(profile.layers[i].module), profile.layers[i].path, n) for i, n in profile.kept_apart.items()],
        _scratch(session.size, plan, reading.kv_dir, reading.io),
        slot_bytes=plan.kv_slot,
        tokens=max(plan.context, min(session.max_context or 0, LONGEST)),
        drain=drain,
        metrics=session.metrics,
        device=device_kind(),
        threads=reading.threads or THREADS,
    )
