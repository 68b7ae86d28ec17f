"""What other ranks send, on its way: buffers that the link writes to and that graphs are built on."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from outcore.disk.metrics import Metrics

from .link_protocol import Arrival, Link


@dataclass
class Incoming:
    """What a layer of another rank puts out in one pass, on its way here."""

    link: Link
    source: int
    into: list[memoryview]
    metrics: Metrics
    arrivals: list[Arrival] = field(default_factory=list)
    rounds: Rounds | None = None
    number: int = 0

    def post(self) -> None:
        """Begin to receive it."""
        self.arrivals = [self.link.receive(self.source, into) for into in self.into]

    @property
    def ready(self) -> bool:
        """Whether it is there, and waiting takes no time."""
        return bool(self.arrivals) and all(arrival.ready for arrival in self.arrivals)

    def wait(self) -> None:
        """Return when it is there."""
        if self.rounds is not None:
            # The next may come while this is computed with; those behind it go where this lies.
            self.rounds.post(self.number + 2)
        began = self.metrics.clock()
        for arrival in self.arrivals:
            arrival.wait()
        self.metrics.ranks_s += self.metrics.clock() - began


class Rounds:
    """What the passes of one sweep receive: of one layer after the other, of each pass after pass, as it is sent.
    Buffers are used in turn: what was received two layers before is computed by then."""

    def __init__(self) -> None:
        self._rounds: list[list[Incoming]] = []
        self._posted = 0
        self._pass = -1
        self._at = 0
        self._buffers: dict[tuple[int, int, int], mx.array] = {}

    def next_pass(self) -> None:
        """Another pass begins."""
        self._pass, self._at = self._pass + 1, 0

    def buffer(self, nbytes: int, n: int) -> mx.array:
        """For the ``n``-th array of the layer that is received next."""
        key = (self._pass, self._at % 2, n)
        found = self._buffers.get(key)
        if found is None or found.nbytes != nbytes:
            found = self._buffers[key] = new_buffer(nbytes)
        return found

    def add(self, incoming: Incoming) -> None:
        """This pass receives another layer's outputs."""
        if self._at == len(self._rounds):
            self._rounds.append([])
        self._rounds[self._at].append(incoming)
        incoming.rounds, incoming.number = self, self._at
        self._at += 1

    def post(self, rounds: int) -> None:
        """Begin to receive so many of them."""
        while self._posted < min(rounds, len(self._rounds)):
            for incoming in self._rounds[self._posted]:
                incoming.post()
            self._posted += 1


def new_buffer(nbytes: int) -> mx.array:
    """Memory that is there at once, whatever a device has queued."""
    return mx.array(np.zeros((nbytes,), dtype=np.uint8))


def bytes_of(array: mx.array) -> memoryview:
    """An evaluated array of uint8, in place."""
    view: memoryview = np.array(array, copy=False).data
    return view
