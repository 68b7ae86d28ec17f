"""Ranks as processes of one machine, joined by pipes: what MLX runs in each is its own, as on several machines."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from outcore.link.link import Link
from outcore.link.memory_link import Letters, MemoryLink

JOB_S = 150.0
"""Seconds that a piece of work may take."""


class PipeLetters(Letters):
    """What one rank is sent by pipes; a thread for each peer reads, and one for each writes."""

    def __init__(self, rank: int, peers: dict[int, Connection]) -> None:
        super().__init__(len(peers) + 1)
        self._out: dict[int, queue.SimpleQueue[tuple[str, bytes]]] = {}
        for peer, pipe in peers.items():
            self._out[peer] = queue.SimpleQueue()
            threading.Thread(target=self._write, args=(peer, pipe), daemon=True).start()
            threading.Thread(target=self._read, args=(peer, rank, pipe), daemon=True).start()

    def put(self, source: int, to: int, what: str, data: bytes) -> None:
        if to in self._out:
            self._out[to].put((what, data))
        else:
            super().put(source, to, what, data)

    def _write(self, peer: int, pipe: Connection) -> None:
        while True:
            what, data = self._out[peer].get()
            pipe.send_bytes(what.encode().ljust(8) + data)

    def _read(self, peer: int, rank: int, pipe: Connection) -> None:
        try:
            while True:
                data = pipe.recv_bytes()
                super().put(peer, rank, data[:8].decode().strip(), data[8:])
        except (EOFError, OSError):
            self.end()


def _worker(rank: int, peers: dict[int, Connection], jobs: Connection, env: dict[str, str]) -> None:
    os.environ.update(env)
    link: Link = MemoryLink(PipeLetters(rank, peers), rank, JOB_S)
    while True:
        try:
            work, args = jobs.recv()
        except EOFError:
            return
        try:
            jobs.send((True, work(link, *args)))
        except BaseException:
            jobs.send((False, traceback.format_exc()))


class RankProcesses:
    """So many ranks, which wait for work. After work that failed they are of no use any more."""

    def __init__(self, size: int, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        peers: list[dict[int, Any]] = [{} for _ in range(size)]
        for i in range(size):
            for k in range(i):
                peers[i][k], peers[k][i] = context.Pipe()
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
        for jobs in self._jobs:
            jobs.send((work, args))
        found: list[Any] = []
        for rank, jobs in enumerate(self._jobs):
            if not jobs.poll(JOB_S):
                raise RuntimeError(f"rank {rank} has not done after {JOB_S:g} s")
            good, result = jobs.recv()
            if not good:
                raise RuntimeError(f"rank {rank}:\n{result}")
            found.append(result)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
