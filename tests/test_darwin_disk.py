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
from outcore.disk import disk_calls
from outcore.disk.disk_calls import DarwinCalls, DiskCalls, using
from outcore.disk.disk_probe import wrong_reads
from outcore.disk.layout import Extent, Source, place_unit
from outcore.disk.reader import FileReader, RowReader
from outcore.disk.ring import Slot
from outcore.errors import ReadError, UsageError
from outcore.sizes import BLOCK
from outcore_calibrate.disk_rate import Bench, UnreadRanges, best_setting, scratch_file

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
@pytest.mark.parametrize("align", [1, 256])
@pytest.mark.parametrize("offset", [0, 1, 511, 1288, 4096, 4097, 7936, 12_287, PAGE, 40_008, SIZE - NBYTES])
def test_every_offset_alignment_and_opener_brings_the_files_own_bytes(
    file: Path, offset: int, align: int, opener: str
) -> None:
    calls = DiskCalls() if opener == "O_DIRECT" else FakeDarwin(takes_nocache=opener != "refused")
    found, reader = unit_read(file, offset, align, calls, opener == "bounced")
    assert found == file.read_bytes()[offset : offset + NBYTES]
    if isinstance(calls, FakeDarwin):
        # In a slot whose place no alignment changed, reads were tried.
        assert reader.bounces == (opener == "bounced" and offset % align == 0)
        assert calls.misaligned == 0
        assert (calls.direct > 0) == (opener != "refused")
        assert calls.copied < (PAGE if offset + NBYTES == SIZE else 1)


@pytest.mark.parametrize("calls", [DiskCalls(), FakeDarwin()], ids=["Linux", "macOS"])
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
        calls.pages.clear()  # of what was sampled at opening
        assert read_whole(reader, file) == file.read_bytes()
        assert (calls.direct, calls.misaligned, calls.hit) == (SIZE - SIZE % PAGE, 0, 0)
        assert calls.copied == SIZE % PAGE  # the end of the file, off every block
        # What somebody else had read is taken from the cache.
        calls.warm(file)
        assert read_whole(reader, file) == file.read_bytes()
        assert calls.hit == SIZE
    with reading(file, calls, io="cached") as reader:
        assert not reader.direct
        calls.pages.clear()
        read_whole(reader, file)
        assert calls.pages


def test_a_descriptor_that_reads_cached_stays_one_beside_a_direct_one(file: Path) -> None:
    calls = FakeDarwin(gbps=1e-3)
    with using(calls), contextlib.closing(RowReader([file])) as rows:
        with contextlib.closing(FileReader([file])) as reader:
            assert reader.direct
            calls.pages.clear()  # of what was sampled at opening
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


# Measuring


RATE = 0.5


@pytest.fixture(params=[False, True], ids=["drops what is off blocks", "keeps it"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDarwin]:
    calls = FakeDarwin(gbps=RATE, keeps=request.param)
    with using(calls):
        yield calls


def bench_of(path: Path, calls: FakeDarwin) -> Bench:
    return Bench(UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)]), calls.clock)


def test_a_disk_is_measured_by_a_file_that_was_written_around_the_cache(tmp_path: Path, calls: FakeDarwin) -> None:
    with scratch_file(tmp_path, nbytes=96 << 20) as path:
        bench = bench_of(path, calls)
        best = best_setting(bench)
        assert best.read_gbps == pytest.approx(RATE, rel=0.02)
        assert best.io == "auto" and best.read_latency_s == pytest.approx(BLOCK / RATE / 1e9)
        assert calls.misaligned == 0


# For a look at a machine


class Shifted(FakeDarwin):
    """Reads that begin elsewhere than they should, where they are not of whole blocks."""

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        return super().preadv(fd, target, offset - (self._nocache(fd) and offset == BLOCK))


def test_a_probe_finds_wrong_bytes_and_refused_slots(file: Path) -> None:
    assert wrong_reads(file) == wrong_reads(file, "cached") == ()
    with using(FakeDarwin()):
        assert wrong_reads(file) == ()
    with using(Shifted()):
        found = wrong_reads(file)
    assert {(offset, way) for offset, _, way in found} == {(BLOCK, "direct"), (7936, "direct")}
    refusing = FakeDarwin()
    refusing.refuses.append(range(1 << 62))
    with using(refusing), pytest.raises(ReadError, match="Bad address"):
        wrong_reads(file)
    with using(FakeDarwin(takes_nocache=False)), pytest.raises(UsageError, match="refuses direct reads"):
        wrong_reads(file, "direct")
    empty = file.with_name("empty")
    empty.touch()
    assert wrong_reads(empty) == ()
