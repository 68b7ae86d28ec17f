"""Who is at fault, by numbers alone; and what counts as work."""

from __future__ import annotations

from outcore_cluster.link.movement import NOBODY, Movement, Sign, Wait
from outcore_cluster.link.watch import GONE, Blame, broke, silent, stuck

STALL = 5.0


def test_the_rank_that_was_heard_of_last_is_silent() -> None:
    assert silent(0, "abcd", {1: 10.0, 2: 9.0, 3: 12.0}, 13.9, 5.0) is None
    assert silent(0, "abcd", {1: 10.0, 2: 9.0, 3: 12.0}, 14.1, 5.0) == Blame(2, "silent for 5 s")
    assert silent(0, "abcd", {}, 100.0, 5.0) is None


def test_who_hears_nothing_of_any_host_is_itself_cut_off() -> None:
    heard = {1: 10.0, 2: 9.0, 3: 9.9}
    assert silent(0, "abcd", heard, 14.1, 5.0) == Blame(0, "has heard nothing of the others for 5 s")
    # All of one host, which may be gone; and one alone.
    assert silent(0, "abbb", heard, 14.1, 5.0) == Blame(2, "silent for 5 s")
    assert silent(0, "ab", {1: 9.0}, 14.1, 5.0) == Blame(1, "silent for 5 s")


def judged(waits_for: int, signs: dict[int, Sign], due: bool = True, since: float = 0.0) -> Blame | None:
    return stuck(0, Wait(waits_for, due, since), signs, 10.0, STALL)


def test_who_does_nothing_though_it_is_due_is_stuck() -> None:
    found = judged(1, {1: Sign(6.0)})
    assert found == Blame(1, "has done nothing for 6 s, while rank 0 waits for it")


def test_while_bytes_come_nobody_is_accused() -> None:
    """A slow connection has them on their way for long, and who sent them waits for what comes of them."""
    for signs in ({1: Sign(8.0, 0, True)}, {1: Sign(8.0)}):
        assert stuck(0, Wait(1, True, 0.0), signs, 10.0, STALL, 4.9) is None
        assert stuck(0, Wait(1, True, 0.0), signs, 10.0, STALL, 5.1) is not None


def test_who_works_is_not_stuck_however_long_it_takes() -> None:
    assert judged(1, {1: Sign(4.9)}) is None


def test_a_wait_that_has_just_begun_accuses_nobody() -> None:
    assert judged(1, {1: Sign(60.0)}, since=6.0) is None


def test_the_end_of_a_chain_is_to_blame() -> None:
    signs = {1: Sign(8.0, 2, True), 2: Sign(8.0, 3, True), 3: Sign(7.0)}
    assert judged(1, signs) == Blame(3, "has done nothing for 7 s, while rank 2 waits for it")
    assert judged(1, signs | {3: Sign(1.0)}) is None
    assert judged(1, signs | {2: Sign(0.5, 3, True)}) is None


def test_a_circle_is_found() -> None:
    signs = {1: Sign(8.0, 2, True), 2: Sign(8.0, 1, True)}
    assert judged(1, signs) == Blame(1, "ranks 1 and 2 wait for one another")
    assert judged(1, {1: Sign(8.0, 0, False)}) == Blame(1, "ranks 0 and 1 wait for one another")


def test_a_circle_is_found_though_nobody_is_due() -> None:
    """Rank 0 asks what others have, who wait for its next value: nothing comes any more."""
    assert judged(1, {1: Sign(8.0, 0, False)}, due=False) == Blame(1, "ranks 0 and 1 wait for one another")
    signs = {1: Sign(8.0, 2, False), 2: Sign(8.0, 0, True)}
    assert judged(1, signs, due=False) == Blame(1, "ranks 0 and 1 and 2 wait for one another")
    assert judged(1, signs | {2: Sign(8.0)}, due=False) is None
    assert judged(1, {1: Sign(8.0, 0, False)}, due=False, since=6.0) is None


def test_who_waits_for_what_a_user_says_is_not_stuck() -> None:
    assert stuck(2, Wait(1, True, 0.0), {1: Sign(60.0, 0, False), 0: Sign(60.0)}, 100.0, STALL) is None
    assert stuck(2, Wait(0, False, 0.0), {0: Sign(60.0)}, 100.0, STALL) is None


def test_a_rank_that_is_not_known_of_is_not_accused() -> None:
    assert judged(1, {}) is None


def test_what_an_error_says_of_a_process() -> None:
    assert broke(EOFError()) == broke(ConnectionResetError(104, "reset")) == broke(BrokenPipeError(32, "pipe")) == GONE
    assert broke(TimeoutError(110, "Connection timed out")) == "its connection broke: Connection timed out"


class Machine:
    """A process as ``Movement`` sees it."""

    def __init__(self) -> None:
        self.now = self.work = 0.0
        self.nbytes = 0
        self.movement = Movement(lambda: self.work, lambda: self.nbytes, lambda: self.now)

    def second(self, work: float = 0.0, nbytes: int = 0) -> float:
        self.now += 1
        self.work += work
        self.nbytes += nbytes
        self.movement.look()
        return self.movement.sign().still_s


def test_computing_reading_and_progress_are_work_and_waiting_is_not() -> None:
    machine = Machine()
    assert [machine.second(0.005) for _ in range(3)] == [1, 2, 3]
    assert machine.second(0.5) == 0
    assert machine.second() == 1
    assert machine.second(nbytes=1) == 0
    assert machine.second() == 1
    machine.movement.note()
    assert machine.second() == 0
    assert machine.second() == 1


def test_what_is_noted_is_more_than_work() -> None:
    machine = Machine()
    machine.second(0.5)
    machine.second(0.5)
    assert machine.movement.quiet_s == 2
    machine.movement.note()
    assert machine.movement.quiet_s == 0
    machine.second(0.5)
    machine.second(0.5)
    assert machine.movement.quiet_s == 1


def test_a_device_that_computes_works_for_as_long_as_an_evaluation_may_take() -> None:
    machine = Machine()
    with machine.movement.working():
        assert [machine.second() for _ in range(70)] == [0] * 59 + [*range(1, 12)]
    assert machine.second() == 0
    assert machine.second() == 1


def test_a_sign_says_what_was_waited_for_first() -> None:
    machine = Machine()
    assert machine.movement.sign().waits_for == NOBODY
    with machine.movement.waiting(3, True):
        sign = Sign.unpacked(machine.movement.sign().packed())
        assert (sign.waits_for, sign.due) == (3, True)
    assert machine.movement.wait is None
