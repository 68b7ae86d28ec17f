"""How many bytes the governor lets a model hold, on a pretended machine. Seconds are counted, not slept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from outcore.engine.governor import CALM_S, MOST_CALM_S, Decision, Governor, reserve
from outcore.machine.memory import MemoryLimit, Pressure

MB = 10**6
UNIT = 50 * MB
RESERVE = 64 * MB


def reading(available: int = 1000 * MB, total: int = 2000 * MB, **fields: object) -> Pressure:
    return replace(Pressure((MemoryLimit(total, available, "fake"),)), **fields)  # type: ignore[arg-type]


def given(decision: Decision) -> int:
    """Bytes that have to go; negative: that may come back."""
    return decision.held - decision.target


def sheds(readings: list[Pressure], pass_s: float = 1.0, spare: int = 8 * UNIT) -> list[int]:
    """Bytes that go at each of these readings, a second apart, each carried out."""
    governor, found = Governor(), []
    for second, read in enumerate(readings):
        decision = governor.decide(float(second), read, spare, spare, pass_s=pass_s)
        found.append(given(decision))
        if found[-1]:
            governor.acted(float(second), read, decision)
    return found


@dataclass
class Machine:
    """A machine with one limit: a process of ``base`` bytes and its resident units, and what others take.

    What does not fit is paged: a pass touches all of it. With ``lies`` the system calls everything available.
    """

    total: int = 2000 * MB
    base: int = 400 * MB
    resident: int = 24
    away: int = 0
    others: int = 0
    pass_s: float = 0.5
    lies: bool = False
    loading: int = 0  # major faults a pass, of libraries
    now: float = 1000.0
    swapped: int = 0
    faults: int = 0
    oom: int = 0
    governor: Governor = field(default_factory=Governor)
    log: list[tuple[float, int, int, Decision]] = field(default_factory=list)
    last: float | None = None

    @property
    def used(self) -> int:
        return self.base + self.resident * UNIT + self.others

    def check(self) -> Decision:
        available = self.total if self.lies else max(0, self.total - self.used)
        read = reading(available, self.total, swap_ins=self.swapped, major_faults=self.faults, oom=self.oom)
        held, spare = self.base + self.resident * UNIT, self.resident * UNIT
        decision = self.governor.decide(self.now, read, held, spare, [UNIT] * self.away, pass_s=self.last)
        assert not given(decision) or decision.reason
        moved = -(-given(decision) // UNIT)
        assert -self.away <= moved <= self.resident
        self.log.append((self.now, self.resident, moved, decision))
        self.resident, self.away = self.resident - moved, self.away + moved
        if moved:
            self.governor.acted(self.now, read, decision)
        return decision

    def sweep(self) -> None:
        pages = min(max(0, self.used - self.total), self.resident * UNIT) // 4096
        self.swapped += pages
        self.faults += pages + self.loading
        self.last = self.pass_s + pages * 1e-4
        self.now += self.last

    def run(self, seconds: float, each: Callable[[float], None] = lambda _: None) -> None:
        end, began = self.now + seconds, self.now
        while self.now < end:
            each(self.now - began)
            if self.check().stop:
                return
            self.sweep()

    def sheds(self) -> list[float]:
        return [at for at, _, moved, _ in self.log if moved > 0]

    def regrows(self) -> list[float]:
        return [at for at, _, moved, _ in self.log if moved < 0]


def test_it_looks_every_64_tokens_and_every_second_and_more_often_where_little_is_free() -> None:
    governor = Governor()
    assert governor.due(5.0, 0)
    governor.decide(5.0, reading(), UNIT, UNIT)
    assert not governor.due(5.9, 63)
    assert governor.due(5.9, 64) and governor.due(6.0, 0)
    governor.decide(6.0, reading(5 * RESERVE), UNIT, UNIT)
    assert not governor.due(6.1, 1) and governor.due(6.2, 1)


# Room


def test_nothing_happens_where_there_is_room() -> None:
    machine = Machine(resident=20)
    machine.run(600)
    assert not machine.sheds() and not machine.regrows()


def test_another_process_that_grows_takes_as_much_as_it_needs() -> None:
    machine = Machine(resident=24)
    start = machine.total - machine.used
    machine.run(120, lambda seconds: setattr(machine, "others", int(min(seconds * 20 * MB, start + 800 * MB))))
    assert machine.sheds() and not machine.regrows()
    assert all(machine.total - machine.base - n * UNIT >= 0 for _, n, _, _ in machine.log)
    assert machine.total - machine.used >= RESERVE / 2 and machine.resident in (6, 7)


def test_what_goes_is_what_is_missing() -> None:
    free = int(RESERVE * 0.45)
    decision = Governor().decide(0, reading(free), 8 * UNIT, 8 * UNIT)
    assert given(decision) == RESERVE - free
    assert "fake" in decision.reason and "28.8 MB of 2.00 GB are free" in decision.reason
    assert given(Governor().decide(0, reading(free), UNIT, MB)) == MB, "no more than there is"
    assert not given(Governor().decide(0, reading(int(RESERVE * 0.7)), UNIT, UNIT))


def test_what_others_took_of_late_is_expected_again() -> None:
    governor = Governor()
    for second, free in enumerate((900, 600)):
        assert not given(governor.decide(second, reading(free * MB), 0, 20 * UNIT, pass_s=1.0))
    decision = governor.decide(2, reading(300 * MB), 0, 20 * UNIT, pass_s=1.0)
    # 600 MB in the time that two passes and a look take: 300 of them are not there.
    assert given(decision) == (600 + 64 - 300) * MB
    assert "others have taken 600 MB of late" in decision.reason
    # Also in the middle of a pass that takes as long as the last one: what they took since it began and before.
    slow = Governor()
    looks = [(0, 900, None), (4, 700, 4.0), (5, 600, None), (7, 330, None)]
    missing = [given(slow.decide(at, reading(free * MB), 0, 20 * UNIT, pass_s=pass_s)) for at, free, pass_s in looks]
    assert missing == [0, 0, 0, (570 + 64 - 330) * MB]


@pytest.mark.parametrize("counts", [True, False])
def test_what_this_model_takes_and_gives_is_not_taken_by_others(counts: bool) -> None:
    governor, free = Governor(), [900, 300, 600, 600]
    for second, own in enumerate([0, 600, 300, 300]):
        # Its own memory may not count against the limit: a GPU's is not the machine's.
        read = reading((free[second] if counts else 300) * MB)
        assert not given(governor.decide(second, read, own * MB, 8 * UNIT, pass_s=1.0))


def test_what_a_pass_needs_is_not_room() -> None:
    assert not given(Governor().decide(0, reading(400 * MB), UNIT, UNIT, needed=100 * MB))
    assert given(Governor().decide(0, reading(400 * MB), UNIT, UNIT, needed=370 * MB)) == 34 * MB


def test_the_limit_that_is_shortest_for_its_size_counts() -> None:
    group = MemoryLimit(1000 * MB, 500 * MB, "group")
    machine = MemoryLimit(24_000 * MB, 300 * MB, "machine", common=True)
    decision = Governor().decide(0, Pressure((machine, group)), 20 * UNIT, 20 * UNIT)
    assert given(decision) == 420 * MB and "machine" in decision.reason  # 3 % of it are 720 MB
    sizes = (100 * MB, 10_000 * MB, 10**12)
    assert [reserve(MemoryLimit(n, n, "x")) for n in sizes] == [64 * MB, 300 * MB, 1000 * MB]


def test_a_limit_lowered_in_steps_is_followed_and_raised_again_regrown_into() -> None:
    machine = Machine(total=1700 * MB, resident=24)

    def turn(seconds: float) -> None:
        machine.total = (1700 if seconds < 10 else 1640 if seconds < 30 else 1300 if seconds < 60 else 1700) * MB

    machine.run(59, turn)
    low = machine.resident
    assert machine.used <= machine.total and 0 < low <= 18
    machine.run(400, lambda _: setattr(machine, "total", 1900 * MB))
    assert machine.resident == 24 and len(machine.sheds()) <= 4 and len(machine.regrows()) <= 6


# Paging


@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("over", [1, 10, 20])
def test_a_run_that_starts_above_the_cliff_comes_down_from_it(lies: bool, over: int) -> None:
    machine = Machine(resident=24, lies=lies)
    machine.total = machine.used - over * UNIT
    machine.run(90)
    assert machine.used <= machine.total and machine.last == machine.pass_s
    assert len(machine.sheds()) <= 5


def test_what_hurt_is_tried_ever_more_seldom() -> None:
    machine = Machine(resident=24, lies=True)
    machine.total = machine.base + 20 * UNIT  # the cliff lies at 20, and nothing but paging shows it
    machine.run(7200)
    hurt = machine.sheds()
    assert len(hurt) <= 16  # 1 + log2(900 / 10) + 7200 / 900, and one more
    gaps = [b - a for a, b in pairwise(hurt)]
    assert gaps[0] >= CALM_S and gaps[-1] >= MOST_CALM_S
    assert sum(resident for _, resident, _, _ in machine.log) / len(machine.log) > 16


def test_one_sign_alone_or_for_a_moment_sheds_nothing() -> None:
    machine = Machine(resident=20, loading=3000)
    machine.run(60)
    assert not machine.sheds()
    neighbour = [reading(swap_ins=n * 50_000) for n in range(60)]
    burst = [reading(100 * MB, swap_ins=5000 * (n > 4), major_faults=5000 * (n > 4)) for n in range(12)]
    started_again = [reading(swap_ins=10**6 * (n < 4), major_faults=10**6 * (n < 4)) for n in range(12)]
    for readings in (neighbour, burst, started_again):
        assert not any(sheds(readings))


def test_faults_with_swapping_and_swapping_without_room_shed_a_quarter_and_then_all() -> None:
    found = sheds([reading(major_faults=n * 1000, swap_ins=n * 1000) for n in range(12)])
    assert found[:4] == [0] * 4 and [n for n in found if n][:2] == [2 * UNIT, 8 * UNIT]
    assert any(sheds([reading(RESERVE, swap_ins=n * 1000) for n in range(12)]))


# What the system says outright


@pytest.mark.parametrize(
    "events", [{"oom": 4, "oom_kill": 1}, {"oom": 3, "oom_kill": 2}, {"oom": 3, "under_oom": True}]
)
def test_out_of_memory_in_the_group_sheds_everything(events: dict[str, int]) -> None:
    assert sheds([reading(oom=3, oom_kill=1), reading(**events)]) == [0, 8 * UNIT]


def test_macos_warning_sheds_a_quarter_once_and_its_critical_level_all() -> None:
    assert sheds([reading(macos_level=2)] * 60) == [2 * UNIT] + [0] * 59
    assert sheds([reading(macos_level=4)]) == [8 * UNIT]
    assert sheds([reading(macos_level=1)]) == [0]


# The way back


def test_it_regrows_after_calm_seconds_a_quarter_at_a_time_and_only_into_room() -> None:
    machine = Machine(resident=8, away=16)
    machine.total = machine.base + 19 * UNIT + 2 * RESERVE
    machine.run(120)
    grown = machine.regrows()
    assert grown[0] - 1000.0 >= CALM_S and all(b - a >= CALM_S for a, b in pairwise(grown))
    assert machine.resident == 19 and len(grown) == 2, "6 of 24 at once at most"
    assert machine.total - machine.used >= 2 * RESERVE


def test_swapping_keeps_it_from_regrowing() -> None:
    for each, grows in ((1000, False), (0, True)):
        governor = Governor()
        readings = [reading(swap_ins=n * each) for n in range(30)]
        found = [governor.decide(float(n), r, UNIT, UNIT, [UNIT], pass_s=1.0) for n, r in enumerate(readings)]
        assert any(given(d) < 0 for d in found) == grows


@pytest.mark.parametrize("period", [4, 40, 200])
def test_another_process_that_comes_and_goes_makes_no_flapping(period: int) -> None:
    machine = Machine(resident=24)
    machine.run(3600, lambda s: setattr(machine, "others", 500 * MB if int(s / period) % 2 else 0))
    assert len(machine.sheds()) <= 14 and len(machine.regrows()) <= 60


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_rules_hold(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(
        total=rng.randrange(900, 4000) * MB,
        resident=rng.randrange(1, 40),
        pass_s=rng.choice([0.02, 0.3, 2.0, 9.0]),
        lies=rng.random() < 0.2,
    )
    full, step = machine.resident, rng.choice([0.002, 0.02, 0.2])

    def wander(_: float) -> None:
        if rng.random() < step:
            machine.others = max(0, machine.others + rng.randrange(-600, 600) * MB)
        if rng.random() < step / 10:
            machine.oom += 1

    machine.run(1500 * min(1.0, machine.pass_s), wander)
    assert machine.resident + machine.away == full
    assert all(b - a >= CALM_S for a, b in pairwise(machine.regrows()))
    for _, _, moved, decision in machine.log:
        assert moved >= -max(1, -(-full // 4)) and (not (moved or decision.stop) or decision.reason)


# When it is over


def test_a_limit_below_the_smallest_plan_ends_the_run() -> None:
    machine = Machine(resident=4)
    machine.run(5)
    machine.total, began = machine.base + MB, machine.now
    machine.run(100)
    assert machine.log[-1][3].stop and machine.log[-1][3].reason
    assert machine.resident == 0 and 1.0 <= machine.now - began < 60


@pytest.mark.parametrize(
    ("first", "free"), [(1000, [0, 30]), (3, [3]), (1000, [10])], ids=["passes", "never more", "enough"]
)
def test_a_shortage_that_passes_or_was_there_from_the_start_does_not_end_the_run(first: int, free: list[int]) -> None:
    governor = Governor()
    governor.decide(0.0, reading(first * MB), 0, 0)
    for n in range(10, 60):
        assert not governor.decide(0.8 * n, reading(free[n % len(free)] * MB), 0, 0, [UNIT] * 4, pass_s=0.8).stop


def test_a_neighbour_that_goes_on_taking_ends_the_run_before_all_is_gone() -> None:
    governor, free = Governor(), 300 * MB
    for n in range(100):
        decision = governor.decide(0.2 * n, reading(free), 0, 0, pass_s=0.2)
        if decision.stop:
            break
        free -= 4 * MB
    assert decision.stop and 0 < free < RESERVE / 2
