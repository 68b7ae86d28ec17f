"""The ranks of a run, as the launcher sees them: each behind a guard (``outcore_cluster.link.guard``) on its host."""

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

from ..link.guard import is_stopped
from .hosts import Host

LINES = 20
"""Last lines of a rank that are kept."""
BEAT_S = 1.0
SILENCE_S = 5.0
PARTING_S = 1.5
"""Seconds that the others have, once a rank has failed, to end by themselves."""
LET_GO_S = 1.0
"""Seconds that guards have for ending their ranks."""
FINISH_S = 30.0
"""The same, once rank 0 is done."""

NOT_FOUND = 127
"""A shell's exit status, and ssh's with it, where there is no such program."""
ERRORS_S = 1.0
"""Seconds that a guard's last words may come after its end."""


class Rank:
    """A guard, and what it tells.

    Args:
        events: what it says goes there, with the rank's number; None is the end.

    Attributes:
        gone: the guard is. stopped_at: since when the rank is, by a signal, as far as is known.
    """

    def __init__(self, number: int, host: Host, guard: subprocess.Popen[bytes], events: queue.Queue[Any]) -> None:
        assert guard.stdin is not None and guard.stdout is not None
        self.number, self.host, self.guard = number, host, guard
        self.heard_at = time.monotonic()
        self.ended: int | None = None
        self.gone = False
        self.stopped_at: float | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        self.errors: deque[str] = deque(maxlen=LINES)
        self._leaving = bytearray()
        os.set_blocking(guard.stdin.fileno(), False)
        name = f"outcore-launch-{number}"
        self._errors_reader = threading.Thread(target=self._read_errors, name=name, daemon=True)
        self._errors_reader.start()
        threading.Thread(target=self._read_words, args=(events,), name=name, daemon=True).start()

    @property
    def who(self) -> str:
        """As messages name it."""
        return f"rank {self.number} ({self.host.name})"

    def say(self, **what: Any) -> None:
        """Tell the guard, as far as it listens."""
        assert self.guard.stdin is not None
        self._leaving += json.dumps(what).encode() + b"\n"
        try:
            while self._leaving:
                del self._leaving[: os.write(self.guard.stdin.fileno(), self._leaving)]
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._leaving.clear()  # that it is gone is seen where it is read

    def status(self) -> int | None:
        """The guard's exit status, of one whose output has ended; None if it does not end soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.guard.wait(ERRORS_S)
        return None

    def let_go(self) -> None:
        """End of input: the guard ends its rank."""
        with contextlib.suppress(OSError):
            if self.guard.stdin is not None and not self.guard.stdin.closed:
                self.guard.stdin.close()

    def kill(self) -> None:
        """End the guard here, whatever it does; where the rank is another host's, ssh."""
        self.guard.kill()
        self.guard.wait()

    def _read_words(self, events: queue.Queue[Any]) -> None:
        assert self.guard.stdout is not None
        for line in self.guard.stdout:
            with contextlib.suppress(ValueError):
                events.put((self.number, json.loads(line)))
        # Why it ended may still be on its way; what it started may hold that stream open.
        self._errors_reader.join(ERRORS_S)
        events.put((self.number, None))

    def _read_errors(self) -> None:
        assert self.guard.stderr is not None
        for line in self.guard.stderr:
            self.errors.append(printable(line.decode(errors="backslashreplace").strip()))


class RankProcesses:
    """All of them.

    Args:
        show: told of rank 0's output, where it comes through a guard: the stream's name, and text.

    Attributes:
        interrupted_at: when Ctrl-C was pressed last; ``at_once``: and once more, so that all are ended.
        begun: guards were told to start their ranks. ``held``: one is started that is not known yet.
        terminated: SIGTERM came, and rank 0 was told.
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

    def await_all(self, what: str, within_s: float) -> list[Any]:
        """What every guard says of something.

        Raises:
            LinkError: one does not; says which and why.
        """
        found: dict[int, Any] = {}
        end = time.monotonic() + within_s
        for rank in self.ranks:
            rank.heard_at = time.monotonic()
        while len(found) < len(self.ranks):
            if (event := self._next(end)) is None:
                if time.monotonic() >= end:
                    late = next(rank for rank in self.ranks if rank.number not in found)
                    raise LinkError(f"{late.who}: no answer within {within_s:.0f} s", late.number)
                self._refuse_stopped()
                continue
            rank, words = event
            if words is None or "refused" in words:
                why = words["refused"] if words else "; ".join(rank.errors) or "could not be started"
                if words is None and rank.status() == NOT_FOUND:
                    why += "; --python PATH says where Python with Outcore is on every host"
                raise LinkError(f"{rank.who}: {why}", rank.number)
            if what in words:
                found[rank.number] = words[what]
        return [found[rank.number] for rank in self.ranks]

    def _refuse_stopped(self) -> None:
        """Who is slow may yet answer; what was stopped here will not.

        Raises:
            LinkError: names the rank.
        """
        for rank in self.ranks:
            if time.monotonic() - rank.heard_at > SILENCE_S and is_stopped(rank.guard.pid):
                raise LinkError(f"{rank.who}: what should start it is stopped, for {SILENCE_S:.0f} s", rank.number)

    def run(self) -> None:
        """Until all have ended. ``failed`` is the first that did otherwise than with 0."""
        while not all(rank.ended is not None or rank.gone for rank in self.ranks):
            if (event := self._next(self._end)) is not None:
                self._take(*event)
            now = time.monotonic()
            self._watch(now)
            if self.ranks[0].ended == 0 and self._end is None:
                self._end = now + FINISH_S
            if self.failed is not None and not self._let_go and self._only_stopped():
                self._end = now
            due = self._end is not None and now >= self._end
            if due and self._let_go:
                return
            if due and self.failed is None:
                late = next(rank for rank in self.ranks if rank.ended is None)
                self._fail(late, f"had not ended {FINISH_S:.0f} s after rank 0")
            if (due or self.at_once) and not self._let_go:
                self.let_go()
                self._end = now + LET_GO_S

    def _only_stopped(self) -> bool:
        """Whether those that are left cannot end by themselves."""
        return all(rank.stopped_at is not None for rank in self.ranks if rank.ended is None and not rank.gone)

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.guard.wait(max(0.0, until - time.monotonic()))
        for rank in self.ranks:
            if rank.guard.poll() is None:
                rank.kill()

    def _next(self, end: float | None) -> tuple[Rank, dict[str, Any] | None] | None:
        """The next that a guard says; None: nothing, for as long as there is time until the next beat."""
        now = time.monotonic()
        if now >= self._beat:
            self._beat = now + BEAT_S
            for rank in self.ranks:
                if not self._let_go:
                    rank.say(beat=1)
        until = min(self._beat, end if end is not None else self._beat)
        try:
            number, words = self._events.get(timeout=max(0.01, until - now))
        except queue.Empty:
            return None
        if number < 0:
            self.ranks[0].say(**words)
            return None
        self.ranks[number].heard_at = time.monotonic()
        return self.ranks[number], words

    def _take(self, rank: Rank, words: dict[str, Any] | None) -> None:
        if words is None:
            rank.gone = True
            if rank.ended is None:
                self._fail(rank, "its guard is gone")
        elif "ended" in words:
            rank.ended = words["ended"]
            if rank.ended:
                self._fail(rank, None)
        elif "refused" in words:
            self._fail(rank, words["refused"])
        elif "beat" in words:
            rank.stopped_at = (rank.stopped_at or time.monotonic()) if words.get("stopped") else None
        else:
            for name in ("out", "err"):
                if name in words:
                    if rank.number == 0:
                        self._show(name, words[name])
                    rank.lines.extend(printable(line) for line in words[name].splitlines() if line.strip())

    def _watch(self, now: float) -> None:
        for rank in self.ranks:
            if rank.ended is None and not rank.gone and now - rank.heard_at > SILENCE_S and not self._let_go:
                self._fail(rank, f"its guard is silent for {SILENCE_S:.0f} s")
            # In a run others notice that themselves; at its start they may take longer.
            if rank.ended is None and rank.stopped_at is not None and now - rank.stopped_at > SILENCE_S:
                self._fail(rank, f"is stopped, for {SILENCE_S:.0f} s")

    def _fail(self, rank: Rank, why: str | None) -> None:
        if why is not None:
            rank.errors.append(why)
        if self.failed is None and not self._let_go:
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
