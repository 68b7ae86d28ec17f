"""Publishes snapshots of this process's models: a thread writes them to a file several times a second."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import PlatformDirs

from ..errors import OutcoreError, StoreError
from ..machine.exclusive import SIGNALS
from ..machine.settings import OFF, setting

if TYPE_CHECKING:
    from ..engine.session import Session


# Seconds between snapshots; an unchanged one is not written again.
EVERY_S = 0.25


class Board:
    """The published models of this process. Thread-safe; forward passes never wait for its lock.

    Attributes:
        command: the name of what this process runs.
    """

    def __init__(self) -> None:
        self.command = ""
        self._lock = threading.RLock()
        self._recorders: list[SnapshotRecorder] = []
        self._stop: threading.Event | None = None  # ends the writer thread; None: no thread runs
        self._path = Path()
        self._written: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of the process and its models (fields: docs/usage.md)."""
        with self._lock:
            models = [taken for r in self._recorders if (taken := r.take()) is not None]
        at, pid = round(time.time(), 3), os.getpid()
        return {"type": "snapshot", "at": at, "pid": pid, "command": self.command, "models": models}

    def add(self, session: Session, name: str) -> None:
        with self._lock:
            if not any(r.session is session for r in self._recorders):
                recorder = SnapshotRecorder(session, name)
                self._recorders.append(recorder)
                session.closing.append(lambda: self._remove(recorder))

    def begin(self) -> bool:
        """Writes the first snapshot and starts the thread. Returns whether other processes can see the snapshots."""
        if (configured := setting("monitor")) is not None and configured.value == OFF:
            return False
        with self._lock:
            if self._stop is None:
                try:
                    self._path = make_folder() / f"{os.getpid()}.json"
                    self._write()
                except (OSError, OutcoreError) as e:
                    logging.getLogger("outcore").info("outcore monitor cannot see this process: %s", e)
                    return False
                self._stop = threading.Event()
                threading.Thread(target=self._run, args=(self._stop,), name="outcore-monitor", daemon=True).start()
        return True

    def end(self) -> None:
        with self._lock:
            if self._stop is not None:
                self._stop.set()
                self._stop = None
                self._path.unlink(missing_ok=True)

    def forked(self) -> None:
        """Forgets, in a forked child, the thread and the file, which are the parent's."""
        self._lock, self._stop = threading.RLock(), None

    def _remove(self, recorder: SnapshotRecorder | None) -> None:
        """Removes a model and those that are closed or dropped; stops when none is left."""
        with self._lock:
            self._recorders = [r for r in self._recorders if r is not recorder and r.session is not None]
            if not self._recorders:
                self.end()

    def _write(self) -> None:
        document = self.snapshot()
        if document | {"at": self._written.get("at")} != self._written or not self._path.exists():
            write(self._path, document)
            self._written = document

    def _run(self, stop: threading.Event) -> None:
        # Signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while not stop.wait(EVERY_S):
            with self._lock, contextlib.suppress(OSError):  # a full disk, for example; the next write may work
                self._remove(None)
                if not stop.is_set():
                    self._write()


board = Board()

atexit.register(board.end)  # models may never be closed
os.register_at_fork(after_in_child=board.forked)


def publish(model: Any, command: str | None = None, name: str | None = None) -> bool:
    """Lets ``outcore monitor`` see a model until it is closed or dropped.

    Args:
        model: a model from ``outcore.load``.
        command: the name of what this process runs; None: the name of its program.
        name: the model's name; None: its type.

    Returns:
        Whether other processes can see it: False if ``OUTCORE_MONITOR`` (or ``monitor`` in the configuration file) is
        ``off``, or if the file cannot be written, which is logged. This process's ``board`` has the model either way.
    """
    board.command = command or board.command or (Path(sys.argv[0]).name if sys.argv else "") or "python"
    kind = getattr(getattr(model, "args", None), "model_type", None)
    board.add(model.outcore, name or str(kind or type(model).__name__))
    return board.begin()


def runtime_folder() -> Path:
    with warnings.catch_warnings():
        # platformdirs warns when the system has no runtime folder and it falls back to the temporary folder.
        warnings.simplefilter("ignore")
        return PlatformDirs("outcore").user_runtime_path


def make_folder() -> Path:
    """Makes the folder, private to this user, if it does not exist.

    Raises:
        StoreError: other users can access the folder or replace it.
        OSError: the folder cannot be made.
    """
    folder = runtime_folder()
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=path != folder, exist_ok=True)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Checks that only this user can access the folder and replace it.

    Raises:
        StoreError: other users can.
        FileNotFoundError: there is no such folder.
    """
    me, status, above = os.geteuid(), folder.lstat(), folder.parent.stat()
    alone = stat.S_ISDIR(status.st_mode) and status.st_uid == me and not stat.S_IMODE(status.st_mode) & 0o077
    if not alone or above.st_uid not in (me, 0) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise StoreError(
            f"{folder}: other users can access the monitor's snapshots here; run chmod 700 {folder}, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )


def write(path: Path, document: dict[str, Any]) -> None:
    """Replaces a snapshot atomically: a reader finds the old one or the new one."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
    new.replace(path)


# The letters of ``layers``, one per layer, for where its weights are: on disk, ready in a slot, loading into a slot,
# computing from a slot, in memory. A layer of several parts gets the letter that comes last here.
CODES = "drlcm"

# Seconds over which the disk's rate and stalls are averaged.
RATE_S = 2.0

# Seconds over which rates of tokens and forward passes are averaged; one pass may take that long.
TOKENS_S = 10.0

NOTES = 8

# A model's counters, and the monotonic time ``at`` which they were read, in seconds.
Counters = dict[str, float]


class SnapshotRecorder:
    """Takes snapshots of one model, with rates since earlier values of its counters. Not thread-safe."""

    def __init__(self, session: Session, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = weakref.ref(session)
        self._clock = clock
        self._past: deque[Counters] = deque()
        self.name = name

    @property
    def session(self) -> Session | None:
        session = self._session()
        return None if session is None or session.closed else session

    def take(self) -> dict[str, Any] | None:
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
    seconds = now["at"] - then["at"]
    return round((now[name] - then[name]) / seconds * unit, 4) if seconds > 0 else None
