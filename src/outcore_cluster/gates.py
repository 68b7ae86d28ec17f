"""Graphs that are handed to a CUDA device before what another rank sends has come: a kernel waits for it there.

Handing out a token's kernels takes as long as computing them (9B shapes at 4 bit on an H100: 10 ms a token, most of it
that), and a rank that waits for bytes first begins with it when they have come. Behind a gate all of it is queued by
then. A gate is memory that stays with the host and that the device reads over the bus: a word that says whether it is
open, and the bytes. It is opened by a thread that waits for them, never by the one that queues: MLX has it wait where
too much is queued already (mlx/transforms.cpp, ``MAX_ACTIVE_TASKS``). Where nothing will come the gate is opened
too, and whoever settles gets the error: what was computed behind it is taken back like anything that failed.

On Metal a kernel that waits is ended after some seconds, and a processor's stream would wait with all that it has.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from outcore.machine.device import on_cuda
from outcore.machine.device_memory import address_of, prepare_slot

from .link.link import Arrival

FLAG_BYTES = 64
"""The word that opens a gate has a line of the processor's cache to itself."""

THREADS = 256

WAITING = """
    if (threadIdx.x == 0) {
        unsigned int open = 0;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(open) : "l"(gate) : "memory");
        } while (!open);
    }
    __syncthreads();
    for (unsigned int i = threadIdx.x; i < count; i += blockDim.x) {
        unsigned int word;
        asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(gate + SKIP + i) : "memory");
        words[i] = word;
    }
"""
"""Source: NVIDIA's PTX ISA, "Memory Consistency Model" (acquire loads of the system's scope)."""

Wait = Callable[[mx.array], mx.array]
"""From a gate's memory, uint32 (words of the flag and the bytes,), its bytes when it is open, uint32 (words,)."""


@functools.cache
def waiting_kernel() -> Wait:
    """On the device."""
    made: Any = mx.fast.cuda_kernel
    skip = FLAG_BYTES // 4
    source = f"const unsigned int SKIP = {skip}, count = gate_shape[0] - SKIP;" + WAITING
    kernel = made(name="outcore_gate", input_names=["gate"], output_names=["words"], source=source)

    def wait(gate: mx.array) -> mx.array:
        (words,) = kernel(
            inputs=[gate],
            output_shapes=[(gate.size - skip,)],
            output_dtypes=[mx.uint32],
            grid=(THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
        found: mx.array = words
        return found

    return wait


class TransferGate:
    """So many bytes that another rank sends, and whether they are there."""

    def __init__(self, nbytes: int, wait: Wait) -> None:
        words = FLAG_BYTES // 4 + -(-nbytes // 4)
        self._memory, self._nbytes, self._wait = mx.array(np.zeros((words,), dtype=np.uint32)), nbytes, wait
        view = memoryview(np.array(self._memory, copy=False).data).cast("B")
        prepare_slot(address_of(view), view.nbytes, "gpu")
        self._flag, self.into = view[:FLAG_BYTES].cast("I"), view[FLAG_BYTES : FLAG_BYTES + nbytes]

    def behind(self) -> mx.array:
        """Its bytes, uint8 (bytes,), computed when it is open."""
        return self._wait(self._memory).view(mx.uint8)[: self._nbytes]

    def close(self) -> None:
        """Bytes are about to come. Not before: another text's may be on their way here as a graph is built on it."""
        self._flag[0] = 0

    def open(self) -> None:
        """The bytes are there, or never will be."""
        self._flag[0] = 1


class Passage:
    """Gates that open when what comes through them has come."""

    def __init__(self, arrivals: Sequence[Arrival], gates: Sequence[TransferGate]) -> None:
        self._arrivals, self._gates = arrivals, gates
        self._over = threading.Event()
        self._failed: BaseException | None = None

    def watch(self) -> None:
        """Open them when it has come, or will not; by the thread that waits for it."""
        try:
            for arrival in self._arrivals:
                arrival.wait()
        except BaseException as e:
            self._failed = e
        finally:
            self.open()
            self._over.set()

    def open(self) -> None:
        """Nobody waits any more."""
        for gate in self._gates:
            gate.open()

    @property
    def ready(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Return when it has come.

        Raises:
            LinkError: it will not.
        """
        self._over.wait()
        if self._failed is not None:
            raise self._failed


class Gates:
    """Those of one rank. Each token's are others than the token's before it, which may be computed with yet."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._kept: dict[tuple[int, int, int], TransferGate] = {}
        self._token = self._at = 0
        self._passages: queue.SimpleQueue[Passage | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._passages.put, None)

    def next_token(self) -> None:
        """Gates from now on are another token's."""
        self._token, self._at = 1 - self._token, 0

    def gate(self, nbytes: int) -> TransferGate:
        """The next for so many bytes."""
        key = (self._token, self._at, nbytes)
        self._at += 1
        if key not in self._kept:
            self._kept[key] = TransferGate(nbytes, self._wait)
        return self._kept[key]

    def watch(self, arrivals: Sequence[Arrival], gates: Sequence[TransferGate]) -> Passage:
        """Close gates, and have them opened when this has come; those that are watched one after the other open in that
        order."""
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(self._passages,), name="outcore-gates", daemon=True)
            self._thread.start()
        for gate in gates:
            gate.close()
        passage = Passage(arrivals, gates)
        self._passages.put(passage)
        return passage

    def close(self) -> None:
        """End the thread. Another one begins where it is needed again."""
        if self._thread is not None:
            self._passages.put(None)
            self._thread = None


def _watch(passages: queue.SimpleQueue[Passage | None]) -> None:
    while (passage := passages.get()) is not None:
        passage.watch()
        del passage


def gates_here() -> Gates | None:
    """What a rank has on this device, compiled (H100: 2.7 s the first time, kept with MLX's kernels); None: it waits
    before it hands anything to it."""
    if not on_cuda():
        return None
    wait = waiting_kernel()
    tried = TransferGate(4, wait)
    through = tried.behind()
    tried.open()
    mx.eval(through)
    return Gates(wait)
