"""MLX's allocator as several models share it: its limits are the whole process's, so each model says what it needs of
them, and what there was before comes back when the last one has gone.

Wired memory is what Metal keeps resident: neither compressed nor paged in again at each use (MLX's
metal/resident.cpp; macOS 15). mlx-lm wires all that the device recommends while it generates, and nothing else ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Needs:
    """What one model needs of MLX's allocator. Bytes; those of several models are added up.

    Attributes:
        cache: freed memory that MLX may keep for reuse (``mx.set_cache_limit``); None: it says nothing of that.
        memory: that it uses at most. Where any model ``waits``, MLX lets work finish before it allocates more than
            all of them use (``mx.set_memory_limit``).
        wired: of weights, slots and all else that it has planned (``mx.set_wired_limit``). MLX refuses more than the
            device recommends (metal/allocator.cpp), so no more is asked for.
    """

    cache: int | None = None
    memory: int = 0
    waits: bool = False
    wired: int = 0


_STREAMS = 64


def despite_old_errors(call: Callable[..., Any], *args: int) -> Any:
    """``call`` of MLX's, whatever failed before it.

    Without a GPU, MLX waits for its streams in these calls (0.32.4, backend/no_gpu/allocator.cpp), and raises there,
    once for each stream, what failed on it, before it does anything. Who evaluates that work is told by its own event,
    so that nothing is lost here.
    """
    for _ in range(_STREAMS):
        try:
            return call(*args)
        except RuntimeError:
            limits.mistrust()
    return call(*args)


def clear_cache() -> None:
    """``mx.clear_cache``, whatever failed before it."""
    note_held()
    despite_old_errors(mx.clear_cache)


FULL = 0.9
"""Share of the freed memory that MLX may keep from which on it may have given some back."""

_most_held = 0


def note_held() -> int:
    """Bytes that MLX holds now, freed memory that it keeps for reuse included: what a budget counts.

    MLX keeps the peak of memory in use alone. With freed memory what it holds only grows until that is given back: so
    it is noted behind passes, and before memory is given back. Where MLX keeps all that it may, it gave the rest back,
    and may have held as much beside the peak.
    """
    global _most_held
    kept = int(mx.get_cache_memory())
    held = int(mx.get_active_memory()) + kept
    _, most = limits._limits.get("cache", (0, None))  # with every unit of a token: no call for it
    full = most is not None and kept >= most * FULL
    _most_held = max(_most_held, int(mx.get_peak_memory()) + kept if full else held)
    return held


def peak_held() -> int:
    """The most bytes that MLX has held since ``reset_peak``, freed memory included, as far as was noted; at least the
    peak of memory in use."""
    note_held()
    return max(_most_held, int(mx.get_peak_memory()))


def reset_peak() -> None:
    """Count the peaks anew, with no freed memory of before."""
    global _most_held
    mx.clear_cache()
    _most_held = 0
    mx.reset_peak_memory()


class AllocatorLimits:
    """The limits, as long as somebody needs them.

    Attributes:
        counts: MLX's count of what is under way is right, as far as is known.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a model may be collected while it is held
        self._needs: dict[int, Needs] = {}
        self._releases: dict[int, weakref.finalize[Any, Any]] = {}
        self._limits: dict[str, tuple[int, int]] = {}  # what there was before anybody needed them, and what we set
        self._applying = self._again = False
        self._process = os.getpid()
        self.counts = True

    def mistrust(self) -> None:
        """MLX computed something that failed: no memory limit from now on, as MLX may wait at it for ever.

        Where a task fails, queueing the next one may raise before the end of the first is noted (``dispatch`` in MLX
        0.32.4's cpu/encoder.h); near a memory limit MLX waits as long as anything is counted as under way.
        """
        with self._lock:
            self.counts = False
            self._apply()

    @property
    def held(self) -> bool:
        """Whether any model needs any."""
        return bool(self._needs)

    def hold(self, owner: object, needs: Needs) -> weakref.finalize[Any, Any]:
        """Set the limits with what ``owner`` needs, in place of what it needed before.

        Returns:
            gives them back when it is called, or when ``owner`` is collected.
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
        """Wire what models need, whatever was set meanwhile. Does nothing where none does."""
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
        # A model may be collected in the middle, and give its own back: then once more. MLX hangs where a forked
        # process sets limits.
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
        """Set one; None: what it was before anybody needed it, unless somebody else has set it since."""
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
"""This process's."""
