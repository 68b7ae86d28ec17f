from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from outcore.engine.governor import Governor
from outcore.engine.governor_policy import CRITICAL, NORMAL, WARNING, Decision, Policy
from outcore.machine.memory import MemoryLimit
from outcore.machine.pressure import GroupEvents, Pressure, Stall

MB = 10**6
UNIT = 50 * MB
POLICY = Policy()


def reading(available: int = 1000 * MB, total: int = 2000 * MB, **fields: object) -> Pressure:
    return replace(Pressure((MemoryLimit(total, available, "fake"),)), **fields)  # type: ignore[arg-type]


@dataclass
class Machine:
    """A machine with one limit: a process of ``base`` bytes and its resident units, and what others take.

    What does not fit is paged: a sweep touches all of it. With ``lies`` the system calls everything available.
    """

    total: int = 2000 * MB
    base: int = 400 * MB
    resident: int = 24
    away: int = 0
    others: int = 0
    sweep_s: float = 0.5
    disk: float = 1.0  # times as slow as it was
    lies: bool = False
    cached: bool = False  # streamed through the page cache: stalls, but nothing is wrong
    loading: int = 0  # major faults a sweep, of libraries
    predicts: bool = True
    now: float = 1000.0
    swapped: int = 0
    faults: int = 0
    stalled: float = 0.0
    oom: int = 0
    alarms: int = 0
    governor: Governor = field(default_factory=Governor)
    log: list[tuple[float, int, Decision]] = field(default_factory=list)
    last: float | None = None

    @property
    def used(self) -> int:
        return self.base + self.resident * UNIT + self.others

    @property
    def pressure(self) -> Pressure:
        available = self.total if self.lies else max(0, self.total - self.used)
        limit = MemoryLimit(self.total, available, "fake")
        stall = Stall(0.0, int(self.stalled * 1e6))
        events = GroupEvents(oom=self.oom)
        return Pressure((limit,), self.swapped, 0, self.faults, stall, stall, events, alarms=self.alarms)

    def check(self) -> Decision:
        resident, shed = [UNIT] * self.resident, [UNIT] * self.away
        predicted = self.sweep_s if self.predicts else None
        decision = self.governor.check(
            self.now, self.pressure, resident, shed, sweep_s=self.last, predicted_s=predicted,
            own=self.base + self.resident * UNIT,
        )  # fmt: skip
        assert 0 <= decision.shed <= self.resident and 0 <= decision.regrow <= self.away
        assert not (decision.shed and decision.regrow)
        self.log.append((self.now, self.resident, decision))
        self.resident += decision.regrow - decision.shed
        self.away += decision.shed - decision.regrow
        return decision

    def sweep(self) -> None:
        over = min(max(0, self.used - self.total), self.resident * UNIT)
        pages = over // 4096
        paging_s = pages * 1e-4
        self.swapped += pages
        self.faults += pages + self.loading
        self.last = self.sweep_s * self.disk + paging_s
        self.stalled += paging_s + (0.25 * self.last if self.cached else 0.0)
        self.now += self.last

    def run(self, seconds: float, each: Callable[[float], None] = lambda _: None) -> None:
        end, began = self.now + seconds, self.now
        while self.now < end:
            each(self.now - began)
            if self.check().stop:
                return
            self.sweep()

    def acts(self) -> list[tuple[float, int, Decision]]:
        return [entry for entry in self.log if entry[2].shed or entry[2].regrow]

    def sheds(self) -> list[int]:
        return [d.shed for _, _, d in self.log if d.shed]

    def regrows(self) -> list[int]:
        return [d.regrow for _, _, d in self.log if d.regrow]


# How often to look


def test_it_looks_every_64_tokens_and_every_second() -> None:
    governor = Governor()
    assert governor.due(5.0, 0)
    governor.check(5.0, reading(), [UNIT])
    assert not governor.due(5.9, 63)
    assert governor.due(5.9, 64)
    assert governor.due(6.0, 0)


# Room


def test_nothing_happens_where_there_is_room() -> None:
    machine = Machine(resident=20)
    machine.run(600)
    assert not machine.acts() and {d.level for _, _, d in machine.log} == {NORMAL}


def test_another_process_that_grows_takes_as_much_as_it_needs() -> None:
    machine = Machine(resident=24, total=2000 * MB)
    start = machine.total - machine.used

    def grow(seconds: float) -> None:
        machine.others = int(min(seconds * 20 * MB, start + 800 * MB))

    machine.run(120, grow)
    assert machine.sheds() and max(machine.sheds()) <= 2
    assert all(machine.total - (machine.base + n * UNIT) >= 0 for _, n, _ in machine.log)
    assert machine.total - machine.used >= POLICY.reserve_least
    assert all(d.level == WARNING for _, _, d in machine.acts())
    assert machine.resident == 6 and not machine.regrows()


def test_room_that_is_short_but_keeps_still_is_left_alone() -> None:
    governor = Governor()
    free = int(POLICY.reserve_least * 0.7)
    for second in range(100):
        assert governor.check(second, reading(free), [UNIT] * 8, sweep_s=1.0) == Decision()
    # The same room where it was more a moment ago is not.
    assert governor.check(100, reading(free - 10 * MB), [UNIT] * 8, sweep_s=1.0).shed == 1


def test_room_below_the_floor_sheds_even_if_it_keeps_still() -> None:
    governor = Governor()
    decision = governor.check(0, reading(int(POLICY.reserve_least * 0.45)), [UNIT] * 8)
    assert (decision.level, decision.shed) == (WARNING, 1)
    assert "fake" in decision.reason and "28.8 MB of 2.00 GB are free" in decision.reason


def test_a_shed_is_as_large_as_what_is_missing() -> None:
    free, small = int(POLICY.reserve_least * 0.45), 2 * MB
    missing = POLICY.reserve_least - free
    decision = Governor().check(0, reading(free), [small] * 40)
    assert decision.shed == -(-missing // small) > 10
    # More than there is cannot be shed, and one at least is.
    assert Governor().check(0, reading(free), [small] * 3).shed == 3
    assert Governor().check(0, reading(free), [UNIT]).shed == 1


def test_the_first_units_go_first() -> None:
    free = int(POLICY.reserve_least * 0.45)
    assert Governor().check(0, reading(free), [UNIT, 1, 1, 1]).shed == 1
    assert Governor().check(0, reading(free), [1, 1, 1, UNIT]).shed == 4


def test_almost_no_room_sheds_what_brings_it_back_with_more_to_spare() -> None:
    free = POLICY.reserve_least // 4
    decision = Governor().check(0, reading(free), [UNIT] * 8)
    assert (decision.level, decision.shed) == (CRITICAL, 3)
    assert free + 2 * UNIT < POLICY.short * POLICY.reserve_least <= free + 3 * UNIT
    assert Governor().check(0, reading(free), [UNIT] * 2).shed == 2


def test_what_others_took_of_late_is_expected_again() -> None:
    governor = Governor()
    assert governor.check(0, reading(900 * MB), [UNIT] * 20) == Decision()
    assert governor.check(1, reading(600 * MB), [UNIT] * 20, sweep_s=1.0) == Decision()
    decision = governor.check(2, reading(300 * MB), [UNIT] * 20, sweep_s=1.0)
    # 600 MB in the time that two sweeps and a look take: 300 of them are not there.
    assert decision.level == WARNING and decision.shed == -(-(600 + 64 - 300) // 50)
    assert "others have taken 600 MB of late" in decision.reason


@pytest.mark.parametrize("counts", [True, False])
def test_what_this_model_takes_and_gives_is_not_taken_by_others(counts: bool) -> None:
    governor, free = Governor(), [900, 300, 600, 600]
    for second, own in enumerate([0, 600, 300, 300]):
        # Its own memory may not count against the limit: a GPU's is not the machine's.
        read = reading((free[second] if counts else 300) * MB)
        assert governor.check(second, read, [UNIT] * 8, sweep_s=1.0, own=own * MB) == Decision()


def test_little_room_is_looked_at_more_often() -> None:
    governor = Governor()
    governor.check(0.0, reading(int(POLICY.alert * POLICY.reserve_least) - 1), [UNIT])
    assert not governor.due(0.1, 1) and governor.due(0.2, 1)


def test_what_a_sweep_needs_is_not_room() -> None:
    free = 400 * MB
    assert Governor().check(0, reading(free), [UNIT] * 8, needed=100 * MB).level == NORMAL
    assert Governor().check(0, reading(free), [UNIT] * 8, needed=370 * MB).level == WARNING
    assert Governor().check(0, reading(free), [UNIT] * 8, needed=395 * MB).level == CRITICAL


def test_the_limit_that_is_shortest_for_its_size_counts() -> None:
    group = MemoryLimit(1000 * MB, 500 * MB, "group")
    machine = MemoryLimit(24_000 * MB, 600 * MB, "machine", common=True)
    governor = Governor()
    governor.check(0, Pressure((replace(machine, available=900 * MB), group)), [UNIT] * 8)
    decision = governor.check(1, Pressure((machine, group)), [UNIT] * 8, sweep_s=1.0)
    assert decision.shed and "machine" in decision.reason  # 3 % of it are 720 MB


def test_the_reserve_stays_within_bounds() -> None:
    sizes = (100 * MB, 10_000 * MB, 10**12)
    assert [POLICY.reserve(MemoryLimit(n, n, "x")) for n in sizes] == [64 * MB, 300 * MB, 1000 * MB]


def test_a_limit_lowered_in_steps_is_followed_and_raised_again_regrown_into() -> None:
    machine = Machine(total=1700 * MB, resident=24)

    def turn(seconds: float) -> None:
        machine.total = (1700 if seconds < 10 else 1640 if seconds < 30 else 1300 if seconds < 60 else 1700) * MB

    machine.run(59, turn)
    assert machine.used <= machine.total and 0 < machine.resident <= 18
    low = machine.resident
    machine.run(120, lambda _: setattr(machine, "total", 1900 * MB))
    assert low < machine.resident
    machine.run(300)
    assert machine.resident == 24  # the level that hurt was long ago
    assert len(machine.sheds()) <= 4 and len(machine.regrows()) <= 26


# Paging


@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("over", [1, 3, 10, 20])
def test_a_run_that_starts_above_the_cliff_comes_down_from_it(lies: bool, predicts: bool, over: int) -> None:
    machine = Machine(resident=24, lies=lies, predicts=predicts)
    machine.total = machine.used - over * UNIT
    machine.run(200)
    assert machine.used <= machine.total
    assert machine.log[-1][2].level == NORMAL and machine.last == machine.sweep_s
    assert len(machine.sheds()) <= 5
    fast = next(at for at, resident, _ in machine.log if machine.base + resident * UNIT <= machine.total)
    assert fast - 1000.0 < 120


def test_the_level_that_hurt_is_remembered_and_tried_ever_more_seldom() -> None:
    machine = Machine(resident=24, lies=True)
    machine.total = machine.base + 20 * UNIT  # the cliff lies at 20, and nothing but paging shows it
    machine.run(7200)
    above = [at for at, resident, _ in machine.log if resident > 20]
    hurt = [at for at, _, d in machine.log if d.shed]
    assert machine.resident in range(14, 21)
    assert len(hurt) <= 15  # 1 + log2(900 / 30) + 7200 / 900, and one more
    gaps = [b - a for a, b in pairwise(hurt)]
    assert gaps[0] >= POLICY.backoff_s and gaps[-1] >= POLICY.backoff_most_s
    assert sum(resident for _, resident, _ in machine.log) / len(machine.log) > 16
    assert len(above) < 0.1 * len(machine.log)


def test_a_slow_disk_alone_sheds_nothing() -> None:
    machine = Machine(resident=20, disk=5.0)
    machine.run(300)
    assert not machine.acts()


def test_a_slow_sweep_that_paging_explains_sheds() -> None:
    def run(disk: float, faults: int, swapped: int) -> int:
        governor, shed = Governor(), 0
        for n in range(6):
            read = reading(swap_ins=n * swapped, major_faults=n * faults)
            shed += governor.check(float(n), read, [UNIT] * 8, sweep_s=disk, predicted_s=1.0).shed
        return shed

    assert run(3.0, 50, 50) >= 2
    assert run(3.0, 50, 0) == run(3.0, 0, 50) == run(1.0, 50, 50) == run(1.9, 50, 50) == 0


def test_one_slow_sweep_sheds_nothing() -> None:
    governor = Governor()
    for n in range(20):
        read = reading(swap_ins=n * 50, major_faults=n * 50)
        seconds = 3.0 if n % 2 else 1.0
        assert not governor.check(float(n), read, [UNIT] * 8, sweep_s=seconds, predicted_s=1.0).shed


def test_libraries_that_are_loaded_shed_nothing() -> None:
    machine = Machine(resident=20, loading=3000, disk=4.0)
    machine.run(60)
    assert not machine.acts()


def test_cached_streaming_that_stalls_sheds_nothing_and_regrows() -> None:
    machine = Machine(resident=18, away=6, cached=True, total=1800 * MB)
    machine.run(300)
    assert not machine.sheds() and machine.resident == 24
    tight = Machine(resident=20, cached=True, total=400 * MB + 20 * UNIT + 100 * MB)
    tight.run(300)
    assert not tight.acts()


def test_a_neighbour_that_swaps_sheds_nothing_while_there_is_room() -> None:
    governor = Governor()
    for n in range(60):
        stall = Stall(90.0, n * 900_000)
        read = reading(swap_ins=n * 50_000, some=stall, full=stall)
        assert not governor.check(float(n), read, [UNIT] * 8, sweep_s=1.0, predicted_s=1.0).shed


def test_one_burst_of_faults_is_not_paging() -> None:
    governor = Governor()
    for n in range(10):
        read = reading(100 * MB, swap_ins=5000 * (n > 4), major_faults=5000 * (n > 4))
        assert not governor.check(float(n), read, [UNIT] * 8, sweep_s=1.0).shed


def test_checks_that_follow_each_other_at_once_do_not_make_rates() -> None:
    governor = Governor()
    for n in range(1000):
        read = reading(swap_ins=n, major_faults=n)  # 100 a second
        assert not governor.check(n / 100, read, [UNIT] * 8, sweep_s=0.01).shed


def test_paging_in_clumps_is_seen_by_checks_that_follow_each_other_at_once() -> None:
    governor, shed = Governor(), 0
    for n in range(600):
        count = 100 * (n // 30)  # 330 a second
        shed += governor.check(n / 100, reading(swap_ins=count, major_faults=count), [UNIT] * 8, sweep_s=0.01).shed
    assert shed >= 2


def test_paging_while_everything_waits_is_critical() -> None:
    governor = Governor()
    decisions = []
    for n in range(6):
        stall = Stall(60.0, n * 600_000)
        read = reading(swap_ins=n * 1000, major_faults=n * 1000, some=stall, full=stall)
        decisions.append(governor.check(float(n), read, [UNIT] * 8, sweep_s=1.0))
    assert [d.shed for d in decisions[:3]] == [0, 0, 8] and decisions[2].level == CRITICAL


def test_counters_that_start_again_are_no_rates() -> None:
    governor = Governor()
    for n in range(8):
        read = reading(swap_ins=10**6 * (n < 4), major_faults=10**6 * (n < 4), events=GroupEvents(oom=9 * (n < 4)))
        assert governor.check(3.0 * n, read, [UNIT] * 8, sweep_s=3.0) == Decision()


# What the system says outright


@pytest.mark.parametrize(
    "events", [GroupEvents(oom=4, oom_kill=1), GroupEvents(oom=3, oom_kill=2), GroupEvents(oom=3, under_oom=True)]
)
def test_out_of_memory_in_the_group_sheds_everything(events: GroupEvents) -> None:
    governor = Governor()
    assert governor.check(0, reading(events=GroupEvents(oom=3, oom_kill=1)), [UNIT] * 8) == Decision()
    decision = governor.check(1, reading(events=events), [UNIT] * 8)
    assert (decision.level, decision.shed) == (CRITICAL, 8)


def test_macos_warning_sheds_a_quarter_once_and_its_critical_level_all() -> None:
    governor, sheds = Governor(), []
    for second in range(60):
        decision = governor.check(float(second), reading(macos_level=2), [UNIT] * 8, [UNIT] * 0, sweep_s=1.0)
        sheds.append(decision.shed)
        assert decision.level == WARNING and "macOS warns" in decision.reason
    assert [(at, n) for at, n in enumerate(sheds) if n] == [(0, 2)]
    assert Governor().check(0, reading(macos_level=4), [UNIT] * 8).shed == 8
    assert Governor().check(0, reading(macos_level=1), [UNIT] * 8) == Decision()


def test_a_refused_limit_sheds_a_quarter_for_each_try() -> None:
    governor = Governor()
    sheds = [
        governor.check(float(n), reading(alarms=alarms), [UNIT] * 8, sweep_s=1.0).shed
        for n, alarms in enumerate([5, 5, 6, 6, 6, 9, 9])
    ]
    assert sheds == [0, 0, 2, 0, 0, 2, 0]


# After a shed, and the way back


def test_a_shed_is_given_a_sweep_and_a_second() -> None:
    governor, low = Governor(), reading(int(POLICY.reserve_least * 0.45))
    assert governor.check(0.0, low, [UNIT] * 8).shed == 1
    assert governor.check(0.5, low, [UNIT] * 7, [UNIT], sweep_s=0.5).shed == 0
    assert governor.check(5.0, low, [UNIT] * 7, [UNIT]).shed == 1  # the sweep was seen at 0.5
    assert governor.check(9.0, low, [UNIT] * 6, [UNIT] * 2).shed == 0  # no sweep since
    assert governor.check(9.1, low, [UNIT] * 6, [UNIT] * 2, sweep_s=4.0).shed == 1
    critical = reading(POLICY.reserve_least // 4)
    assert governor.check(9.2, critical, [UNIT] * 5, [UNIT] * 3).shed >= 3  # critical does not wait


def test_it_regrows_after_calm_seconds_a_few_at_a_time_and_only_into_room() -> None:
    machine = Machine(resident=8, away=16)
    machine.total = machine.base + 19 * UNIT + 2 * POLICY.reserve_least
    machine.run(120)
    grown = [(at, d.regrow) for at, _, d in machine.log if d.regrow]
    assert grown[0][0] - 1000.0 >= POLICY.calm_s and max(machine.regrows()) <= 6
    assert all(b - a >= POLICY.calm_s for (a, _), (b, _) in pairwise(grown))
    assert machine.resident == 19 and len(grown) == 2
    assert machine.total - machine.used >= 2 * POLICY.reserve_least


def test_it_does_not_regrow_to_the_level_that_hurt_until_long_after() -> None:
    machine = Machine(resident=24, away=0)
    machine.check()
    machine.sweep()
    machine.oom += 1
    machine.check()
    assert machine.resident == 0 and machine.governor.ceiling == 24
    machine.others, machine.total = 0, 9000 * MB
    began = machine.now
    machine.run(POLICY.backoff_s + 60)
    full = next(at for at, resident, _ in machine.log if resident == 24 and at > began)
    assert any(resident == 23 for _, resident, _ in machine.log) or full - began >= POLICY.backoff_s
    assert full - began >= POLICY.backoff_s


def test_swapping_keeps_it_from_regrowing() -> None:
    governor = Governor()
    for n in range(100):
        read = reading(swap_ins=n * 1000)
        assert not governor.check(float(n), read, [UNIT] * 4, [UNIT] * 4, sweep_s=1.0).regrow


def test_a_neighbour_that_is_swapped_out_keeps_nothing_from_regrowing() -> None:
    governor, regrown = Governor(), 0
    for n in range(30):
        regrown += governor.check(float(n), reading(swap_outs=n * 1000), [UNIT] * 4, [UNIT] * 4, sweep_s=1.0).regrow
    assert regrown


def test_another_process_that_comes_and_goes_makes_no_flapping() -> None:
    for period in (4, 15, 40, 90, 200):
        machine = Machine(resident=24, total=2000 * MB)

        def others(seconds: float, machine: Machine = machine, period: int = period) -> None:
            machine.others = 500 * MB if int(seconds / period) % 2 else 0

        machine.run(3600, others)
        assert len(machine.sheds()) <= 12, period
        assert sum(machine.regrows()) <= 12 * 24 and len(machine.regrows()) <= 120, period


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_rules_hold(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(
        total=rng.randrange(900, 4000) * MB,
        resident=rng.randrange(1, 40),
        sweep_s=rng.choice([0.02, 0.3, 2.0, 9.0]),
        lies=rng.random() < 0.2,
        cached=rng.random() < 0.3,
        predicts=rng.random() < 0.5,
    )
    full, step = machine.resident, rng.choice([0.002, 0.02, 0.2])
    ceilings: list[tuple[int | None, float]] = []

    def wander(_: float) -> None:
        ceilings.append((machine.governor.ceiling, machine.governor._ceiling_until))
        if rng.random() < step:
            machine.others = max(0, machine.others + rng.randrange(-600, 600) * MB)
        if rng.random() < step:
            machine.disk = rng.choice([1.0, 3.0])
        if rng.random() < step / 10:
            machine.oom += 1

    machine.run(1500 * min(1.0, machine.sweep_s), wander)
    last_warning = -1e9
    for at, resident, decision in machine.log:
        assert resident <= full
        by_room = decision.reason.startswith("only")
        if decision.level == CRITICAL and resident and not decision.stop:
            assert decision.shed == resident or (by_room and decision.shed * UNIT > POLICY.reserve_least)
        elif decision.shed:
            assert decision.level == WARNING
            assert by_room or decision.shed >= min(resident, -(-full // 4))
            assert at - last_warning >= POLICY.grace_s
            last_warning = at
        if decision.regrow:
            assert decision.regrow <= max(1, full // 4)
        if decision.shed or decision.stop:
            assert decision.reason
    for (at, resident, decision), (ceiling, until) in zip(machine.log, ceilings, strict=False):
        if decision.regrow and ceiling is not None and at < until:
            assert resident + decision.regrow < ceiling
    assert sum(machine.sheds()) - sum(machine.regrows()) == machine.away == full - machine.resident
    seconds = machine.now - 1000.0
    assert len(machine.regrows()) <= 1 + seconds / POLICY.calm_s


# When it is over


def test_a_limit_below_the_smallest_plan_ends_the_run() -> None:
    machine = Machine(resident=4)
    machine.run(5)
    machine.total = machine.base + 1 * MB
    began = machine.now
    machine.run(100)
    assert machine.log[-1][2].stop and "no resident" in machine.log[-1][2].reason
    assert machine.resident == 0 and POLICY.grace_s <= machine.now - began < 60


def test_a_shortage_that_passes_does_not_end_the_run() -> None:
    governor = Governor()
    governor.check(0.0, reading(), [])
    for n in range(1, 50):
        decision = governor.check(0.8 * n, reading(0 if n % 2 else 30 * MB), [], [UNIT] * 4, sweep_s=0.8)
        assert not decision.stop and decision.level != NORMAL


def test_a_run_that_never_had_room_goes_on() -> None:
    governor = Governor()
    for n in range(50):
        decision = governor.check(float(n), reading(3 * MB), [], [], sweep_s=1.0)
        assert decision.level == CRITICAL and not decision.stop


def test_little_room_without_residents_is_enough() -> None:
    governor = Governor()
    governor.check(0.0, reading(), [])
    for n in range(1, 50):
        assert not governor.check(float(n), reading(10 * MB), [], [], sweep_s=1.0).stop


def test_a_neighbour_that_goes_on_taking_ends_the_run_before_all_is_gone() -> None:
    governor, free = Governor(), 300 * MB
    for n in range(100):
        decision = governor.check(0.2 * n, reading(free), [], sweep_s=0.2)
        if decision.stop:
            break
        free -= 4 * MB
    assert decision.stop and 0 < free < POLICY.critical * POLICY.reserve_least


def test_slots_shrink_when_no_unit_is_left_before_the_run_ends() -> None:
    governor = Governor()
    governor.check(0.0, reading(), [])
    decision = governor.check(1.0, reading(20 * MB), [], sweep_s=1.0, spare=400 * MB)
    assert decision.shrink >= POLICY.reserve_least - 20 * MB and not decision.stop and not decision.shed
    assert governor.check(2.0, reading(), [], sweep_s=1.0, spare=200 * MB) == Decision()


def test_slots_shrink_again_a_sweep_and_a_second_later() -> None:
    governor = Governor()
    governor.check(0.0, reading(), [])
    shrinks = [governor.check(at, reading(20 * MB), [], sweep_s=0.5, spare=400 * MB).shrink for at in (1.0, 1.5, 2.5)]
    assert [bool(n) for n in shrinks] == [True, False, True]


def test_what_was_asked_for_before_a_shed_was_carried_out_is_not_asked_for_again() -> None:
    governor = Governor()
    governor.check(0.0, reading(alarms=0), [UNIT] * 8)
    assert governor.check(1.0, reading(alarms=2), [UNIT] * 8, sweep_s=1.0).shed == 2  # in the middle of a sweep
    governor.acted(1.9, reading(alarms=5))  # at its end
    assert governor.check(3.0, reading(alarms=5), [UNIT] * 6, [UNIT] * 2, sweep_s=1.0) == Decision()
    assert governor.check(4.0, reading(alarms=6), [UNIT] * 6, [UNIT] * 2, sweep_s=1.0).shed == 2


def test_a_limit_that_is_refused_for_long_with_nothing_left_to_give_ends_the_run() -> None:
    governor = Governor()
    stops = [governor.check(float(n), reading(alarms=n // 2), [], sweep_s=1.0).stop for n in range(20)]
    assert stops.index(True) >= POLICY.asked_s
    once = Governor()
    assert not any(once.check(float(n), reading(alarms=min(n, 3)), [], sweep_s=1.0).stop for n in range(40))
