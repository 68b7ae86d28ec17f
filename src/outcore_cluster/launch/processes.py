"""The ranks of a run, as the launcher sees them: each behind a guard (``outcore_cluster.launch.guard``) on its host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from outcore.errors import LinkError
from outcore.text import printable

from .guard import SILENCE_S, is_stopped
from .hosts import Host

LINES = 20
"""Last lines of a rank that are kept."""
BEAT_S = 1.0
PARTING_S = 1.5
"""Seconds that the others have, once a rank has failed, to end by themselves."""
LET_GO_S = 1.0
"""Seconds that guards have for ending their ranks."""
FINISH_S = 30.0
"""The same, once rank 0 is done."""
WORDS_S = 1.0
"""Seconds that a guard's last words may come after its end."""
NOT_FOUND = 127
"""A shell's exit status, and ssh's with it, where there is no such program."""


class Rank:
    """A guard, and what it tells.

    Args:
        events: what it says goes there, as the rank's number and words: ``ready``, ``out``, ``err``, ``ended``.

    Attributes:
        ended: the rank's exit status; below 0 the signal that ended it. ``moved_at``: when its guard here was last
            seen not to be stopped.
    """

    def __init__(self, number: int, host: Host, guard: subprocess.Popen[bytes], events: queue.Queue[Any]) -> None:
        self.number, self.host, self.guard, self._events = number, host, guard, events
        self._stdin: Any = guard.stdin
        self.moved_at = time.monotonic()
        self.ended: int | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), name=f"outcore-launch-{number}", daemon=True)
            for name, stream in (("out", guard.stdout), ("err", guard.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    @property
    def who(self) -> str:
        """As messages name it."""
        return f"rank {self.number} ({self.host.name})"

    def say(self, **what: Any) -> None:
        """Tell the guard, as far as it listens."""
        line = json.dumps(what).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):  # that it is gone is seen where it is waited for
            while line:  # past Python's buffer: a signal's handler may say something in the middle
                line = line[os.write(self._stdin.fileno(), line) :]

    def let_go(self) -> None:
        """End of input: the guard ends its rank."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _read(self, name: str, stream: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in iter(stream.readline, b"") if name == "out" else ():
                if line.startswith(b'{"port"'):  # a shell there may have said something before
                    self._events.put((self.number, {"ready": json.loads(line)}))
                    break
            while data := stream.read1(1 << 15):
                self._events.put((self.number, {name: data.decode(errors="backslashreplace")}))

    def _wait(self) -> None:
        status = self.guard.wait()
        for thread in self._readers:
            thread.join(WORDS_S)  # what it started may hold its streams open
        by_signal = 128 < status < 128 + signal.NSIG
        self._events.put((self.number, {"ended": 128 - status if by_signal else status}))


class RankProcesses:
    """All of them.

    Args:
        show: told of rank 0's output, where it comes through a guard: the stream's name, and text.

    Attributes:
        interrupted_at: when Ctrl-C was pressed last; ``at_once``: and once more, so that all are ended.
        begun: guards were told to start their ranks. ``held``: one is started that is not known yet.
        terminated: SIGTERM came, and rank 0 was told. ``failed``: the first that ended otherwise than with 0.
    """

    def __init__(self, events: queue.Queue[Any], show: Callable[[str, str], None]) -> None:
        self.ranks: list[Rank] = []
        self.interrupted_at: float | None = None
        self.at_once = self.terminated = self.begun = self.held = False
        self.failed: Rank | None = None
        self._events, self._show = events, show
        self._beat = 0.0
        self._end: float | None = None
        self._let_go = False

    def await_ready(self, within_s: float) -> list[Any]:
        """What every guard says of its host.

        Raises:
            LinkError: one does not; says which and why.
        """
        found: dict[int, Any] = {}
        end = time.monotonic() + within_s
        while len(found) < len(self.ranks):
            if (event := self._next(end)) is None:
                late = next(rank for rank in self.ranks if rank.number not in found)
                if time.monotonic() >= end:
                    raise LinkError(f"{late.who}: no answer within {within_s:.0f} s", late.number)
                if (rank := self._stopped()) is not None:
                    raise LinkError(f"{rank.who}: what should start it is stopped, for {SILENCE_S:.0f} s", rank.number)
                continue
            rank, words = event
            if "ready" in words:
                found[rank.number] = words["ready"]
            elif "ended" in words:
                why = "; ".join(rank.lines) or "could not be started"
                if words["ended"] == NOT_FOUND:
                    why += "; --python PATH says where Python with Outcore is on every host"
                raise LinkError(f"{rank.who}: {why}", rank.number)
            else:
                self._take(rank, words)
        return [found[rank.number] for rank in self.ranks]

    def run(self) -> None:
        """Until all have ended."""
        while any(rank.ended is None for rank in self.ranks):
            if (event := self._next(self._end)) is not None:
                self._take(*event)
            now = time.monotonic()
            if (stopped := self._stopped()) is not None and stopped.ended is None:
                self._fail(stopped, f"what guards it is stopped, for {SILENCE_S:.0f} s")
            if self.ranks[0].ended == 0 and self._end is None:
                self._end = now + FINISH_S
            due = self._end is not None and now >= self._end
            if due and self._let_go:
                return
            if due and self.failed is None:
                late = next(rank for rank in self.ranks if rank.ended is None)
                self._fail(late, f"had not ended {FINISH_S:.0f} s after rank 0")
            if (due or self.at_once) and not self._let_go:
                self.let_go()
                self._end = now + LET_GO_S

    def let_go(self) -> None:
        """Have all guards end their ranks."""
        self._let_go = True
        for rank in self.ranks:
            rank.let_go()

    def end(self) -> None:
        """Whatever still runs is ended."""
        until = time.monotonic() + (0.0 if self._let_go else LET_GO_S)
        self.let_go()
        for rank in self.ranks:
            try:
                rank.guard.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.guard.kill()
                rank.guard.wait()

    def _next(self, end: float | None) -> tuple[Rank, dict[str, Any]] | None:
        """The next that a guard says; None: nothing, for as long as there is time until the next beat."""
        now = time.monotonic()
        if now >= self._beat:
            self._beat = now + BEAT_S
            for rank in self.ranks:
                if not self._let_go:
                    rank.say(beat=1)
                if not is_stopped(rank.guard.pid):
                    rank.moved_at = now
        until = min(self._beat, end if end is not None else self._beat)
        try:
            number, words = self._events.get(timeout=max(0.01, until - now))
        except queue.Empty:
            return None
        if number < 0:
            self.ranks[0].say(**words)
            return None
        return self.ranks[number], words

    def _stopped(self) -> Rank | None:
        """One whose guard here, or ssh to it, is stopped: who is slow may yet answer, that one will not."""
        now = time.monotonic()
        return next((rank for rank in self.ranks if now - rank.moved_at > SILENCE_S + BEAT_S), None)

    def _take(self, rank: Rank, words: dict[str, Any]) -> None:
        if "ended" in words:
            rank.ended = words["ended"]
            if rank.ended:
                self._fail(rank)
        for name in ("out", "err"):
            if name in words:
                if rank.number == 0 and self.begun:
                    self._show(name, words[name])
                rank.lines.extend(printable(line) for line in words[name].splitlines() if line.strip())

    def _fail(self, rank: Rank, why: str = "") -> None:
        if self.failed is None and not self._let_go:
            rank.lines.extend([why] if why else [])
            self.failed = rank
            self._end = time.monotonic() + PARTING_S


def how(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "was lost"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was ended by {name}"
    return f"ended with status {status}"
