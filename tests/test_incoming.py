"""What is received of other ranks: in order, and never where something lies that is still computed with."""

from __future__ import annotations

import mlx.core as mx

from memory_link import memory_links
from outcore.disk.metrics import Metrics
from outcore_cluster.link_protocol import Arrival
from outcore_cluster.stage import Incoming, Rounds, bytes_of, new_buffer


class Noting:
    """A link that notes what is received, and into what."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.link = memory_links(2)[0]
        self.posted: list[memoryview] = []

    def receive(self, source: int, into: memoryview) -> Arrival:
        self.posted.append(into)
        return _There()


class _There:
    ready = True

    def wait(self) -> None: ...


def test_a_view_shows_what_is_written_after_the_graph_was_built() -> None:
    buffer = new_buffer(16)
    view = buffer.view(mx.float32).reshape(2, 2)
    out = view + 1
    bytes_of(buffer)[:] = bytes_of(mx.array([1.0, 2.0, 3.0, 4.0]).view(mx.uint8))
    assert out.tolist() == [[2, 3], [4, 5]]


def test_what_comes_next_never_lies_where_the_last_is() -> None:
    link, rounds = Noting(), Rounds()
    passes: list[list[tuple[Incoming, mx.array]]] = []
    for _ in range(2):
        rounds.next_pass()
        passes.append([])
        for _ in range(4):
            buffer = rounds.buffer(8, 0)
            incoming = Incoming(link, 1, [bytes_of(buffer)], Metrics())  # type: ignore[arg-type]
            rounds.add(incoming)
            passes[-1].append((incoming, buffer))
    for mine in passes:
        first, second, third, fourth = [buffer for _, buffer in mine]
        assert first is third and second is fourth and first is not second
    assert passes[0][0][1] is not passes[1][0][1]

    # A layer's outputs of all passes, and the next's, are asked for when the first of them is waited for.
    passes[0][0][0].wait()
    assert len(link.posted) == 4
    passes[1][0][0].wait()
    assert len(link.posted) == 4
    passes[0][1][0].wait()
    assert len(link.posted) == 6
    passes[0][3][0].wait()
    assert len(link.posted) == 8
    order = [bytes_of(p[n][1]) for n in range(4) for p in passes]
    assert all(a.obj is b.obj or a == b for a, b in zip(link.posted, order, strict=True))


def test_a_longer_pass_has_a_larger_buffer() -> None:
    rounds = Rounds()
    rounds.next_pass()
    assert rounds.buffer(8, 0).nbytes == 8 and rounds.buffer(24, 0).nbytes == 24
