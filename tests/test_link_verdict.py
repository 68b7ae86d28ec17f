"""Who is at fault, by numbers alone; and what counts as work."""

from __future__ import annotations

from outcore_cluster.link.verdict import DEVICE, GONE, NOBODY, Blame, Movement, Sign, broke, silent, stuck


def test_the_rank_that_was_heard_of_last_is_silent() -> None:
    assert silent({1: 10.0, 2: 9.0, 3: 12.0}, 13.9, 5.0) is None
    assert silent({1: 10.0, 2: 9.0, 3: 12.0}, 14.1, 5.0) == Blame(2, "silent for 5 s")
    assert silent({}, 100.0, 5.0) is None


def judged(*signs: Sign) -> Blame | None:
    return stuck(dict(enumerate(signs)), 5.0)


def test_a_rank_that_does_nothing_though_it_is_due_is_stuck() -> None:
    waiting = Sign(8.0, 1, due=True)
    assert judged(waiting, Sign(6.0)) == Blame(1, "has done nothing for 6 s, while rank 0 waits for it")
    assert judged(waiting, Sign(8.0, 2, True), Sign(7.0)) == Blame(
        2, "has done nothing for 7 s, while rank 1 waits for it"
    )


def test_while_one_rank_moves_no_rank_is_called_stuck() -> None:
    assert judged(Sign(8.0, 1, True), Sign(4.9)) is None
    assert judged(Sign(4.9, 1, True), Sign(8.0)) is None
    assert judged(Sign(8.0, 1, True), Sign(8.0, 2, True), Sign(1.0)) is None


def test_a_circle_is_found_though_no_rank_is_due() -> None:
    why = "waits for rank 0, while all ranks wait for one another"
    assert judged(Sign(8.0, 1, True), Sign(8.0, 0, True)) == Blame(1, why)
    assert judged(Sign(8.0, 2), Sign(8.0, 0), Sign(8.0, 0)) == Blame(2, why)


def test_a_rank_that_waits_for_its_user_is_not_stuck() -> None:
    assert judged(Sign(60.0), Sign(60.0, 0, False)) is None


def test_what_an_error_says_of_a_process() -> None:
    assert broke(EOFError()) == broke(ConnectionResetError(104, "reset")) == broke(BrokenPipeError(32, "pipe")) == GONE
    assert broke(TimeoutError(110, "Connection timed out")) == "its connection broke: Connection timed out"


class Machine:
    """A process as ``Movement`` sees it."""

    def __init__(self) -> None:
        self.now = self.work = 0.0
        self.nbytes = 0
        self.movement = Movement(60.0, lambda: (self.work, self.nbytes), lambda: self.now)

    def second(self, work: float = 0.0, nbytes: int = 0) -> float:
        self.now += 1
        self.work += work
        self.nbytes += nbytes
        return self.movement.look().still_s


def test_computing_reading_and_progress_are_work_and_waiting_is_not() -> None:
    machine = Machine()
    assert [machine.second(0.005) for _ in range(3)] == [1, 2, 3]
    assert machine.second(0.5) == 0
    assert machine.second() == 1
    assert machine.second(nbytes=1) == 0
    machine.movement.note()
    assert [machine.second() for _ in range(2)] == [1, 2]


def test_a_waiting_rank_moves_by_bytes_alone() -> None:
    machine = Machine()
    with machine.movement.waiting(3, True):
        assert [machine.second(0.5) for _ in range(2)] == [1, 2]
        machine.movement.note()
        assert machine.second(0.5) == 1
        sign = machine.movement.look()
        assert (sign.waits_for, sign.due) == (3, True)
    assert machine.movement.look().waits_for == NOBODY


def test_a_device_that_computes_works_for_as_long_as_an_evaluation_may_take() -> None:
    machine = Machine()
    with machine.movement.waiting(DEVICE, False):
        assert [machine.second() for _ in range(70)] == [0] * 59 + [*range(1, 12)]
    assert [machine.second() for _ in range(2)] == [1, 2]
