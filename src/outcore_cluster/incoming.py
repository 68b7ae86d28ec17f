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
    """Outputs of one layer of rank ``source`` in one pass. ``number``: the layer's place among those in ``rounds``."""

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
            # The next layer's outputs may arrive while this layer's are in use; the layer after it reuses its buffers.
            self.rounds.post(self.number + 2)
        began = self.metrics.clock()
        for arrival in self.arrivals:
            arrival.wait()
        self.metrics.ranks_s += self.metrics.clock() - began


class Rounds:
    """Posts the receives of several passes that share one reading of the weights, in the order of the messages: layer
    after layer, and for each layer pass after pass. Layers use two sets of buffers in turn: when the third layer's
    outputs arrive, the first layer's are no longer needed."""

    def __init__(self) -> None:
        self._rounds: list[list[Incoming]] = []
        self._posted = 0
        self._pass = -1
        self._at = 0
        self._buffers: dict[tuple[int, int, int], mx.array] = {}

    def next_pass(self) -> None:
        self._pass, self._at = self._pass + 1, 0

    def buffer(self, nbytes: int, n: int) -> mx.array:
        """Returns the buffer for the ``n``-th array of the next layer."""
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
    """Returns a buffer that is allocated at once, even while a device has work queued."""
    return mx.array(np.zeros((nbytes,), dtype=np.uint8))


def bytes_of(array: mx.array) -> memoryview:
    view: memoryview = np.array(array, copy=False).data
    return view
