"""Buffers for layer outputs that other ranks send. The graph of the following layers is built on them before the bytes
arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from outcore.disk.metrics import Metrics

from .link_protocol import Arrival, Link


@dataclass
class Incoming:
    """The outputs of another rank's layer in one pass."""

    link: Link
    source: int
    into: list[memoryview]
    metrics: Metrics
    arrivals: list[Arrival] = field(default_factory=list)
    rounds: Rounds | None = None
    number: int = 0

    def post(self) -> None:
        self.arrivals = [self.link.receive(self.source, into) for into in self.into]

    @property
    def ready(self) -> bool:
        return bool(self.arrivals) and all(arrival.ready for arrival in self.arrivals)

    def wait(self) -> None:
        if self.rounds is not None:
            # The next layer's may arrive while this one's are in use; later ones reuse this one's buffers.
            self.rounds.post(self.number + 2)
        began = self.metrics.clock()
        for arrival in self.arrivals:
            arrival.wait()
        self.metrics.ranks_s += self.metrics.clock() - began


class Rounds:
    """Receives for several passes that share one reading of the weights, in the order in which the messages are sent:
    layer after layer, and for each layer pass after pass. Two sets of buffers alternate: when a third layer arrives,
    the first one has been computed."""

    def __init__(self) -> None:
        self._rounds: list[list[Incoming]] = []
        self._posted = 0
        self._pass = -1
        self._at = 0
        self._buffers: dict[tuple[int, int, int], mx.array] = {}

    def next_pass(self) -> None:
        self._pass, self._at = self._pass + 1, 0

    def buffer(self, nbytes: int, n: int) -> mx.array:
        """Returns memory for the ``n``-th array of the next layer."""
        key = (self._pass, self._at % 2, n)
        found = self._buffers.get(key)
        if found is None or found.nbytes != nbytes:
            found = self._buffers[key] = new_buffer(nbytes)
        return found

    def add(self, incoming: Incoming) -> None:
        if self._at == len(self._rounds):
            self._rounds.append([])
        self._rounds[self._at].append(incoming)
        incoming.rounds, incoming.number = self, self._at
        self._at += 1

    def post(self, rounds: int) -> None:
        """Posts the receives of the first ``rounds`` layers."""
        while self._posted < min(rounds, len(self._rounds)):
            for incoming in self._rounds[self._posted]:
                incoming.post()
            self._posted += 1


def new_buffer(nbytes: int) -> mx.array:
    """Returns memory that exists at once, even while a device has work queued."""
    return mx.array(np.zeros((nbytes,), dtype=np.uint8))


def bytes_of(array: mx.array) -> memoryview:
    view: memoryview = np.array(array, copy=False).data
    return view
