"""Takes snapshots of a running model from another thread than the one that computes.

Nothing is locked: each number is right by itself, but may be a moment older or newer than the next one.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.session import Session

CODES = "drlcm"
"""The letters of ``layers``, one per layer, for where its weights are: on disk, ready in a slot, loading into a slot,
computing from a slot, in memory. A layer of several parts gets the letter that comes last here."""

RATE_S = 2.0
"""Seconds over which the disk's rate and stalls are averaged."""

TOKENS_S = 10.0
"""Seconds over which rates of tokens and forward passes are averaged; one pass may take that long."""

NOTES = 8

Counters = dict[str, float]
"""A model's counters, and the monotonic time ``at`` which they were read, in seconds."""


class SnapshotRecorder:
    """Takes snapshots of one model and keeps past counters for the rates. Not thread-safe."""

    def __init__(self, session: Session, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = weakref.ref(session)
        self._clock = clock
        self._past: deque[Counters] = deque()
        self.name = name

    @property
    def session(self) -> Session | None:
        """The model's session; None if it was closed or dropped."""
        session = self._session()
        return None if session is None or session.closed else session

    def take(self) -> dict[str, Any] | None:
        """Returns the model's state (fields: docs/usage.md); None if it was closed or dropped."""
        if (session := self.session) is None:
            return None
        plan, m, streaming, residency = session.plan, session.metrics, session.streaming, session.residency
        now = self._note(session)
        quick, slow = self._since(RATE_S), self._since(TOKENS_S)
        layers, head = _strip(session)
        moved = any(now[name] != quick[name] for name in ("sweeps", "units", "tokens"))
        working = session.exclusive.computing or moved
        measured = residency is not None and residency.calibration.measured and session.io == "direct"
        sweeps = now["sweeps"] - slow["sweeps"]
        return {
            "name": self.name,
            "state": "working" if working else "idle",
            "layers": layers,
            "head": head,
            "resident_layers": len(plan.resident),
            "streamed_layers": len(plan.streamed),
            "shed_layers": len(residency.layers.shed_layers) if residency is not None else 0,
            "slots": plan.slots,
            "context": plan.context,
            "memory": _memory(session),
            "disk": {
                "how": session.io,
                "bytes": m.bytes_read,
                "gbps": _rate(quick, now, "bytes_read", 1e-9),
                # From calibration, of direct reads; reads through the page cache may be faster.
                "ceiling_gbps": round(residency.calibration.read_gbps, 3) if residency and measured else None,
                "stall_s": round(m.stall_s, 3),
                "stalled": _rate(quick, now, "stall_s"),
            },
            "tokens": {
                "made": m.tokens,
                "per_s": _rate(slow, now, "tokens"),
                "per_sweep": round((now["tokens"] - slow["tokens"]) / sweeps, 3) if sweeps > 0 else None,
                "sweeps": m.sweeps,
                "sweeps_per_s": _rate(slow, now, "sweeps"),
                "sweep_s": round(streaming.pass_s, 4) if streaming and streaming.pass_s is not None else None,
                # More than one in prefill, and when drafted tokens are verified.
                "in_sweep": streaming.pass_tokens if streaming is not None and working else 0,
            },
            "drafts": {
                "source": session.drafting.name if session.drafting is not None else None,
                "drafted": m.drafted,
                "accepted": m.accepted,
            },
            "notes": list(session.notes[-NOTES:]),
        }

    def _note(self, session: Session) -> Counters:
        """Reads the counters and remembers them."""
        names, past = ("sweeps", "units", "tokens", "bytes_read", "stall_s"), self._past
        now = {"at": self._clock()} | {name: getattr(session.metrics, name) for name in names}
        if past and (now["sweeps"] < past[-1]["sweeps"] or now["bytes_read"] < past[-1]["bytes_read"]):
            past.clear()  # the counters were reset
        past.append(now)
        # Keeps one entry older than TOKENS_S, so that the whole time is covered, but none older than twice that.
        while len(past) > 1 and (past[1]["at"] <= now["at"] - TOKENS_S or past[0]["at"] < now["at"] - 2 * TOKENS_S):
            past.popleft()
        return now

    def _since(self, seconds: float) -> Counters:
        older = [c for c in self._past if c["at"] <= self._past[-1]["at"] - seconds]
        return older[-1] if older else self._past[0]


def _strip(session: Session) -> tuple[str, str]:
    """Returns one letter per layer, and one for the head if that is streamed."""
    plan, streaming, residency = session.plan, session.streaming, session.residency
    resident = set(plan.resident)
    strip = ["m" if i in resident else "d" for i in range(len(session.size.layers))]
    head = "d" if plan.head_streamed else ""
    if streaming is None or residency is None:
        return "".join(strip), head
    places = {id(module): i for i, module in enumerate(residency.layers.modules)}
    units = streaming.layers.units
    # Nothing is locked, so a unit may appear twice, or late.
    ring = streaming.ring
    leases = [(each, "r") for each in list(ring.ahead)] + [(each, "c") for each in list(ring.held.values())]
    for lease, code in leases:
        unit = units[lease.unit] if lease.unit < len(units) else None
        code = code if lease.read.ready else "l"
        place = places.get(id(unit.layer.module)) if unit is not None and unit.rows is None else None
        if place is None:
            head = max(head, code, key=CODES.find)
        else:
            strip[place] = max(strip[place], code, key=CODES.find)
    return "".join(strip), head


def _memory(session: Session) -> dict[str, int]:
    import mlx.core as mx

    from ..machine.allocator import peak_held

    plan = session.plan
    # The first three are of the whole process, the others of this model's plan.
    held = {"active": mx.get_active_memory(), "kept": mx.get_cache_memory(), "peak": peak_held()}
    return held | {
        "budget": plan.budget_bytes,
        "planned": plan.peak_bytes,
        "weights": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        "experts": plan.pool_bytes,
        "caches": plan.cache_bytes,
        "activations": plan.activation_bytes,
        "allocator": plan.allocator_bytes,
    }


def _rate(then: Counters, now: Counters, name: str, unit: float = 1.0) -> float | None:
    """Returns a counter's growth per second; None if it is not known yet."""
    seconds = now["at"] - then["at"]
    return round((now[name] - then[name]) / seconds * unit, 4) if seconds > 0 else None
