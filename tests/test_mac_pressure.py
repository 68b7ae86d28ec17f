"""The governor on a pretended Mac: what is shed and taken back while macOS warns. Seconds are counted, not slept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import mlx_lm
import pytest

import outcore
from fake_darwin_memory import GB, FakeDarwin
from outcore.engine.governor import MOST_CALM_S, Decision, Governor, Watch, reserve, room

UNIT = 200_000_000
BASE = 400_000_000


def roomy() -> FakeDarwin:
    return FakeDarwin(wired=2 * GB, idle=2 * GB, busy=GB, files=2 * GB, compressed=0)


@dataclass
class Run:
    """A model of 24 layers on a Mac, a sweep each half second."""

    mac: FakeDarwin
    resident: int = 24
    away: int = 0
    now: float = 1000.0
    governor: Governor = field(default_factory=Governor)
    log: list[tuple[float, int, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hold()

    def hold(self) -> None:
        self.mac.take(BASE + self.resident * UNIT - self.mac.own)

    def run(self, seconds: float, each: Callable[[float], None] = lambda _: None) -> None:
        began = self.now
        while self.now - began < seconds:
            each(self.now - began)
            self.mac.settle()
            if self.governor.due(self.now, 1):
                read, spare = self.mac.reading(), self.resident * UNIT
                decision = self.governor.decide(self.now, read, self.mac.own, spare, [UNIT] * self.away, pass_s=0.5)
                assert not decision.stop
                moved = -((decision.target - decision.held) // UNIT)
                self.log.append((self.now - began, moved, decision))
                if moved:
                    self.governor.acted(self.now, read, decision)
                self.resident, self.away = self.resident - moved, self.away + moved
                self.hold()
            self.now += 0.5

    def sheds(self) -> list[tuple[float, int]]:
        return [(at, moved) for at, moved, _ in self.log if moved > 0]

    def regrows(self) -> list[tuple[float, int]]:
        return [(at, -moved) for at, moved, _ in self.log if moved < 0]


def test_a_warning_of_a_minute_with_room_left_sheds_once_and_is_grown_back_from() -> None:
    run = Run(roomy())
    run.mac.told = 2
    run.run(60)
    assert run.sheds() == [(0.0, 6)] and not run.regrows()
    run.mac.told = None
    run.log.clear()
    run.run(120)
    assert not run.sheds() and run.resident == 24
    assert run.regrows()[0][0] >= 10


def test_a_warning_after_what_it_took_has_come_back_is_answered_again() -> None:
    run = Run(roomy())
    run.mac.told = 2
    run.run(10)
    run.mac.told = None
    run.run(120)
    assert run.resident == 24
    run.log.clear()
    run.mac.told = 2
    run.run(60)
    assert [n for _, n in run.sheds()] == [6]


def test_a_shed_for_want_of_room_does_not_ask_for_another_answer() -> None:
    governor, read, spare = Governor(), roomy().reading(), 8 * UNIT
    tight = tuple(replace(limit, available=reserve(limit) * 2 // 5) for limit in read.limits)
    warned, short = replace(read, macos_level=2), replace(read, limits=tight)
    for now, each, sheds in ((0.0, warned, True), (8.0, short, True), (20.0, warned, False)):
        decision = governor.decide(now, each, spare, spare, pass_s=0.5)
        assert (decision.target < decision.held) == sheds
        governor.acted(now, each, decision)


def test_a_critical_level_sheds_everything_at_once_and_it_comes_back() -> None:
    run = Run(roomy())
    run.run(5)
    run.mac.told = 4
    run.log.clear()
    run.run(20)
    assert run.sheds() == [(0.0, 24)] and run.resident == 0
    run.mac.told = 2
    run.run(60)
    assert len(run.sheds()) == 1 and not run.regrows()
    run.mac.told = None
    run.run(300)
    assert run.resident == 24 and len(run.sheds()) == 1


def test_weights_alone_make_the_warning_and_giving_some_up_does_not_end_it() -> None:
    """What the warning is of: 2 GB could be had without compressing anything, and the level is 2."""
    run = Run(FakeDarwin(idle=GB, busy=GB, files=2 * GB, compressed=14 * GB), resident=0)
    assert run.mac.level == 1
    swapped, compressed = run.mac.swapped, run.mac.compressed
    run.resident = 30
    run.hold()
    assert run.mac.level == 2 and (run.mac.swapped, run.mac.compressed) == (swapped, compressed)
    assert run.mac.free + run.mac.files > 2 * GB
    run.run(1200)
    assert [n for _, n in run.sheds()] == [8] and not run.regrows() and run.resident == 22
    assert run.mac.level == 2, "normal again only where the compressor holds a third less than that"


def test_what_comes_back_does_not_bring_the_warning_about() -> None:
    run = Run(FakeDarwin(idle=GB, busy=GB, files=2 * GB, compressed=13 * GB), resident=4, away=36)
    run.run(900)
    assert run.mac.level == 1 and not run.sheds()
    assert run.mac.unwired - run.mac.compressor < 2 * UNIT, "as far as it goes"
    assert run.resident > 20


@pytest.mark.parametrize("period", [5, 90])
def test_neighbours_that_wire_memory_and_unwire_it_make_no_flapping(period: int) -> None:
    run = Run(FakeDarwin(idle=GB, busy=GB, files=2 * GB, compressed=13 * GB))

    def others(at: float) -> None:
        run.mac.wired = int(3.5 * GB) if int(at / period) % 2 else 2 * GB

    run.run(900, others)
    assert 1 <= len(run.sheds()) <= 10 and max(n for _, n in run.sheds()) <= 6
    assert sum(n for _, n in run.regrows()) <= sum(n for _, n in run.sheds())
    assert run.resident >= 12 and run.mac.swapped == 0


def test_neighbours_that_take_what_there_is_are_made_room_for() -> None:
    run = Run(FakeDarwin(idle=2 * GB, busy=GB, files=2 * GB, compressed=6 * GB))

    def others(at: float) -> None:
        run.mac.busy = int(GB + min(at, 100) * 0.08 * GB)

    run.run(300, others)
    assert run.sheds() and all("should be free" in d.reason for _, moved, d in run.log if moved > 0)
    assert run.resident > 0 and run.mac.swapped == 0


def test_levels_that_flap_by_themselves_are_answered_ever_more_seldom() -> None:
    run = Run(roomy())

    def flap(at: float) -> None:
        run.mac.told = 2 if int(at / 15) % 2 else 1

    run.run(2400, flap)
    gaps = [b - a for (a, _), (b, _) in pairwise(run.sheds())]
    assert 2 <= len(run.sheds()) <= 6 and max(gaps) >= MOST_CALM_S / 2


def test_nothing_new_is_taken_while_macos_warns() -> None:
    mac, governor = roomy(), Governor()
    read = mac.reading()
    assert governor.growth(read) == room(read.limits) > 0
    for level, growth in ((1, room(read.limits)), (2, 0), (4, 0), (None, room(read.limits))):
        assert governor.growth(replace(read, macos_level=level)) == growth
    none = replace(read, limits=(replace(read.limits[0], available=0),), macos_level=2)
    assert governor.growth(none) < 0


def test_a_warning_that_goes_on_is_not_looked_at_all_the_time() -> None:
    """xnu answers two to ten times a second, all programs together."""
    run = Run(roomy())
    run.mac.told = 2
    run.run(20)
    assert not run.governor.due(run.now - 0.5 + 0.3, 1)
    early = Governor()
    early.decide(0.0, run.mac.reading(), UNIT, UNIT)
    assert early.due(0.3, 1)


def test_room_that_is_missing_beside_a_warning_is_made_at_once() -> None:
    run = Run(roomy())
    run.mac.told = 2
    run.run(10)
    run.log.clear()
    run.mac.busy += run.mac.free + run.mac.files + run.mac.idle  # and the compressor has its work
    run.run(4)
    assert run.sheds()


def test_a_real_model_answers_a_warning_once_and_says_the_same(quick_models: Callable[[int], Path]) -> None:
    plain, tokenizer = mlx_lm.load(str(quick_models(6)))
    prompt = "def f(x):\n"
    expected = [r.token for r in mlx_lm.stream_generate(plain, tokenizer, prompt, max_tokens=8)]
    model, tokenizer = outcore.load(str(quick_models(6)), memory="100MB", resident=4, govern=False, draft="none")
    mac, now = roomy(), [0.0]

    def clock() -> float:
        now[0] += 0.6
        return now[0]

    with model.outcore as session:
        session.watch = Watch(session, session.residency, Governor(), mac.reading, clock)
        got = []
        for n, r in enumerate(outcore.stream_generate(model, tokenizer, prompt, max_tokens=8)):
            got.append(r.token)
            mac.told = 2 if n >= 3 else None
        assert got == expected
        assert [n for _, n in session.watch.moves] == [-1] and len(session.plan.resident) == 3
        assert session.watch.room() == 0
        mac.told = None
        for _ in range(6):
            now[0] += 40
            list(outcore.stream_generate(model, tokenizer, prompt, max_tokens=2))
        assert len(session.plan.resident) == 4
