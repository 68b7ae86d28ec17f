"""The ranks of a run as the launcher sees them: a guard (``outcore_cluster.launch.guard``) on each host runs one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from outcore.errors import LinkError
from outcore.text import printable

from .guard import SILENCE_S, is_stopped
from .hosts import Host

# Last lines kept of a rank's output.
LINES = 20
BEAT_S = 1.0
# Seconds that the other ranks have to end by themselves once one has failed.
PARTING_S = 1.5
# Seconds that guards have to end their ranks once their input is closed.
LET_GO_S = 1.0
# Seconds that the other ranks have to end once rank 0 is done.
FINISH_S = 30.0
# Seconds to wait for the last output of a guard that has ended.
WORDS_S = 1.0
# The exit status of a shell, and so of ssh, if there is no such program.
NOT_FOUND = 127


class Rank:
    """One rank and its guard.

    Attributes:
        ready: the guard's report about its host. ``ended``: the rank's exit status; below 0 the signal that ended it.
        moved_at: when the guard (or ssh to it) was last seen not stopped by a signal.
    """

    def __init__(self, number: int, host: Host) -> None:
        self.number, self.host = number, host
        self.guard: Process | None = None
        self.ready: Any = None
        self.ended: int | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        self.moved_at = time.monotonic()

    @property
    def who(self) -> str:
        return f"rank {self.number} ({self.host.name})"

    def say(self, **what: Any) -> None:
        """Sends an order to the guard, as a line of JSON, unless the guard's input is closed."""
        assert self.guard is not None and self.guard.stdin is not None
        if not self.guard.stdin.is_closing():
            self.guard.stdin.write(json.dumps(what).encode() + b"\n")

    def let_go(self) -> None:
        if self.guard is not None and self.guard.stdin is not None:
            self.guard.stdin.close()


class RankProcesses:
    """All ranks of a run.

    Args:
        show: called with rank 0's output that comes through a guard: ``out`` or ``err``, and text.

    Attributes:
        interrupted_at: when Ctrl-C was last pressed. ``at_once``: it was pressed twice, so all ranks are ended.
        begun: whether the guards were ordered to start their ranks.
        terminated: whether SIGTERM was passed on to rank 0. ``failed``: the first rank whose exit status was not 0.
    """

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self.ranks: list[Rank] = []
        self.interrupted_at: float | None = None
        self.at_once = self.terminated = self.begun = False
        self.failed: Rank | None = None
        self._show, self._changed = show, asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._beat = 0.0
        self._end: float | None = None
        self._let_go = False

    async def start(self, host: Host, command: Sequence[str], **options: Any) -> Rank:
        """Starts the guard of one more rank. Raises ``LinkError`` if the program cannot be started."""
        self.ranks.append(rank := Rank(len(self.ranks), host))
        try:
            rank.guard = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, **options)
        except OSError as e:
            raise LinkError(f"{rank.who}: {shlex.join(command[:1])}: {e.strerror}", rank.number) from e
        self._tasks.append(asyncio.create_task(self._follow(rank, rank.guard)))
        return rank

    async def await_ready(self, within_s: float) -> None:
        """Waits until every guard has reported about its host. Raises ``LinkError`` if one does not."""
        end = time.monotonic() + within_s
        while (late := next((rank for rank in self.ranks if rank.ready is None), None)) is not None:
            if (gone := next((rank for rank in self.ranks if rank.ended is not None), None)) is not None:
                why = "; ".join(gone.lines) or "could not be started"
                if gone.ended == NOT_FOUND:
                    why += "; --python PATH says where Python with Outcore is on every host"
                raise LinkError(f"{gone.who}: {why}", gone.number)
            if time.monotonic() >= end:
                raise LinkError(f"{late.who}: no answer within {within_s:.0f} s", late.number)
            if (rank := self._stopped()) is not None:
                why = f"the process that starts it has been suspended for {SILENCE_S:.0f} s"
                raise LinkError(f"{rank.who}: {why}", rank.number)
            await self._next(end)

    async def run(self) -> None:
        """Returns when all ranks have ended."""
        while any(rank.ended is None for rank in self.ranks):
            await self._next(self._end)
            now = time.monotonic()
            if (stopped := self._stopped()) is not None and stopped.ended is None:
                self._fail(stopped, f"the process that guards it has been suspended for {SILENCE_S:.0f} s")
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
        self._let_go = True
        for rank in self.ranks:
            rank.let_go()

    async def end(self) -> None:
        within_s = 0.0 if self._let_go else LET_GO_S
        self.let_go()
        guards = [rank.guard for rank in self.ranks if rank.guard is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(guard.wait() for guard in guards))
        for guard in guards:
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()

    def terminate(self) -> None:
        self.terminated = True
        self.ranks[0].say(terminate=1)

    def wake(self) -> None:
        self._changed.set()

    async def _follow(self, rank: Rank, guard: Process) -> None:
        readers = [
            asyncio.create_task(self._read(rank, *each)) for each in (("out", guard.stdout), ("err", guard.stderr))
        ]
        status = await guard.wait()
        await asyncio.wait(readers, timeout=WORDS_S)  # its children may hold its streams open
        rank.ended = 128 - status if 128 < status < 128 + signal.NSIG else status
        if rank.ended:
            self._fail(rank)
        self.wake()

    async def _read(self, rank: Rank, name: str, stream: Any) -> None:
        while name == "out" and rank.ready is None and (line := await stream.readline()):
            if line.startswith(b'{"port"'):  # a line before it may be the shell's
                rank.ready = json.loads(line)
                self.wake()
        while data := await stream.read(1 << 15):
            text = data.decode(errors="backslashreplace")
            if rank.number == 0 and self.begun:
                self._show(name, text)
            rank.lines.extend(printable(line) for line in text.splitlines() if line.strip())

    async def _next(self, end: float | None) -> None:
        """Sends a beat if it is time. Then waits for a rank to get ready or end, or until ``end`` or the next beat."""
        now = time.monotonic()
        if now >= self._beat:
            self._beat = now + BEAT_S
            for rank in self.ranks:
                if not self._let_go:
                    rank.say(beat=1)
                if rank.guard is not None and not is_stopped(rank.guard.pid):
                    rank.moved_at = now
        until = min(self._beat, end if end is not None else self._beat)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, until - now)):
                await self._changed.wait()
        self._changed.clear()

    def _stopped(self) -> Rank | None:
        """Returns a rank whose guard (or ssh to it) has been stopped by a signal for too long; None: there is none."""
        now = time.monotonic()
        return next((rank for rank in self.ranks if now - rank.moved_at > SILENCE_S + BEAT_S), None)

    def _fail(self, rank: Rank, why: str = "") -> None:
        if self.failed is None and not self._let_go:
            rank.lines.extend([why] if why else [])
            self.failed = rank
            self._end = time.monotonic() + PARTING_S


def how(status: int | None) -> str:
    if status is None:
        return "was lost"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was ended by {name}"
    return f"ended with status {status}"
