"""The ring in numbers, against what can be worked out by hand and against what was measured."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import pairwise

import pytest

from outcore.plan.prediction import Turn, simulate


def layers(n: int, compute: float, read: float, resident: Collection[int] = ()) -> list[Turn]:
    return [Turn(compute, 0.0 if i in resident else read) for i in range(n)]


def test_nothing_streamed_is_the_sum_of_computing() -> None:
    timing = simulate([Turn(0.5), Turn(0.25)], 3)
    assert timing.sweep_s == timing.first_s == 0.75


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_equal_units_take_the_longer_of_reading_and_computing(slots: int) -> None:
    assert simulate(layers(32, 1.0, 2.0), slots).sweep_s == pytest.approx(64)
    assert simulate(layers(32, 2.0, 1.0), slots).sweep_s == pytest.approx(64)


def test_the_first_pass_finds_full_slots() -> None:
    # Three of ten units are there already.
    assert simulate(layers(10, 0.0, 1.0), 3).first_s == pytest.approx(7)


def test_a_ring_of_two_waits_for_the_large_units_and_one_of_three_does_not() -> None:
    # As measured (benchmarks/experiments/07): 1.27 times the time with two slots, the same with three.
    halves = [s for _ in range(32) for s in (Turn(0.3, 0.5), Turn(1.2, 1.5))]
    whole = simulate(layers(32, 1.5, 2.0), 2).sweep_s
    assert simulate(halves, 3).sweep_s == pytest.approx(whole, rel=0.01)
    assert simulate(halves, 2).sweep_s > 1.1 * whole


def test_residents_in_one_block_leave_the_disk_idle() -> None:
    # As measured (benchmarks/experiments/02): 1.33 to 1.37 times the time of residents that are spread.
    even = simulate(layers(32, 1.0, 2.4, set(range(1, 32, 2))), 3).sweep_s
    for block in (set(range(16)), set(range(16, 32))):
        assert 1.2 < simulate(layers(32, 1.0, 2.4, block), 3).sweep_s / even < 1.45


def test_bounds_that_no_pass_can_beat() -> None:
    rng = random.Random(3)
    for _ in range(200):
        stages = [
            Turn(rng.random(), rng.choice([0.0, rng.random() * rng.choice([0.1, 1, 5])]))
            for _ in range(rng.randint(8, 40))
        ]
        reads, computing = sum(s.read_s for s in stages), sum(s.compute_s for s in stages)
        times = [simulate(stages, slots).sweep_s for slots in (2, 3, 4)]
        assert all(t >= max(reads, computing) - 1e-9 for t in times)
        assert all(t <= reads + computing + 1e-9 for t in times)
        assert all(b <= a + 1e-9 for a, b in pairwise(times)), "more slots are never slower"
