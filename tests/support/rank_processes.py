"""Ranks as processes of one machine, joined by pipes: what MLX runs in each is its own, as on several machines."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from memory_link import Letters, MemoryLink
from outcore.errors import LinkError
from outcore_cluster.link_protocol import Link

JOB_S = 150.0
"""Seconds that a piece of work may take."""

ENDED = b"ended   "
"""What a rank sends when it has failed, as a link of sockets does."""


class PipeLetters(Letters):
    """What one rank is sent by pipes; a thread for each peer reads, and one for each writes, when it comes to it."""

    def __init__(self, rank: int, peers: dict[int, Connection]) -> None:
        super().__init__(len(peers) + 1)
        self._out: dict[int, queue.SimpleQueue[tuple[str, bytes | memoryview]]] = {}
        for peer, pipe in peers.items():
            self._out[peer] = queue.SimpleQueue()
            threading.Thread(target=self._write, args=(peer, pipe), daemon=True).start()
            threading.Thread(target=self._read, args=(peer, rank, pipe), daemon=True).start()

    def put(self, source: int, to: int, what: str, data: bytes) -> None:
        if to in self._out:
            self.queue(to, what, data)
        else:
            super().put(source, to, what, data)

    def queue(self, to: int, what: str, data: bytes | memoryview) -> None:
        """Have it sent to a peer, as it is when its turn comes."""
        self._out[to].put((what, data))

    def _write(self, peer: int, pipe: Connection) -> None:
        while True:
            what, data = self._out[peer].get()
            pipe.send_bytes(what.encode().ljust(8) + bytes(data))
            del data

    def _read(self, peer: int, rank: int, pipe: Connection) -> None:
        try:
            while True:
                data = pipe.recv_bytes()
                if data.startswith(ENDED):
                    return self.end()
                super().put(peer, rank, data[:8].decode().strip(), data[8:])
        except (EOFError, OSError):
            self.end()


class _Filled:
    """A receive whose bytes a thread puts into place as soon as they come."""

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self.error: LinkError | None = None
        self.done = threading.Event()

    @property
    def ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class PipeLink(MemoryLink):
    """A link as one of sockets is: nothing is copied when it is sent, and what comes is in place before it is asked
    for."""

    def __init__(self, letters: PipeLetters, rank: int) -> None:
        super().__init__(letters, rank, JOB_S)
        self._pipes = letters
        self._asked: dict[int, queue.SimpleQueue[_Filled]] = {}

    def send(self, to: int, data: memoryview) -> None:
        self._pipes.queue(to, "data", data)

    def receive(self, source: int, into: memoryview) -> Any:
        if source not in self._asked:
            self._asked[source] = queue.SimpleQueue()
            threading.Thread(target=self._fill, args=(source,), daemon=True).start()
        arrival = _Filled(into)
        self._asked[source].put(arrival)
        return arrival

    def fail(self, reason: str) -> None:
        for to in range(self.size):
            if to != self.rank:
                self._pipes.queue(to, ENDED.decode().strip(), b"")
        super().fail(reason)

    def _fill(self, source: int) -> None:
        while True:
            arrival = self._asked[source].get()
            try:
                data = self._pipes.take(source, self.rank, "data", 1e6)
                if len(data) != arrival.into.nbytes:
                    raise LinkError(f"rank {source} sent {len(data)} bytes, not {arrival.into.nbytes}")
                arrival.into[:] = data
            except LinkError as e:
                arrival.error = e
            arrival.done.set()
            del arrival


def _worker(rank: int, peers: dict[int, Connection], jobs: Connection, env: dict[str, str]) -> None:
    os.environ.update(env)
    faulthandler.enable(all_threads=True)
    link: Link = PipeLink(PipeLetters(rank, peers), rank)
    imported = 0
    while True:
        try:
            work, args = jobs.recv()
        except EOFError:
            return
        if len(sys.modules) > imported:  # each load looks for garbage, and imports are none of it
            imported = len(sys.modules)
            gc.collect()
            gc.freeze()
        try:
            jobs.send((True, work(link, *args)))
        except BaseException:
            jobs.send((False, traceback.format_exc()))


class RankProcesses:
    """So many ranks, which wait for work. After work that failed they are of no use any more, as ``failed`` says."""

    def __init__(self, size: int, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        peers: list[dict[int, Any]] = [{} for _ in range(size)]
        for i in range(size):
            for k in range(i):
                peers[i][k], peers[k][i] = context.Pipe()
        self.failed = False
        self._last = "its start"
        self._jobs: list[Any] = []
        self._processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, peers[rank], theirs, env or {}), daemon=True)
            process.start()
            theirs.close()
            self._jobs.append(mine)
            self._processes.append(process)
        for each in peers:
            for pipe in each.values():
                pipe.close()

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``work(link, *args)`` returns on each rank.

        Raises:
            RuntimeError: it raised somewhere, or took too long.
        """
        self.failed = True
        before, self._last = self._last, work.__name__
        for rank, jobs in enumerate(self._jobs):
            try:
                jobs.send((work, args))
            except BrokenPipeError:
                raise RuntimeError(f"rank {rank} {self._end(rank)} after {before}, before {self._last}") from None
        found: dict[int, Any] = {}
        until = time.monotonic() + JOB_S
        while len(found) < len(self._jobs):
            left = [jobs for rank, jobs in enumerate(self._jobs) if rank not in found]
            ready = wait(left, max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{len(left)} ranks have not done after {JOB_S:g} s")
            for jobs in ready:
                rank = self._jobs.index(jobs)
                try:
                    good, found[rank] = jobs.recv()  # type: ignore[union-attr, call-arg]
                except EOFError:
                    raise RuntimeError(f"rank {rank} {self._end(rank)} in {self._last}") from None
                if not good:
                    raise RuntimeError(f"rank {rank}:\n{found[rank]}")
        self.failed = False
        return [found[rank] for rank in range(len(self._jobs))]

    def _end(self, rank: int) -> str:
        self._processes[rank].join(5)
        return f"has ended with status {self._processes[rank].exitcode}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class WaitingRanks:
    """Two ranks for whoever has work next, as starting them takes longer than most work; others after a failure.

    Args:
        cache: a folder for what they keep, where nothing is known of this machine.
    """

    def __init__(self, cache: Path) -> None:
        self._env = {"OUTCORE_CACHE": str(cache)}
        self._two: RankProcesses | None = None

    def two(self) -> RankProcesses:
        if self._two is None or self._two.failed:
            self.close()
            self._two = RankProcesses(2, self._env)
        return self._two

    def close(self) -> None:
        if self._two is not None:
            self._two.close()
