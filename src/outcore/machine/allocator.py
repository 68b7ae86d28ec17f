"""MLX's memory: limits of its allocator, shared by all models of the process, and the placement of slots.

Each model registers its needs; the limits from before are set again when the last model is closed. Metal neither
compresses nor pages out wired memory (MLX's metal/resident.cpp; macOS 15). mlx-lm wires all that the device recommends
while it generates, and nothing otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Needs:
    """One model's needs in bytes. The limits are set to the sums over all models.

    Attributes:
        cache: freed memory that MLX may keep for reuse (``mx.set_cache_limit``); None: no preference.
        memory: most bytes in use. If any model ``waits``, their sum becomes ``mx.set_memory_limit``: at it, MLX waits
            for queued work to finish before it allocates more.
        wired: weights, slots and everything else planned (``mx.set_wired_limit``), at most what the device recommends,
            since MLX refuses more (metal/allocator.cpp).
    """

    cache: int | None = None
    memory: int = 0
    waits: bool = False
    wired: int = 0


_STREAMS = 64


def despite_old_errors(call: Callable[..., Any], *args: int) -> Any:
    """Calls an MLX function, again and again until it raises no error of earlier work.

    Without a GPU, MLX waits for its streams in these calls (0.32.4, backend/no_gpu/allocator.cpp) and raises each
    stream's earlier failure once, before it does anything. No failure is hidden: evaluating that work raises it too.
    """
    for _ in range(_STREAMS):
        try:
            return call(*args)
        except RuntimeError:
            limits.mistrust()
    return call(*args)


def clear_cache() -> None:
    """Calls ``mx.clear_cache``, even after failed work."""
    note_held()
    despite_old_errors(mx.clear_cache)


# From this share of the cache limit on, MLX may have released freed memory already.
FULL = 0.9

_most_held = 0


def note_held() -> int:
    """Returns the bytes that MLX has now, active and freed (a budget limits both), and records the maximum.

    MLX itself records only the peak of active memory. Active and freed bytes together grow until MLX releases some, so
    this is called after passes and before memory is released. Near the cache limit MLX has released some already; then
    the maximum is taken as the peak of active memory plus the cache.
    """
    global _most_held
    kept = int(mx.get_cache_memory())
    held = int(mx.get_active_memory()) + kept
    _, most = limits._limits.get("cache", (0, None))  # runs for every unit of a token, so without a call
    full = most is not None and kept >= most * FULL
    _most_held = max(_most_held, int(mx.get_peak_memory()) + kept if full else held)
    return held


def peak_held() -> int:
    """Returns the most bytes that MLX is known to have had since ``reset_peak``, freed memory included."""
    note_held()
    return max(_most_held, int(mx.get_peak_memory()))


def reset_peak() -> None:
    """Clears MLX's cache and begins new peaks: of ``peak_held`` and MLX's own."""
    global _most_held
    mx.clear_cache()
    _most_held = 0
    mx.reset_peak_memory()


class AllocatorLimits:
    """Sets MLX's limits while any model needs them.

    Attributes:
        counts: whether MLX's count of running tasks can be relied on; False after failed work.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may call ``_release`` inside it
        self._needs: dict[int, Needs] = {}
        self._releases: dict[int, weakref.finalize[Any, Any]] = {}
        self._limits: dict[str, tuple[int, int]] = {}  # the limits before, and those set here
        self._applying = self._again = False
        self._process = os.getpid()
        self.counts = True

    def mistrust(self) -> None:
        """Stops setting a memory limit after failed work, since MLX might wait at it forever.

        If a task fails, queueing the next one may raise before MLX records the end of the first (``dispatch`` in MLX
        0.32.4's cpu/encoder.h); near a memory limit MLX waits as long as it counts any task as running.
        """
        with self._lock:
            self.counts = False
            self._apply()

    @property
    def held(self) -> bool:
        """Whether any model has registered needs."""
        return bool(self._needs)

    def hold(self, owner: object, needs: Needs) -> weakref.finalize[Any, Any]:
        """Registers what ``owner`` needs, in place of its previous needs, and sets the limits.

        Returns:
            A finalizer that withdraws them when it is called or ``owner`` is collected.
        """
        with self._lock:
            self._needs[id(owner)] = needs
            if id(owner) not in self._releases:
                release = weakref.finalize(owner, self._release, id(owner))
                release.atexit = False
                self._releases[id(owner)] = release
            self._apply()
            return self._releases[id(owner)]

    def renew(self) -> None:
        """Sets the wired limit again, in case another library changed it."""
        with self._lock:
            wired = sum(n.wired for n in self._needs.values())
            if wired and mx.metal.is_available():
                _wire(wired)

    def _release(self, number: int) -> None:
        with self._lock:
            self._releases.pop(number, None)
            if self._needs.pop(number, None) is not None:
                self._apply()

    def _apply(self) -> None:
        # If a model is collected meanwhile, this is called inside itself: then repeat. A forked process must not set
        # limits: MLX would hang.
        self._again = True
        if self._applying or os.getpid() != self._process:
            return
        self._applying = True
        try:
            while self._again:
                self._again = False
                needs = list(self._needs.values())
                caches = [n.cache for n in needs if n.cache is not None]
                waits = self.counts and any(n.waits for n in needs)
                self._set("cache", mx.set_cache_limit, sum(caches) if caches else None)
                self._set("memory", mx.set_memory_limit, sum(n.memory for n in needs) if waits else None)
                if mx.metal.is_available():
                    self._set("wired", _wire, sum(n.wired for n in needs) or None)
        finally:
            self._applying = False

    def _set(self, name: str, limit: Callable[[int], int], nbytes: int | None) -> None:
        """Sets one limit; None restores the earlier value, unless another library has set it since."""
        if nbytes is not None:
            found = despite_old_errors(limit, nbytes)
            self._limits[name] = self._limits.get(name, (found, 0))[0], nbytes
        elif name in self._limits:
            before, ours = self._limits.pop(name)
            found = despite_old_errors(limit, before)
            if name != "wired" and found != ours:
                despite_old_errors(limit, found)


def _wire(nbytes: int) -> int:
    # Before macOS 15, and without Metal 3, MLX takes the number and wires nothing.
    with suppress(ValueError, RuntimeError):
        return int(mx.set_wired_limit(min(nbytes, int(mx.device_info()["max_recommended_working_set_size"]))))
    return 0


limits = AllocatorLimits()


# CUDA's driver API, "Memory Management" and "Unified Addressing": ``CU_MEM_ADVISE_SET_PREFERRED_LOCATION``,
# ``CU_MEM_ADVISE_SET_ACCESSED_BY``, ``CU_DEVICE_CPU``
PREFERRED_LOCATION, ACCESSED_BY, CPU = 3, 5, -1


def move(target: memoryview, source: memoryview) -> None:
    """Copies ``source`` to ``target`` in host memory without holding the GIL."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def prepare_slot(address: int, nbytes: int, device: str) -> None:
    """Prepares a slot's memory for reads: large pages on Linux, placement advice on CUDA. Never fails.

    Direct reads into 4 KiB pages reach two thirds of the disk's rate (2.5 against 3.7 GB/s, 4 threads), since the
    kernel pins page by page. On CUDA, managed memory that prefers the host and is mapped by the device is read over the
    bus once a pass; without this advice pages move to the device and back (3.6 against 0.95 passes a second).

    Args:
        address: first byte of the slot's payload.
        device: ``cpu`` or ``gpu``.
    """
    if sys.platform != "linux":
        return
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t(nbytes)
    for advice in (14, 25):  # MADV_HUGEPAGE, MADV_COLLAPSE (Linux 6.1), <linux/mman.h>
        libc.madvise(ctypes.c_void_p(address), size, ctypes.c_int(advice))
    if device == "gpu":
        with suppress(OSError, AttributeError):
            cuda = ctypes.CDLL("libcuda.so.1")
            for advice, where in ((PREFERRED_LOCATION, CPU), (ACCESSED_BY, 0)):
                cuda.cuMemAdvise(ctypes.c_uint64(address), size, ctypes.c_int(advice), ctypes.c_int(where))
