"""What a device waits at for other ranks: opened when their bytes have come, and when they never will."""

from __future__ import annotations

import threading
import time

import mlx.core as mx
import pytest

from outcore.errors import LinkError
from outcore_cluster.gates import FLAG_BYTES, Gates, TransferGate, gates_here


class Bytes:
    """A receive that ends when it is told to."""

    def __init__(self) -> None:
        self.come, self.error = threading.Event(), None  # type: ignore[var-annotated]
        self.ready = False

    def wait(self) -> None:
        self.come.wait(5)
        if self.error is not None:
            raise self.error


def as_it_is(gate: mx.array) -> mx.array:
    return gate[FLAG_BYTES // 4 :] + mx.array(0, mx.uint32)


def is_open(gate: TransferGate) -> bool:
    return bool(gate._flag[0])


def until(gate: TransferGate) -> None:
    end = time.monotonic() + 5
    while not is_open(gate) and time.monotonic() < end:
        time.sleep(0.001)
    assert is_open(gate)


@pytest.mark.parametrize("nbytes", [1, 4, 6, 8192])
def test_bytes_come_through_whole(nbytes: int) -> None:
    gate = TransferGate(nbytes, as_it_is)
    found = gate.behind()
    gate.into[:] = bytes(n % 251 for n in range(nbytes))
    gate.open()
    assert found.shape == (nbytes,)
    assert found.tolist() == [n % 251 for n in range(nbytes)]


def test_gates_open_when_their_bytes_have_come() -> None:
    gates, first, second = Gates(as_it_is), Bytes(), Bytes()
    a, b = gates.gate(8), gates.gate(8)
    assert a is not b
    a.open()
    one, other = gates.watch([first], [a]), gates.watch([second], [b])
    assert not is_open(a) and not is_open(b) and not one.ready
    first.come.set()
    one.wait()
    assert is_open(a) and not is_open(b) and one.ready and not other.ready
    second.come.set()
    other.wait()
    assert is_open(b)
    gates.close()


def test_a_gate_is_closed_as_bytes_are_about_to_come_and_not_as_a_graph_is_built() -> None:
    """Another text's bytes may be on their way through it then, and a device that has not looked yet waits for ever."""
    gates, first, second = Gates(as_it_is), Bytes(), Bytes()
    gate = gates.gate(8)
    first.come.set()
    gates.watch([first], [gate]).wait()
    gate.behind()
    assert is_open(gate)
    passage = gates.watch([second], [gate])
    assert not is_open(gate)
    second.come.set()
    passage.wait()
    gates.close()


def test_a_gate_whose_bytes_never_come_is_opened_and_whoever_waits_is_told() -> None:
    gates, lost = Gates(as_it_is), Bytes()
    gate = gates.gate(8)
    gate.behind()
    passage = gates.watch([lost], [gate])
    lost.error = LinkError("rank 1: gone")
    lost.come.set()
    with pytest.raises(LinkError, match="gone"):
        passage.wait()
    assert is_open(gate)
    gates.close()


def test_a_gate_is_opened_for_what_is_not_wanted_any_more() -> None:
    gates, late = Gates(as_it_is), Bytes()
    gate = gates.gate(8)
    gate.behind()
    passage = gates.watch([late], [gate])
    passage.open()
    assert is_open(gate)
    late.come.set()
    passage.wait()
    gates.close()


def test_a_tokens_gates_are_not_those_of_the_one_before_it() -> None:
    gates = Gates(as_it_is)
    made = []
    for _ in range(4):
        gates.next_token()
        made.append([gates.gate(8), gates.gate(8), gates.gate(16)])
    assert len({id(g) for token in made for g in token}) == 6
    assert [made[0], made[1]] == [made[2], made[3]]


def test_its_thread_ends_with_it_and_when_it_is_forgotten() -> None:
    for close in (True, False):
        gates, here = Gates(as_it_is), Bytes()
        here.come.set()
        gates.watch([here], []).wait()
        (thread,) = (t for t in threading.enumerate() if t.name == "outcore-gates")
        if close:
            gates.close()
        del gates
        thread.join(5)
        assert not thread.is_alive()


def test_only_cuda_has_them() -> None:
    assert mx.metal.is_available() or mx.default_device().type == mx.DeviceType.cpu
    assert gates_here() is None
