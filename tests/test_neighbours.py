"""A machine that others use: what they disturb is measured again, and a prediction says how sure it is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import zoo
from outcore.calibration import calibrate
from outcore.calibration import check as calibrate_check
from outcore.calibration import compute as calibrate_compute
from outcore.calibration.compute import COMPUTE_S, MOST_TURNS, QUIET_TURNS, ROUNDS, LayerTimes, times_of
from outcore.calibration.random_model import TimedPass
from outcore.disk import cold_ranges as unread
from outcore.errors import ReadError
from outcore.loading.preparation import prepare
from outcore.machine.neighbours import BUSY, Neighbours, undisturbed
from outcore.machine.stopwatch import Stopwatch, other_threads
from outcore.plan.certainty import ASSUMED, PREDICTION, UNKNOWN, Now, basis, changes, token_seconds
from outcore.plan.machine_profile import Calibration, Conditions
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import make_plan

MB = 1_000_000
UNSEEN = Now()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_others_use_is_what_is_used_less_what_is_ours() -> None:
    clock, own, busy = Clock(), Clock(), Clock()
    watched = Neighbours(busy, own, clock, cores=4)
    clock.now, own.now, busy.now = 2.0, 1.5, 5.5
    assert watched.lap() == pytest.approx(0.5)
    clock.now, own.now, busy.now = 3.0, 5.5, 9.5
    assert watched.lap() == 0.0
    # Counters tick in hundredths of a second, and never quite together.
    clock.now, own.now = 4.0, 5.6
    assert watched.lap() == 0.0
    assert watched.whole() == pytest.approx((9.5 - 5.6) / 4 / 4)
    assert Neighbours(lambda: None, own, clock).lap() is None
    assert Neighbours(busy, own, clock, cores=4).lap() is None, "no time has passed"
    assert undisturbed([0.0, BUSY, None, 0.9, BUSY / 2]) == [0, 2, 4]


def test_this_machines_counters_are_read() -> None:
    watched = Neighbours()
    sum(range(2_000_000))
    load = watched.lap()
    assert load is None or 0 <= load <= 1


def test_a_stopwatch_leaves_out_the_time_in_which_others_had_the_processor() -> None:
    clock, own = Clock(), Clock()
    threads = {"a": 1.0, "b": 5.0}
    watch = Stopwatch(clock, lambda: dict(threads), own)
    before = watch.mark()
    clock.now, own.now = 9.0, 0.5
    threads |= {"a": 3.0, "b": 6.0, "new": 0.25}
    after = watch.mark()
    # The graph is built, then the busiest thread computes: or both at a time.
    assert watch.between(before, after) == (9.0, 2.5)
    assert watch.between(before, after, ahead=True) == (9.0, 2.0)
    clock.now = 9.1
    assert watch.between(after, watch.mark()) == (pytest.approx(0.1), 0.0)
    unknown = Stopwatch(clock, None, own)
    assert unknown.between(unknown.mark(), unknown.mark()) == (0.0, None)


def test_the_kernel_counts_what_each_thread_does(tmp_path: Path) -> None:
    ends, worked = [threading.Event(), threading.Event()], []

    def work() -> None:
        while time.thread_time() < 0.2:
            pass
        worked.append(time.thread_time())
        ends[0].set()
        ends[1].wait()

    before = other_threads()
    thread = threading.Thread(target=work)
    thread.start()
    ends[0].wait()
    after = other_threads()
    ends[1].set()
    thread.join()
    assert other_threads(tmp_path / "none") is None
    if after is not None:  # Linux
        new = after.keys() - (before or {}).keys()
        assert max(after[name] for name in new) == pytest.approx(worked[0], abs=0.02)


class Shared:
    """A model whose layer takes 1 ms, on a machine that others slow down.

    What is computed takes place in numbers: the clock goes on by as much.

    Args:
        slowness: by what in a turn (-1: before the first); 1: not at all.
    """

    def __init__(self, slowness: Callable[[int], float]) -> None:
        self.clock, self.slowness, self.turn = Clock(), slowness, -1
        self.profile: Any = SimpleNamespace(
            size=SimpleNamespace(layers=[SimpleNamespace(kind="layer")] * 4, rest_kind="rest"),
            layers=[None] * 4,
            order=range(4),
        )
        self._slow = self._passed = 0.0

    def _takes(self, seconds: float) -> float:
        slowness = self.slowness(self.turn)
        self.clock.now += seconds * slowness
        self._passed += seconds * slowness
        self._slow += seconds * slowness if slowness > 1 else 0.0
        return seconds * slowness

    def watched(self, n: int, enough: Callable[[TimedPass], bool] = lambda _: False) -> TimedPass:
        seen = TimedPass(prelude=self._takes(0.0001), whole=True)
        for _ in range(4):
            seen.gaps.append(self._takes(0.00001))
            seen.layers["layer"].append(self._takes(0.001 * n))
        seen.head = seen.sliced = self._takes(0.0002 * n)
        return seen

    def decode(self, prefill: int, steps: int, most_s: float) -> list[tuple[float, float | None]]:
        self.turn += 1
        return [(self._takes(0.00424), None) for _ in range(steps)]

    def head(self, n: int) -> tuple[float, float | None]:
        return self._takes(0.0002 * n), None

    def lap(self) -> float:
        """In the place of ``Neighbours.lap``."""
        load = self._slow / self._passed if self._passed else 0.0
        self._slow = self._passed = 0.0
        return load


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_compute, "PROMPT_TOKENS", (64,))


def measured(machine: Shared) -> LayerTimes:
    made: Any = machine
    return times_of(made, 1e-5, neighbours=made)


def same(found: LayerTimes, by: float = 0.001, kinds: Sequence[str] = ("layer", "rest")) -> bool:
    """Whether it is what a machine gives that is left alone."""
    quiet = measured(Shared(lambda _: 1.0)).kinds
    return all(found.kinds[k][n] == pytest.approx(s, rel=by) for k in kinds for n, s in quiet[k].items())


def test_a_machine_that_is_left_alone_needs_few_turns() -> None:
    machine = Shared(lambda _: 1.0)
    found = measured(machine)
    assert found.kinds["layer"][1] == pytest.approx(0.001, rel=0.03) and found.kinds["layer"][64] > 0.06
    assert found.conditions is not None
    assert found.conditions.load == 0 and found.conditions.spread < 0.05
    assert machine.turn == ROUNDS - 1


@pytest.mark.parametrize("busy", [{0}, {1, 2}, {0, 1, 2}, {-1, 0, 2, 3, 5}])
def test_turns_that_others_disturbed_are_taken_again_and_do_not_count(busy: set[int]) -> None:
    machine = Shared(lambda turn: 3.0 if turn in busy else 1.0)
    found = measured(machine)
    assert same(found)
    assert found.conditions is not None and found.conditions.load == 0 and found.conditions.spread < 0.05
    quiet = [turn for turn in range(MOST_TURNS) if turn not in busy]
    assert machine.turn == max(ROUNDS - 1, quiet[QUIET_TURNS - 1])


def test_where_others_never_stop_the_best_moments_count_and_the_spread_says_so() -> None:
    rng = random.Random(1)
    machine = Shared(lambda _: rng.uniform(1.01, 3.0))
    found = measured(machine)
    assert same(found, by=0.35, kinds=["layer"]), "medians would be twice as long"
    assert found.conditions is not None
    assert found.conditions.load == 1.0 and found.conditions.spread > 0.5
    assert machine.turn == MOST_TURNS - 1 and machine.clock.now < COMPUTE_S


def test_where_the_time_of_our_own_threads_is_known_others_do_not_matter() -> None:
    rng = random.Random(1)
    machine = Shared(lambda _: rng.uniform(1.5, 9.0))
    quiet = Shared(lambda _: 1.0)
    watched, decode = machine.watched, machine.decode

    def watched_by_thread(n: int, enough: Callable[[TimedPass], bool] = lambda _: False) -> TimedPass:
        seen = watched(n)
        seen.working = quiet.watched(n)
        return seen

    machine.watched = watched_by_thread  # type: ignore[method-assign]
    machine.decode = lambda *args: [(s, 0.00424) for s, _ in decode(*args)]  # type: ignore[method-assign]
    found = measured(machine)
    assert same(found)
    assert found.conditions is not None
    assert found.conditions.load == 1.0 and found.conditions.spread < 0.05
    assert machine.turn == ROUNDS - 1


def test_a_slow_model_on_a_busy_machine_is_measured_in_time() -> None:
    machine = Shared(lambda _: 400.0)  # half a second for a layer
    assert measured(machine).kinds["layer"][1] == pytest.approx(0.4, rel=0.05)
    assert machine.clock.now < 1.5 * COMPUTE_S


def test_waiting_for_each_layer_makes_nothing_faster() -> None:
    """Single tokens that others disturbed all along, and layers that they did not, being so short."""
    machine = Shared(lambda _: 1.0)
    machine.decode = lambda prefill, steps, most_s: [(machine._takes(0.02), None) for _ in range(steps)]  # type: ignore[method-assign]
    assert measured(machine).kinds["layer"][1] == pytest.approx(0.001, rel=0.001)


# Reads beside computing


def test_reads_that_others_disturbed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[float | None] = []
    alone, both = iter([2.0, 1.0, 2.1]), iter([1.9, 0.2, 2.0])
    begun = [0]

    class Reads:
        def __init__(self, *_: Any) -> None: ...

        def begin(self) -> Callable[[], bool]:
            begun[0] += 1
            return lambda: True

        def gbps(self) -> float:
            return next(alone if begun[0] % 2 else both)

        def close(self) -> None: ...

    monkeypatch.setattr(calibrate, "BackgroundReads", Reads)
    seconds = iter([0.01, 0.01, 0.01, 0.01, 0.09, 0.01, 0.012, 0.01, 0.01, 0.05, 0.01, 0.05, 0.01, 0.05])

    def load(_: Callable[[], bool]) -> list[tuple[str, float]]:
        return [("product", next(seconds))] * 2

    monkeypatch.setattr(calibrate, "product_load", lambda: load)
    bench: Any = SimpleNamespace(unread=SimpleNamespace(nbytes=1 << 30))
    best: Any = SimpleNamespace(setting=None, gbps=2.0)
    neighbours: Any = SimpleNamespace(lap=lambda: loads.pop(0))
    loads[:] = [0.0, 0.0, 0.9, 0.0]
    gbps, reading, computing = calibrate._beside(bench, best, None, lambda *_: None, neighbours)
    assert gbps == pytest.approx(2.05) and reading == pytest.approx(1.05, rel=0.01)
    assert computing == pytest.approx(1.1)
    # Where they never stop: the best of each.
    alone, both = iter([2.0, 1.0, 2.1]), iter([1.9, 0.2, 2.0])
    loads[:] = [0.0, 0.9, 0.9, 0.9]
    gbps, reading, computing = calibrate._beside(bench, best, None, lambda *_: None, neighbours)
    assert gbps == 2.1 and reading == pytest.approx(1.05)
    assert computing == 1.0, "what reads cost cannot be told from what others took"


# What is kept, and what is said of it


def test_a_calibration_knows_when_and_how_quietly_it_was_made_and_draws_no_numbers_of_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (calibrate_compute, "TOKENS", (1, 4)), (calibrate_compute, "PROMPT_TOKENS", ()),
        (calibrate_compute, "MOST_TURNS", 3), (calibrate_check, "PRODUCT_S", 0.01), (calibrate, "ALONE_S", 0.05),
        (unread, "SCRATCH_BYTES", 48 << 20), (unread, "LEAST_SCRATCH", 48 << 20),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path))
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(7)
    busy: Any = SimpleNamespace(lap=lambda: 0.7, whole=lambda: 0.6)
    monkeypatch.setattr(calibrate.time, "time", lambda: 1.9e9)
    found = calibrate.calibrate(prepared, neighbours=lambda: busy)
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    assert found.disk_conditions is not None and found.product_s is not None and found.product_s > 0
    assert found.disk_conditions.load == 0.6 and found.disk_conditions.at == 1.9e9
    assert found.kind_conditions.keys() == found.kinds.keys() == calibrate.kinds_of(prepared)
    known = basis(found, calibrate.kinds_of(prepared))
    assert known.load == 0.7 and known.age_s(1.9e9 + 60) == 60 and known.age_s(0) == 0


MODEL = ModelSize(
    layers=(LayerSize(resident=100 * MB, slot=100 * MB, read=100 * MB, kind="layer"),) * 20,
    non_layer=50 * MB, cache=20 * MB, token=100_000, hidden=8_000, score=64, window=0, state=0, logits=MB,
    context=64, prompt=16, rest_kind="rest",
)  # fmt: skip


def machine(read_gbps: float, load: float | None, spread: float) -> Calibration:
    how = Conditions(1.9e9, load, spread)
    kinds = {"layer": {1: 0.02, 16: 0.08}, "rest": {1: 0.02}}
    return Calibration(
        read_gbps=read_gbps, kinds=kinds, disk_conditions=how, kind_conditions=dict.fromkeys(kinds, how), measured=True
    )


def range_of(calibration: Calibration, now: Now = UNSEEN, budget: int = 5000 * MB) -> tuple[float, float]:
    """The fastest and the slowest, in times of what is predicted."""
    plan = make_plan(MODEL, budget, calibration=calibration)
    fast, slow = token_seconds(MODEL, plan, calibration, basis(calibration, calibration.kinds), now)
    return fast / plan.token_s, slow / plan.token_s


def test_a_prediction_is_as_sure_as_what_it_rests_on() -> None:
    sure = 1 + PREDICTION + 0.05
    for read_gbps, budget in ((5.0, 5000 * MB), (0.5, 300 * MB)):  # computing or reading is the limit
        assert range_of(machine(read_gbps, 0.0, 0.05), budget=budget) == pytest.approx((1 / sure, sure), rel=0.02)
    fast, slow = range_of(machine(5.0, 0.8, 0.9))
    assert fast == pytest.approx(0.5) and slow == pytest.approx(2.0)
    # Beside others that never stopped, samples that agree prove little.
    assert range_of(machine(5.0, 0.8, 0.05)) == pytest.approx((1 / (1 + UNKNOWN), 1 + UNKNOWN))
    unknown = replace(machine(5.0, None, 0.0), disk_conditions=None, kind_conditions={})
    assert range_of(unknown) == pytest.approx((1 / (1 + UNKNOWN), 1 + UNKNOWN))
    never = replace(unknown, measured=False)
    assert range_of(never) == pytest.approx((1 / (1 + ASSUMED), 1 + ASSUMED))


def test_a_machine_that_is_slower_now_makes_the_range_wider_on_that_side() -> None:
    quiet = machine(5.0, 0.0, 0.05)
    fast, slow = range_of(quiet)
    assert range_of(quiet, Now(compute=2.5, load=0.9)) == pytest.approx((fast, 2.5))
    assert range_of(quiet, Now(compute=0.4)) == pytest.approx((0.4, slow))
    assert range_of(machine(0.5, 0.0, 0.05), Now(read=3.0), 300 * MB)[1] == pytest.approx(3.0, rel=0.02)


def test_what_differs_by_much_is_said_in_one_line() -> None:
    assert changes(Now(1.2, 0.8, 0.5), "2 days ago", 0.0) == []
    (line,) = changes(Now(2.5, 1.0, 0.93), "2 days ago", 0.02)
    assert "computing takes 2.5 times as long now as when this machine was measured 2 days ago" in line
    assert "others use 93 % of the cores now, 2 % then" in line and "wait until they are done" in line
    (line,) = changes(Now(0.4, None, 0.0), "1 hour ago", 0.9)
    assert "computing takes 0.4 times as long" in line and "measure again (outcore calibrate --force)" in line
    assert len(changes(Now(2.0, 2.0, None), "just now", None)) == 2


def test_the_machine_is_compared_with_what_it_was() -> None:
    measured = replace(machine(2.0, 0.0, 0.0), product_s=0.01)
    busy: Any = SimpleNamespace(lap=lambda: 0.5)
    large: Any = SimpleNamespace(stat=lambda: SimpleNamespace(st_size=10**9))
    small: Any = SimpleNamespace(stat=lambda: SimpleNamespace(st_size=10**6))

    def look(calibration: Calibration, file: Any, rate: Callable[..., float]) -> Now:
        return calibrate_check.look(
            calibration, [file], 2, neighbours=busy, products=lambda _: [0.01, 0.03, 0.03], rate=rate
        )

    def fails(*_: Any, **__: Any) -> float:
        raise ReadError("gone")

    assert look(measured, large, lambda *_, **__: 0.5) == Now(pytest.approx(3.0), 4.0, 0.5)
    assert look(measured, small, fails) == Now(pytest.approx(3.0), None, 0.5), "too small to say anything"
    assert look(measured, large, fails) == Now(pytest.approx(3.0), None, 0.5)
    old = replace(measured, product_s=None, disk_conditions=None)
    assert look(old, large, fails) == Now(None, None, 0.5)


def test_a_product_of_every_core_is_timed() -> None:
    for streams in (1, 2):
        times = calibrate_check.product_times(streams, seconds=0.01)
        assert len(times) >= 4 and min(times) > 0
