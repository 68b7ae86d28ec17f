"""What a running model does at one moment, as plain data.

Everything is read from another thread than the one that computes. Nothing of the engine's is locked or waited for: each
number is right by itself, and may be a moment older or newer than the one beside it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.session import Session

CODES = {"disk": "d", "ready": "r", "loading": "l", "computing": "c", "memory": "m"}
"""Where a layer's weights are, a letter each in ``layers``: on disk; in a slot; on their way into one; in a slot that
is being computed from; in memory. A layer in several parts has the letter of the one that comes last here."""

RANKS = {code: rank for rank, code in enumerate(CODES.values())}

RATE_S = 2.0
"""Seconds that the disk's rate and stalls are of."""

TOKENS_S = 10.0
"""Seconds that tokens' and sweeps' rates are of; a sweep may take that long."""

NOTES = 8
"""Notes that are told, the last ones."""


@dataclass(frozen=True)
class Counters:
    """A model's counters at ``at``, seconds of a clock that only goes forward."""

    at: float
    sweeps: int
    units: int
    tokens: int
    bytes_read: int
    stall_s: float


class SnapshotRecorder:
    """Takes snapshots of one model; for one thread at a time, which is not the model's.

    Args:
        name: what the model is called.
    """

    def __init__(self, session: Session, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = weakref.ref(session)
        self._clock = clock
        self._past: deque[Counters] = deque()
        self._units: Any = None  # those that ``_places`` are of
        self._places: list[int | None] = []  # each unit's layer; None: a slice of the head
        self.name = name

    def of(self, session: Session) -> bool:
        """Whether it is this model's."""
        return self._session() is session

    @property
    def gone(self) -> bool:
        """Whether the model was dropped."""
        return self._session() is None

    def take(self) -> dict[str, Any] | None:
        """The model as it is now; None: it is gone. docs/usage.md says what is in it."""
        session = self._session()
        if session is None or session.closed:
            return None
        plan, m, streaming = session.plan, session.metrics, session.streaming
        now = self._note(session)
        quick, slow = self._since(RATE_S), self._since(TOKENS_S)
        layers, head = self._strip(session)
        moved = quick is not None and (now.sweeps, now.units, now.tokens) != (quick.sweeps, quick.units, quick.tokens)
        working = session.exclusive.computing or moved
        sweeps = _rate(slow, now, "sweeps")
        return {
            "name": self.name,
            "state": "working" if working else "idle",
            "layers": layers,
            "head": head,
            "resident_layers": len(plan.resident),
            "streamed_layers": len(plan.streamed),
            "shed_layers": len(session.residency.shed_layers) if session.residency is not None else 0,
            "slots": plan.slots,
            "context": plan.context,
            "memory": _memory(session),
            "disk": {
                "how": session.io,
                "bytes": now.bytes_read,
                "gbps": _scaled(_rate(quick, now, "bytes_read"), 1e-9),
                "ceiling_gbps": _ceiling(session),
                "stall_s": round(now.stall_s, 3),
                "stalled": _scaled(_rate(quick, now, "stall_s")),
            },
            "tokens": {
                "made": now.tokens,
                "per_s": _scaled(_rate(slow, now, "tokens")),
                "per_sweep": _per_sweep(slow, now),
                "sweeps": now.sweeps,
                "sweeps_per_s": _scaled(sweeps),
                "sweep_s": _scaled(streaming.sweep_s) if streaming is not None else None,
                # Of a prompt, or of a draft.
                "in_sweep": streaming.sweep_tokens if streaming is not None and working else 0,
            },
            "drafts": {
                "source": session.drafting.name if session.drafting is not None else None,
                "drafted": m.drafted,
                "accepted": m.accepted,
            },
            "notes": list(session.notes[-NOTES:]),
        }

    def _note(self, session: Session) -> Counters:
        """The counters now, which later ones are compared with."""
        m, past = session.metrics, self._past
        now = Counters(self._clock(), m.sweeps, m.units, m.tokens, m.bytes_read, m.stall_s)
        if past and (now.sweeps < past[-1].sweeps or now.bytes_read < past[-1].bytes_read):
            past.clear()  # they were reset
        past.append(now)
        # One that is older stays, for the whole of the time; none from when nobody watched.
        while len(past) > 2 and past[1].at <= now.at - TOKENS_S:
            past.popleft()
        while past[0].at < now.at - 2 * TOKENS_S:
            past.popleft()
        return now

    def _since(self, seconds: float) -> Counters | None:
        """The counters of that many seconds ago, or the oldest; None: there are none but the last."""
        past = list(self._past)
        older = [c for c in past if c.at <= past[-1].at - seconds]
        return (older[-1] if older else past[0]) if len(past) > 1 else None

    def _strip(self, session: Session) -> tuple[str, str]:
        """A letter for each layer, and one for a head that is streamed, else none."""
        plan, streaming = session.plan, session.streaming
        strip = [CODES["disk"]] * len(session.size.layers)
        head = CODES["disk"] if plan.head_streamed else ""
        for i in plan.resident:
            strip[i] = CODES["memory"]
        if streaming is None or session.residency is None:
            return "".join(strip), head
        if streaming.units is not self._units:
            self._units = streaming.units
            places = {id(module): i for i, module in enumerate(session.residency.modules)}
            self._places = [places.get(id(u.layer.module)) if u.rows is None else None for u in streaming.units]
        places_of = self._places
        for unit, state in streaming.ring.glance():
            code, place = CODES[state], places_of[unit] if unit < len(places_of) else None
            if place is None:
                head = max(head, code, key=lambda c: RANKS.get(c, -1))
            else:
                strip[place] = max(strip[place], code, key=RANKS.__getitem__)
        return "".join(strip), head


def _memory(session: Session) -> dict[str, int]:
    import mlx.core as mx

    from ..machine.allocator import peak_held

    plan = session.plan
    return {
        "budget": plan.budget_bytes,
        "planned": plan.peak_bytes,
        # Of the process: all its models together.
        "active": int(mx.get_active_memory()),
        "kept": int(mx.get_cache_memory()),
        "peak": peak_held(),
        "weights": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        "experts": plan.pool_bytes,
        "caches": plan.cache_bytes,
        "activations": plan.activation_bytes,
        "allocator": plan.allocator_bytes,
    }


def _ceiling(session: Session) -> float | None:
    """GB/s that the disk gave when it was calibrated; None: it was not, or reads go through the page cache."""
    calibration = session.residency.calibration if session.residency is not None else None
    if calibration is None or not calibration.measured or session.io != "direct":
        return None
    return round(calibration.read_gbps, 3)


def _rate(then: Counters | None, now: Counters, name: str) -> float | None:
    """By how much a counter grows in a second."""
    if then is None or now.at <= then.at:
        return None
    grown: float = getattr(now, name) - getattr(then, name)
    return grown / (now.at - then.at)


def _per_sweep(then: Counters | None, now: Counters) -> float | None:
    if then is None or now.sweeps <= then.sweeps:
        return None
    return round((now.tokens - then.tokens) / (now.sweeps - then.sweeps), 3)


def _scaled(value: float | None, by: float = 1.0) -> float | None:
    return None if value is None else round(value * by, 4)
