"""A link on ``mx.distributed``: JACCL (RDMA over Thunderbolt 5), NCCL and MPI, as ``mlx.launch --backend`` sets them
up, and MLX's own ring, with which it is tested.

Each message is two arrays, its kind and length and then its bytes, so that values and data may come in any order.
Receives run on one stream and sends on another: on one stream, two ranks that send each other much would wait for ever.

MLX cannot refuse strangers, so the network must be private. It waits for ever for a rank that is stopped or idle. If a
rank is lost, the others end with an error that names no rank, by ``exit(1)`` or by an abort (mlx#4276, mlx#4060);
``mlx.launch`` then ends all ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np

from outcore.errors import LinkError, UsageError
from outcore.text import one_line

# The kind of messages that carry values of ``agree`` and ``gather``; those of ``send`` have kind 0.
VALUE = 1


class _Arrival:
    """A posted receive. Its bytes are read while this or a later receive is waited for."""

    def __init__(self, link: MlxLink, source: int, into: memoryview) -> None:
        self._link, self._source = link, source
        self.into, self.ready = into, False

    def wait(self) -> None:
        while not self.ready:
            self._link.take(self._source)


class MlxLink:
    """One rank's link (``Link``). The constructor raises ``UsageError`` if MLX cannot set up the backend; methods raise
    ``LinkError`` if MLX reports that another rank is gone."""

    host = ""

    def __init__(self, backend: str) -> None:
        try:
            self._group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as e:
            raise UsageError(f"mx.distributed, {backend}: {one_line(e)}") from e
        self.rank, self.size = self._group.rank(), self._group.size()
        if backend == "ring" and self.size > 3:
            raise UsageError(
                "mx.distributed's ring sends to neighbours only: start at most three ranks, or use Outcore's own link"
            )
        device = mx.gpu if backend == "nccl" else mx.cpu
        self._sending, self._receiving = mx.new_stream(device), mx.new_stream(device)
        self._last, self._failed = mx.zeros(()), False
        self._posted: defaultdict[int, deque[_Arrival]] = defaultdict(deque)
        self._early: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._values: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def send(self, to: int, data: memoryview) -> None:
        """As in ``Link``; copies the bytes."""
        self._put(to, 0, data)

    def receive(self, source: int, into: memoryview) -> _Arrival:
        arrival = _Arrival(self, source, into.cast("B") if into.nbytes else memoryview(b""))
        self._posted[source].append(arrival)
        self._match(source)
        return arrival

    def agree(self, value: bytes) -> bytes:
        if self.rank:
            return self._value(0)
        for to in range(1, self.size):
            self._put(to, VALUE, value)
        return value

    def gather(self, value: bytes) -> list[bytes]:
        if self.rank:
            self._put(0, VALUE, value)
            return [self._value(0) for _ in range(self.size)]
        values = [value, *(self._value(rank) for rank in range(1, self.size))]
        for each in values:
            self.agree(each)
        return values

    def take(self, source: int) -> None:
        """Receives and stores the next message of rank ``source``, data or value."""
        kind, length = np.array(self._got(source, 2, mx.uint32))
        data = bytes(self._got(source, int(length), mx.uint8)) if length else b""
        (self._values if kind == VALUE else self._early)[source].append(data)
        self._match(source)

    def _match(self, source: int) -> None:
        while (posted := self._posted[source]) and (early := self._early[source]):
            arrival, data = posted.popleft(), early.popleft()
            if len(data) != arrival.into.nbytes:
                raise LinkError(f"rank {source}: sent {len(data)} bytes instead of {arrival.into.nbytes}", source)
            arrival.into[:] = data
            arrival.ready = True

    def _value(self, source: int) -> bytes:
        while not self._values[source]:
            self.take(source)
        return self._values[source].popleft()

    def _put(self, to: int, kind: int, data: bytes | memoryview) -> None:
        flat = np.frombuffer(data, np.uint8)
        for array in (np.array([kind, flat.size], np.uint32), flat)[: 1 + bool(flat.size)]:
            self._last = mx.distributed.send(mx.array(array), to, group=self._group, stream=self._sending)
            mx.async_eval(self._last)

    def _got(self, source: int, size: int, dtype: mx.Dtype) -> mx.array:
        found = mx.distributed.recv((size,), dtype, source, group=self._group, stream=self._receiving)
        try:
            mx.eval(found)
        except (RuntimeError, ValueError) as e:
            self._failed = True
            raise LinkError(f"rank {source}: {one_line(e)}", source) from e
        return found

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None:
        """Does nothing: a failed run is noticed at the next wait."""

    def flush(self) -> None:
        mx.eval(self._last)

    def fail(self, reason: str) -> None:
        """Notes that the run has failed. Other ranks notice when this process ends."""
        self._failed = True

    def close(self) -> None:
        """Sends what is queued; MLX closes the connections with the process."""
        if not self._failed:
            self.flush()
