"""The ranks of a run, as the launcher sees them: each behind a guard (``outcore_cluster.launch.guard``) on its host."""

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

    Attributes:
        ready: what it says of its host. ``ended``: the rank's exit status; below 0 the signal that ended it.
        moved_at: when its guard here was last seen not to be stopped.
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
        """As messages name it."""
        return f"rank {self.number} ({self.host.name})"

    def say(self, **what: Any) -> None:
        """Tell the guard, as far as it listens: that it is gone is seen where it is waited for."""
        assert self.guard is not None and self.guard.stdin is not None
        if not self.guard.stdin.is_closing():
            self.guard.stdin.write(json.dumps(what).encode() + b"\n")

    def let_go(self) -> None:
        """End of input: the guard ends its rank."""
        if self.guard is not None and self.guard.stdin is not None:
            self.guard.stdin.close()


class RankProcesses:
    """All of them.

    Args:
        show: told of rank 0's output, where it comes through a guard: the stream's name, and text.

    Attributes:
        interrupted_at: when Ctrl-C was pressed last; ``at_once``: and once more, so that all are ended.
        begun: guards were told to start their ranks.
        terminated: SIGTERM came, and rank 0 was told. ``failed``: the first that ended otherwise than with 0.
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
        """Start the guard of one more rank.

        Raises:
            LinkError: there is no such program.
        """
        self.ranks.append(rank := Rank(len(self.ranks), host))
        try:
            rank.guard = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, **options)
        except OSError as e:
            raise LinkError(f"{rank.who}: {shlex.join(command[:1])}: {e.strerror}", rank.number) from e
        self._tasks.append(asyncio.create_task(self._follow(rank, rank.guard)))
        return rank

    async def await_ready(self, within_s: float) -> None:
        """Return when every guard has said what its host has.

        Raises:
            LinkError: one does not; says which and why.
        """
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
                raise LinkError(f"{rank.who}: what should start it is stopped, for {SILENCE_S:.0f} s", rank.number)
            await self._next(end)

    async def run(self) -> None:
        """Until all have ended."""
        while any(rank.ended is None for rank in self.ranks):
            await self._next(self._end)
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

    async def end(self) -> None:
        """Whatever still runs is ended."""
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
        """SIGTERM is rank 0's, too, of a command that ends well by it."""
        self.terminated = True
        self.ranks[0].say(terminate=1)

    def wake(self) -> None:
        """Look what there is to do."""
        self._changed.set()

    async def _follow(self, rank: Rank, guard: Process) -> None:
        readers = [
            asyncio.create_task(self._read(rank, *each)) for each in (("out", guard.stdout), ("err", guard.stderr))
        ]
        status = await guard.wait()
        await asyncio.wait(readers, timeout=WORDS_S)  # what it started may hold its streams open
        rank.ended = 128 - status if 128 < status < 128 + signal.NSIG else status
        if rank.ended:
            self._fail(rank)
        self.wake()

    async def _read(self, rank: Rank, name: str, stream: Any) -> None:
        while name == "out" and rank.ready is None and (line := await stream.readline()):
            if line.startswith(b'{"port"'):  # a shell there may have said something before
                rank.ready = json.loads(line)
                self.wake()
        while data := await stream.read(1 << 15):
            text = data.decode(errors="backslashreplace")
            if rank.number == 0 and self.begun:
                self._show(name, text)
            rank.lines.extend(printable(line) for line in text.splitlines() if line.strip())

    async def _next(self, end: float | None) -> None:
        """Wait until a rank has ended or is ready, for as long as there is time until the next beat."""
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
        """One whose guard here, or ssh to it, is stopped: who is slow may yet answer, that one will not."""
        now = time.monotonic()
        return next((rank for rank in self.ranks if now - rank.moved_at > SILENCE_S + BEAT_S), None)

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
