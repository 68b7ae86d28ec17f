"""The reader, the calibration and the writers of files on a macOS that is not there, and where slots are refused."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_darwin_disk import PAGE, FakeDarwin
from outcore.calibration.disk import Bench, best_setting
from outcore.disk import disk_calls
from outcore.disk.cold_ranges import UnreadRanges, forget, scratch_file
from outcore.disk.disk_calls import DarwinCalls, DiskCalls, LinuxCalls, using
from outcore.disk.disk_probe import probe_disk
from outcore.disk.layout import Extent, Source, place_unit
from outcore.disk.reader import FileReader
from outcore.disk.ring import Slot
from outcore.disk.row_reader import RowReader
from outcore.errors import ReadError, UsageError
from outcore.sizes import BLOCK
from outcore_bench.page_cache import drop_page_cache

NBYTES, SIZE = 150_001, 400_003


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@contextlib.contextmanager
def reading(file: Path, calls: DiskCalls, **options: Any) -> Iterator[FileReader]:
    with using(calls), contextlib.closing(FileReader([file], **{"chunk": 64 << 10, **options})) as reader:
        yield reader


def read_whole(reader: FileReader, file: Path, slot: Slot | None = None) -> bytes:
    """All bytes of the file, read in place into a slot."""
    size = file.stat().st_size
    slot = slot or Slot(size)
    reader.submit("whole", [Extent(file, 0, size, 0, in_place=True)], slot.payload).wait()
    return bytes(slot.payload[:size])


# Bytes


def unit_read(file: Path, offset: int, align: int, calls: DiskCalls, refuse: bool = False) -> tuple[bytes, FileReader]:
    """Bytes of a tensor of a file as a ring would read it, and the reader."""
    unit = place_unit("u", [Source("x", "U8", (NBYTES,), file, offset, NBYTES)], direct=True, align=align)
    slot = Slot(unit.slot_bytes)
    if refuse:
        assert isinstance(calls, FakeDarwin)
        calls.refuse(slot.payload)
    with reading(file, calls) as reader:
        reader.submit("u", unit.extents, slot.payload).wait()
        at = unit.fields[0].at
        return bytes(slot.payload[at : at + NBYTES]), reader


@pytest.mark.parametrize("opener", ["O_DIRECT", "F_NOCACHE", "refused", "bounced"])
@pytest.mark.parametrize("align", [1, 8, 256])
@pytest.mark.parametrize("offset", [0, 1, 511, 1288, 4096, 4097, 7936, 12_287, PAGE, 40_008, SIZE - NBYTES])
def test_every_offset_alignment_and_opener_brings_the_files_own_bytes(
    file: Path, offset: int, align: int, opener: str
) -> None:
    calls = LinuxCalls() if opener == "O_DIRECT" else FakeDarwin(takes_nocache=opener != "refused")
    found, reader = unit_read(file, offset, align, calls, opener == "bounced")
    assert found == file.read_bytes()[offset : offset + NBYTES]
    if isinstance(calls, FakeDarwin):
        # In a slot whose place no alignment changed, reads were tried.
        assert reader.bounces == (opener == "bounced" and offset % align == 0)
        assert calls.misaligned == 0
        assert (calls.direct > 0) == (opener != "refused")
        assert calls.copied < (PAGE if offset + NBYTES == SIZE else 1)


@pytest.mark.parametrize("calls", [LinuxCalls(), FakeDarwin()], ids=["Linux", "macOS"])
@pytest.mark.parametrize(("slot_at", "extent_at"), [(0, 0), (0, 1288), (8, 1), (512, 1), (512, 1288), (4095, 1)])
def test_extents_that_do_not_lie_as_they_say_are_copied_into_place(
    file: Path, calls: DiskCalls, extent_at: int, slot_at: int
) -> None:
    memory = memoryview(mmap.mmap(-1, 64 * BLOCK))
    with reading(file, calls) as reader:
        extent = Extent(file, 4097, 100_000, extent_at, in_place=True)
        reader.submit("u", [extent], memory[slot_at:]).wait()
    start = slot_at + extent_at
    assert memory[start : start + 100_000] == file.read_bytes()[4097:104_097]
    assert not any(memory[:start]) and not any(memory[start + 100_000 :])
    assert not isinstance(calls, FakeDarwin) or calls.misaligned == 0


# Around the cache


def test_reads_around_the_cache_leave_nothing_there_and_others_do(file: Path) -> None:
    calls = FakeDarwin()
    with reading(file, calls, io="direct") as reader:
        assert reader.direct and not reader.bounces
        assert read_whole(reader, file) == file.read_bytes()
        assert (calls.direct, calls.misaligned, calls.hit) == (SIZE - SIZE % PAGE, 0, 0)
        assert calls.copied == SIZE % PAGE  # the end of the file, off every block
        assert calls.forgotten(file)  # of what was sampled at opening, too
        # What somebody else had read is taken from the cache.
        calls.warm(file)
        assert read_whole(reader, file) == file.read_bytes()
        assert calls.hit == SIZE
    with reading(file, calls, io="cached") as reader:
        forget([Extent(file, 0, SIZE, 0)])
        assert not reader.direct and calls.forgotten(file)
        read_whole(reader, file)
        assert not calls.forgotten(file)


def test_a_descriptor_that_reads_cached_stays_one_beside_a_direct_one(file: Path) -> None:
    calls = FakeDarwin(gbps=1e-3)
    with using(calls), contextlib.closing(RowReader([file])) as rows:
        with contextlib.closing(FileReader([file])) as reader:
            assert reader.direct
            began = calls.clock()
            for _ in range(3):
                found = rows.read(file, 1288, 100, [0, 7], "embed")
                assert found.tobytes() == b"".join(file.read_bytes()[at : at + 100] for at in (1288, 1988))
        assert calls.clock() - began == pytest.approx(100 / 1e6)  # one page in, and then from memory
        assert calls.misaligned == 0


def test_a_system_that_refuses_the_flag_is_read_cached_and_nothing_stays_open(file: Path) -> None:
    calls = FakeDarwin(takes_nocache=False)
    with reading(file, calls) as reader:
        assert not reader.direct and read_whole(reader, file) == file.read_bytes()
    with pytest.raises(UsageError, match="refuses direct reads"), reading(file, calls, io="direct"):
        pass
    assert calls._flags == {}


def test_the_real_calls_of_macos_refuse_here_what_only_macos_knows(file: Path) -> None:
    if disk_calls.sys.platform == "darwin":
        pytest.skip("it is not only there")
    with reading(file, DarwinCalls()) as reader:
        assert not reader.direct and read_whole(reader, file) == file.read_bytes()


# Slots that are refused


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN])
def test_an_error_that_passes_says_nothing_about_the_memory(file: Path, error: int) -> None:
    calls = FakeDarwin()
    calls.error = error
    slot = Slot(SIZE)
    calls.refuse(slot.payload)
    with reading(file, calls, threads=1, chunk=BLOCK) as reader:
        assert read_whole(reader, file, slot) == file.read_bytes()
        assert not reader.bounces and calls.refusals > 1
        calls.refuses.clear()
        before = calls.direct
        assert read_whole(reader, file, slot) == file.read_bytes()
        assert calls.direct > before, "straight into the slot again"


@pytest.mark.parametrize("error", [errno.EFAULT, errno.EINVAL, errno.ENOTSUP, errno.EPERM])
def test_memory_that_is_refused_once_is_not_tried_again(file: Path, error: int) -> None:
    calls = FakeDarwin()
    calls.error = error
    slot = Slot(SIZE)
    calls.refuse(slot.payload)
    with reading(file, calls, threads=1, chunk=BLOCK) as reader:
        for _ in range(2):
            assert read_whole(reader, file, slot) == file.read_bytes()
            assert reader.bounces and calls.refusals == 1
    with reading(file, calls, threads=1) as other:  # another reader asks for itself
        assert read_whole(other, file, slot) == file.read_bytes()
    assert calls.refusals == 2 and calls.misaligned == 0


class Failing(FakeDarwin):
    """Fails the first direct reads so many times."""

    def __init__(self, times: int, error: int) -> None:
        super().__init__()
        self.times, self.number = times, error

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        if self._nocache(fd) and self.times > 0:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return super().preadv(fd, target, offset)


@pytest.mark.parametrize(("error", "times"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.EINVAL, 2), (errno.ENXIO, 2)])
def test_a_disk_that_fails_is_no_refusal_of_the_slot(file: Path, error: int, times: int) -> None:
    calls = Failing(times, error)
    with reading(file, calls, threads=1) as reader:
        with pytest.raises(ReadError, match=os.strerror(error)):
            read_whole(reader, file)
        assert not reader.bounces and calls.times == 0
        assert read_whole(reader, file) == file.read_bytes()
        assert not reader.bounces


# Forgetting


def test_what_is_forgotten_was_written_before_and_is_all_that_was_asked_for(tmp_path: Path) -> None:
    calls = FakeDarwin()
    path = tmp_path / "f"
    path.touch()
    fd = os.open(path, os.O_WRONLY)
    try:
        calls.write(fd, memoryview(bytes(10 * PAGE)))
    finally:
        os.close(fd)
    (held,) = calls.pages.values()
    assert held == set(range(10)) and calls.dirty
    with using(calls):
        forget([Extent(path, 3 * PAGE + 5, PAGE, 0)])
        assert held == {0, 1, 2, 5, 6, 7, 8, 9} and not calls.dirty
        drop_page_cache([path])
    assert calls.forgotten(path)


def test_the_calls_that_forget_are_taken_by_a_real_system(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = DarwinCalls()
    with file.open("rb") as opened:
        for offset, nbytes in ((0, SIZE), (1288, 7), (SIZE - 1, 1), (0, 10 * SIZE), (0, 0)):
            assert calls.forget(opened.fileno(), offset, nbytes)
        monkeypatch.setattr(disk_calls, "_MAP_BYTES", 4 * mmap.PAGESIZE)
        asked: list[tuple[int, int]] = []
        own = calls.mmap
        monkeypatch.setattr(calls, "mmap", lambda fd, at, n: asked.append((at, n)) or own(fd, at, n))
        assert calls.forget(opened.fileno(), mmap.PAGESIZE + 1, 5 * mmap.PAGESIZE)
        page = mmap.PAGESIZE
        assert asked == [(page, 4 * page), (5 * page, page + 1)]
        read_only = opened.fileno()
    assert not calls.forget(read_only, 0, SIZE)  # closed: advice only
    with file.open("rb") as opened, pytest.raises(OSError, match="Invalid argument"):
        calls.mmap(opened.fileno(), 1, SIZE)
    with pytest.raises(OSError, match="Invalid argument"):
        calls.msync(1, SIZE, disk_calls.MS_INVALIDATE)


# Writing


# Measuring


RATE = 0.5


@pytest.fixture(params=[False, True], ids=["drops what is off blocks", "keeps it"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDarwin]:
    calls = FakeDarwin(gbps=RATE, keeps=request.param)
    with using(calls):
        yield calls


def bench_of(path: Path, calls: FakeDarwin) -> Bench:
    return Bench(UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)]), calls.clock)


@pytest.mark.parametrize("named", [True, False], ids=["a model's file", "a scratch file"])
def test_a_disk_is_measured_and_not_the_memory_before_it(tmp_path: Path, calls: FakeDarwin, named: bool) -> None:
    """A cache that holds all of the file gives it in no time."""
    with contextlib.ExitStack() as stack:
        if named:
            path = tmp_path / "f"
            path.write_bytes(random.Random(0).randbytes(1 << 20) * 96)
        else:
            path = stack.enter_context(scratch_file(tmp_path, nbytes=96 << 20))
        calls.warm(path)
        bench = bench_of(path, calls)
        best = best_setting(bench)
        assert best.read_gbps == pytest.approx(RATE, rel=0.02)
        assert best.io == "auto" and best.read_latency_s == pytest.approx(BLOCK / RATE / 1e9)
        assert calls.hit == calls.misaligned == 0


# For a look at a machine


def test_a_probe_says_whether_a_file_is_read_directly_and_rightly(file: Path) -> None:
    for calls, direct in (
        (FakeDarwin(gbps=1e-3), True),
        (FakeDarwin(gbps=1e-3, takes_nocache=False), False),
    ):
        calls.warm(file)
        with using(calls):
            found = probe_disk(file, clock=calls.clock)
        assert (found.direct, found.bounces, found.forgets, found.wrong) == (direct, False, True, ())
        assert found.nbytes == SIZE and found.first_s == pytest.approx(SIZE / 1e6, rel=0.02)
        # The second time is the disk's too, or the memory's.
        assert found.second_s == pytest.approx(found.first_s if direct else 0.0, abs=1e-9)
    own = probe_disk(file)
    assert own.wrong == () and own.first_s > 0 and own.second_s > 0


class Shifted(FakeDarwin):
    """Reads that begin elsewhere than they should, where they are not of whole blocks."""

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        return super().preadv(fd, target, offset - (self._nocache(fd) and offset == BLOCK))


def test_a_probe_finds_wrong_bytes_and_refused_slots(file: Path) -> None:
    with using(Shifted()):
        found = probe_disk(file)
    assert {(offset, way) for offset, _, way in found.wrong} == {(BLOCK, "direct"), (7936, "direct")}
    refusing = FakeDarwin()
    refusing.refuses.append(range(1 << 62))
    with using(refusing), pytest.raises(ReadError, match="Bad address"):
        probe_disk(file)
    with using(FakeDarwin(takes_nocache=False)), pytest.raises(UsageError, match="refuses direct reads"):
        probe_disk(file, "direct")
    empty = file.with_name("empty")
    empty.touch()
    assert probe_disk(empty).wrong == ()
