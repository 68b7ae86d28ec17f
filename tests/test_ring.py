"""The ring: every unit's bytes in the slot of its turn, in any order and under any delay; and learning the order."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outcore.disk.layout import Extent, SlotCopy, Unit
from outcore.disk.reader import FileReader, Read
from outcore.disk.ring import Lease, Ring
from outcore.errors import ClosedError, ReadError

FILE = Path("weights")


class HeldRead(Read):
    """A read whose bytes come when somebody waits for them."""

    on_settle: Callable[[], None] = staticmethod(lambda: None)

    def wait_quietly(self) -> None:
        self.on_settle()
        super().wait_quietly()

    def ended(self) -> None:
        self.wait_quietly()


class MemoryReader:
    """Reads from memory. Reads end at once, or when ``complete`` is called or somebody waits for them.

    Attributes:
        log: units in the order in which they were submitted, each with its buffer.
        fails: units whose next read fails, as often as they are in it.
    """

    def __init__(self, data: bytes, *, held: bool = False) -> None:
        self.data = data
        self.held = held
        self.log: list[tuple[int, memoryview]] = []
        self.fails: list[int] = []
        self.under_way: list[tuple[Read, Sequence[Extent], memoryview]] = []
        self.closed = 0
        self.on_wait: Callable[[], None] = lambda: None

    @property
    def order(self) -> list[int]:
        return [unit for unit, _ in self.log]

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        assert not self.closed
        read = HeldRead(name)
        read.on_settle = lambda: self.waited(read)  # type: ignore[method-assign]
        self.log.append((int(name), target))
        self.under_way.append((read, extents, target))
        if not self.held:
            self.complete(read)
        return read

    def waited(self, read: Read) -> None:
        if not read.ready:
            self.on_wait()
            self.complete(read)

    def complete(self, read: Read) -> None:
        job = next(job for job in self.under_way if job[0] is read)
        self.under_way.remove(job)
        error = None
        if int(read.name) in self.fails:
            self.fails.remove(int(read.name))
            error = ReadError(f"unit {read.name}: broken")
        elif not read.cancelled:
            copy(self.data, job[1], job[2])
        read.finish(error)

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1
        for read, _, _ in list(self.under_way):
            self.complete(read)


class TardyReader:
    """Reads from memory on threads of its own: after random delays, in random order, each in two halves."""

    def __init__(self, data: bytes, seed: int, threads: int = 3) -> None:
        self.data = data
        self.random = random.Random(seed)
        self.jobs: list[tuple[Read, Sequence[Extent], memoryview]] = []
        self.ready = threading.Condition()
        self.closed = False
        self.threads = [threading.Thread(target=self.serve) for _ in range(threads)]
        for t in self.threads:
            t.start()

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        read = Read(name)
        with self.ready:
            self.jobs.append((read, extents, target))
            self.ready.notify()
        return read

    def serve(self) -> None:
        while True:
            with self.ready:
                self.ready.wait_for(lambda: self.jobs or self.closed)
                if not self.jobs:
                    return
                read, extents, target = self.jobs.pop(self.random.randrange(len(self.jobs)))
                delays = [self.random.choice([0, 0, 0.0001, 0.001]) for _ in extents]
            for extent, delay in zip(extents, delays, strict=True):
                time.sleep(delay)
                if not read.cancelled:
                    copy(self.data, [extent], target)
            read.finish()

    def check(self) -> None:
        pass

    def close(self) -> None:
        with self.ready:
            self.closed = True
            self.ready.notify_all()
        for t in self.threads:
            t.join()


def copy(data: bytes, extents: Sequence[Extent], target: memoryview) -> None:
    for e in extents:
        target[e.at : e.at + e.nbytes] = data[e.offset : e.offset + e.nbytes]


def make_units(count: int, seed: int = 0) -> tuple[bytes, list[Unit]]:
    """Units of different lengths, each in two halves of a file of random bytes."""
    rng = random.Random(seed)
    units, offset = [], 0
    for i in range(count):
        half, rest = rng.randrange(1, 3000), rng.randrange(1, 3000)
        extents = (Extent(FILE, offset, half, 0), Extent(FILE, offset + half, rest, half))
        units.append(Unit(str(i), (), extents, half + rest))
        offset += half + rest
    return rng.randbytes(offset), units


def content(data: bytes, unit: Unit) -> bytes:
    return data[unit.extents[0].offset :][: unit.slot_bytes]


class Loop:
    """Sweeps as the engine does them: at most ``lag`` units behind the one being taken are still held.

    Every unit's bytes are checked when they arrive and again just before its slot is given back; so is that each turn
    has the slot that was announced and that no slot is taken twice at once.
    """

    def __init__(self, ring: Ring, data: bytes, lag: int = 1) -> None:
        self.ring, self.data, self.lag = ring, data, lag
        self.turns = 0

    def check(self, lease: Lease) -> None:
        unit = self.ring.units[lease.unit]
        assert self.ring.slots[lease.slot].payload[: unit.slot_bytes] == content(self.data, unit)

    def sweep(self, order: Sequence[int]) -> int:
        """Go over the units, and return the number of misses."""
        before = self.ring.metrics.misses
        held: list[Lease] = []
        self.ring.begin_pass()
        for unit in order:
            announced = self.ring.next_slot
            lease = self.ring.take(unit)
            assert (lease.unit, lease.turn, lease.slot) == (unit, self.turns, announced)
            assert lease.slot == self.turns % len(self.ring.slots)
            assert lease.slot not in {other.slot for other in held}
            self.turns += 1
            self.ring.wait(lease)
            self.check(lease)
            held.append(lease)
            while len(held) > self.lag:
                self.check(held[0])
                self.ring.release(held.pop(0))
        for lease in held:
            self.check(lease)
            self.ring.release(lease)
        return self.ring.metrics.misses - before


def build(
    count: int, slots: int, order: Sequence[int] | None = None, *, held: bool = False
) -> tuple[Loop, MemoryReader]:
    data, units = make_units(count)
    reader = MemoryReader(data, held=held)
    ring = Ring(units, reader, slots=slots, order=range(count) if order is None else order)
    ring.start()
    return Loop(ring, data), reader


# Read-ahead


@pytest.mark.parametrize("slots", [2, 3, 5, 11])
def test_units_are_read_in_their_order_once_a_pass_and_nothing_is_missed(slots: int) -> None:
    loop, reader = build(7, slots)
    for _ in range(5):
        assert loop.sweep(range(7)) == 0
    assert reader.order == [i % 7 for i in range(35 + slots)]
    assert loop.ring.metrics.units == 35


def test_the_next_passes_first_units_are_read_while_the_last_ones_are_computed() -> None:
    loop, reader = build(5, 3)
    ring = loop.ring
    ring.begin_pass()
    leases = [ring.take(0)]
    for unit in range(1, 5):
        leases.append(ring.take(unit))
        ring.release(leases.pop(0))
    # The last unit is held, and the sweep is not over.
    assert reader.order == [0, 1, 2, 3, 4, 0, 1]
    ring.release(leases.pop())
    assert reader.order == [0, 1, 2, 3, 4, 0, 1, 2]
    assert loop.ring.metrics.misses == 0


def test_a_slot_is_read_into_only_when_it_was_given_back() -> None:
    loop, reader = build(6, 3)
    ring = loop.ring
    a, b = ring.take(0), ring.take(1)
    assert reader.order == [0, 1, 2]
    ring.release(b)  # out of turn: slot 0 comes next and is still held
    assert reader.order == [0, 1, 2]
    ring.release(a)
    assert reader.order == [0, 1, 2, 3, 4]
    assert [target is ring.slots[i % 3].payload for i, (_, target) in enumerate(reader.log)] == [True] * 5


def test_with_every_slot_held_the_next_unit_is_refused() -> None:
    loop, _ = build(6, 3)
    leases = [loop.ring.take(unit) for unit in range(3)]
    with pytest.raises(RuntimeError, match="every slot of the ring is held"):
        loop.ring.take(3)
    loop.ring.release(leases[0])
    assert loop.ring.take(3).slot == 0


@pytest.mark.parametrize("slots", [1, 0, -1])
def test_a_ring_of_fewer_than_two_slots_is_refused(slots: int) -> None:
    data, units = make_units(2)
    with pytest.raises(ValueError, match="at least 2 slots"):
        Ring(units, MemoryReader(data), slots=slots, order=[0, 1])


# Learning the order

STRANGE = {
    "reversed": [5, 4, 3, 2, 1, 0],
    "shuffled": [2, 0, 5, 1, 4, 3],
    "twice, one after the other": [0, 1, 2, 3, 4, 5] * 2,
    "twice, each at once": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    "some twice": [0, 1, 2, 1, 3, 4, 0, 5],
    "forth and back": [0, 1, 2, 3, 4, 5, 4, 3, 2, 1],
    "one skipped": [0, 1, 2, 4, 5],
    "the first skipped": [1, 2, 3, 4, 5],
    "the last skipped": [0, 1, 2, 3, 4],
    "every other skipped": [0, 2, 4],
    "one alone": [3],
    "one for ever": [3, 3, 3, 3],
}


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("order", STRANGE.values(), ids=STRANGE)
def test_an_order_that_was_not_predicted_is_served_right_and_then_learnt(order: list[int], slots: int) -> None:
    loop, reader = build(6, slots)
    first = loop.sweep(order)
    assert (first > 0) == (order != (list(range(6)) * 2)[: len(order)])
    second = loop.sweep(order)
    if set(order) == set(range(6)):
        assert second <= 1  # what was read ahead when the first sweep ended
    loop.sweep(order)
    started = len(reader.log)
    assert [loop.sweep(order) for _ in range(4)] == [0] * 4
    assert len(reader.log) - started == 4 * len(order)  # nothing is read in vain
    assert loop.ring.metrics.units == 7 * len(order)
    # And back to what it was at first.
    misses = [loop.sweep(range(6)) for _ in range(6)]
    assert misses[3:] == [0] * 3


@pytest.mark.parametrize("slots", [2, 3])
def test_a_unit_that_was_never_in_the_order_is_served_right_and_then_expected(slots: int) -> None:
    loop, _ = build(6, slots, order=[0, 1, 3, 5])
    assert loop.sweep(range(6)) == 2
    assert [loop.sweep(range(6)) for _ in range(3)][1:] == [0, 0]


@pytest.mark.parametrize("length", range(1, 6))
def test_a_pass_that_broke_off_teaches_nothing(length: int) -> None:
    loop, _ = build(6, 3)
    loop.sweep(range(6))
    assert loop.sweep(range(length)) == 0
    assert loop.sweep(range(6)) == 1  # the units that the broken-off sweep would have come to next
    assert [loop.sweep(range(6)) for _ in range(3)] == [0, 0, 0]


def test_a_miss_cancels_what_was_read_ahead_and_waits_until_nothing_writes_to_the_slots() -> None:
    loop, reader = build(6, 3, held=True)
    ahead = [read for read, _, _ in reader.under_way]
    lease = loop.ring.take(4)
    assert [(read.cancelled, read.ready) for read in ahead] == [(True, True)] * 3
    loop.ring.wait(lease)
    loop.check(lease)
    assert loop.ring.metrics.misses == 1
    loop.ring.release(lease)
    assert reader.order == [0, 1, 2, 4, 5, 0, 1]  # read-ahead goes on behind it


# Delays


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_is_right_however_long_each_read_takes(seed: int) -> None:
    rng = random.Random(seed)
    count, slots = rng.randint(1, 9), rng.randint(2, 5)
    data, units = make_units(count, seed)
    reader = TardyReader(data, seed)
    try:
        ring = Ring(units, reader, slots=slots, order=range(count))
        ring.start()
        loop = Loop(ring, data, lag=rng.randint(0, slots - 1))
        while loop.turns < 300:
            order = list(range(count))
            if rng.random() < 0.3:
                order = [rng.randrange(count) for _ in range(rng.randint(1, 2 * count))]
            loop.sweep(order)
    finally:
        ring.close()


def test_the_time_that_the_loop_waits_is_counted_and_no_other() -> None:
    now = 100.0

    def advance() -> None:
        nonlocal now
        now += 2.5

    data, units = make_units(4)
    reader = MemoryReader(data, held=True)
    reader.on_wait = advance
    ring = Ring(units, reader, slots=2, order=range(4), clock=lambda: now)
    ring.start()
    first, second = ring.take(0), ring.take(1)
    ring.wait(first)
    assert ring.metrics.stall_s == 2.5
    reader.complete(second.read)
    now += 50  # computing meanwhile
    ring.wait(second)
    ring.wait(first)
    assert ring.metrics.stall_s == 2.5
    ring.release(first)
    third = ring.take(2)
    reader.fails.append(2)
    with pytest.raises(ReadError):
        ring.wait(third)
    assert ring.metrics.stall_s == 5.0  # waiting for a read that fails is waiting too


# Faults and the end


def test_a_read_that_fails_is_raised_when_its_unit_is_waited_for_and_the_ring_goes_on() -> None:
    loop, reader = build(6, 3)
    loop.sweep(range(6))
    reader.fails += [3, 3]
    with pytest.raises(ReadError, match="unit 3: broken"):
        failing(loop)
    assert loop.sweep(range(6)) == 1
    assert loop.sweep(range(6)) == 0


def test_what_failed_to_be_read_ahead_is_read_again_when_it_is_wanted() -> None:
    loop, reader = build(6, 3)
    loop.sweep(range(6))
    reader.fails += [3]
    assert loop.sweep(range(6)) == 0 and not reader.fails


def test_a_pass_that_broke_off_leaves_a_whole_ring() -> None:
    """Whatever was held, and whatever was still being read into a slot."""
    for held, lost in itertools.product((False, True), range(1, 4)):
        loop, reader = build(6, 3)
        loop.sweep(range(6))
        loop.ring.begin_pass()
        reader.held = held
        for unit in range(lost):
            # Nobody gives these back.
            loop.ring.take(unit)
            loop.turns += 1
        loop.ring.abandon()
        reader.held = False
        assert loop.sweep(range(6)) == 0 and loop.sweep(range(6)) == 0


def failing(loop: Loop) -> None:
    """A sweep that gives the slot back when its read fails, as the engine does."""
    loop.ring.begin_pass()
    for unit in range(6):
        lease = loop.ring.take(unit)
        loop.turns += 1
        try:
            loop.ring.wait(lease)
            loop.check(lease)
        finally:
            loop.ring.release(lease)


def test_every_kind_of_use_after_closing_is_refused_or_harmless() -> None:
    loop, reader = build(6, 3)
    lease = loop.ring.take(0)
    loop.ring.close()
    loop.ring.close()
    assert (reader.closed, loop.ring.slots) == (1, [])
    for use in (lambda: loop.ring.take(1), loop.ring.begin_pass):
        with pytest.raises(ClosedError, match="closed; load it again"):
            use()
    loop.ring.release(lease)
    assert reader.order == [0, 1, 2]


def test_closing_cancels_what_was_read_ahead() -> None:
    loop, reader = build(6, 3, held=True)
    taken = loop.ring.take(0)
    ahead = [read for read, _, _ in reader.under_way if read is not taken.read]
    loop.ring.close()
    assert [read.cancelled for read in ahead] == [True, True]
    assert reader.under_way == []


@contextlib.contextmanager
def stuck_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event, list[int]]]:
    """Reads that begin, say so, and do not end before they may."""
    began, go, done = threading.Event(), threading.Event(), list[int]()
    preadv = os.preadv

    def held(fd: int, to: Any, at: int) -> int:
        began.set()
        assert go.wait(30)
        done.append(at)
        n: int = preadv(fd, to, at)
        return n

    monkeypatch.setattr(os, "preadv", held)
    try:
        yield began, go, done
    finally:
        go.set()


def test_closing_while_the_disk_is_busy_waits_for_it_and_leaves_no_thread_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(50 * 4096))
    units = [Unit(str(i), (), (Extent(path, i * 10 * 4096, 40_960, 0),), 40_960) for i in range(5)]
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir())) if fds.exists() else 0
    ring = Ring(units, FileReader([path], threads=2, chunk=4096, io="cached"), slots=3, order=range(5))
    with stuck_reads(monkeypatch) as (began, go, done):
        ring.start()
        assert began.wait(30)
        closing = threading.Thread(target=ring.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()  # the slots' memory must not go while a thread may write to it
        go.set()
        closing.join(30)
    assert not closing.is_alive()
    assert len(done) <= 2  # of 30 chunks, those that had begun
    assert not [t for t in threading.enumerate() if t.name.startswith("outcore-read")]
    assert not fds.exists() or len(list(fds.iterdir())) == before
