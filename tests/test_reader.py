"""The reader: exact bytes from real files by every path, and one clear error when a file or a disk fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from fake_darwin_disk import FakeDarwin
from outcore.disk.disk_calls import DiskCalls, using
from outcore.disk.layout import Extent, Source, place_unit
from outcore.disk.metrics import Metrics
from outcore.disk.reader import FileReader
from outcore.disk.ring import Slot
from outcore.errors import ReadError, UsageError
from outcore.sizes import BLOCK, round_up, slot_alignment

O_DIRECT = getattr(os, "O_DIRECT", 0)
FILL = 0xA5
PREADV: Callable[..., int] = os.preadv
linux = pytest.mark.skipif(not O_DIRECT, reason="O_DIRECT is Linux's")


@contextlib.contextmanager
def reading(*files: Path, **options: Any) -> Iterator[FileReader]:
    reader = FileReader(files, **options)
    try:
        yield reader
    finally:
        reader.close()


@pytest.fixture
def own_direct_folder(tmp_path: Path) -> Path:
    """A folder whose file system takes direct reads."""
    (tmp_path / "probe").write_bytes(bytes(BLOCK))
    with reading(tmp_path / "probe") as reader:
        if not reader.direct:
            pytest.skip("this file system has no direct I/O")
    return tmp_path


@pytest.fixture(params=["this system", "macOS"])
def direct_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The same here, and on a macOS that is not there."""
    if request.param == "macOS":
        with using(FakeDarwin()):
            yield tmp_path
    else:
        yield request.getfixturevalue("own_direct_folder")


def make_file(path: Path, nbytes: int, seed: int = 0) -> bytes:
    data = random.Random(seed).randbytes(nbytes)
    path.write_bytes(data)
    return data


def target(nbytes: int) -> memoryview:
    """Block-aligned memory full of ``FILL``, as a slot is block-aligned."""
    nbytes = round_up(max(nbytes, 1), BLOCK)
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = bytes([FILL]) * nbytes
    return view


def read(reader: FileReader, extents: list[Extent], into: memoryview, name: str = "unit") -> None:
    reader.submit(name, extents, into).wait()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("outcore-read")]


def random_extents(rng: random.Random, files: dict[Path, bytes], *, in_place: bool) -> list[Extent]:
    """Extents at odd places of the files; those in place have blocks of their own."""
    extents = []
    cursor = rng.randrange(0, 3000)
    for _ in range(rng.randint(1, 8)):
        file = rng.choice(list(files))
        offset = rng.randrange(0, len(files[file]))
        nbytes = min(rng.choice([0, 1, 2, 511, BLOCK, 3 * BLOCK, rng.randrange(1, 60_000)]), len(files[file]) - offset)
        if in_place and rng.random() < 0.6:
            at = round_up(cursor, BLOCK) + offset % BLOCK
            extents.append(Extent(file, offset, nbytes, at, in_place=True))
            cursor = round_up(at + nbytes, BLOCK)
        else:
            at = cursor + rng.choice([0, 1, 7, 100])
            extents.append(Extent(file, offset, nbytes, at))
            cursor = at + nbytes
        cursor += rng.choice([0, 0, 1, 5000])
    return extents


def check(extents: list[Extent], files: dict[Path, bytes], into: memoryview, *, direct: bool) -> None:
    """The extents' bytes are the files', and nothing else was written but the blocks of those read in place."""
    expected = bytearray(into)
    for i in range(len(expected)):
        expected[i] = FILL
    for e in extents:
        if e.in_place and direct and e.nbytes:
            first, last = e.at - e.at % BLOCK, round_up(e.at + e.nbytes, BLOCK)
            expected[first:last] = into[first:last]
        expected[e.at : e.at + e.nbytes] = files[e.file][e.offset : e.offset + e.nbytes]
    assert into == expected


# Exact bytes


@pytest.mark.parametrize("io", ["auto", "direct", "cached"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "bounced"])
def test_extents_at_odd_places_arrive_exactly_and_nothing_else_is_touched(
    direct_folder: Path, io: str, in_place: bool
) -> None:
    files = {(direct_folder / f"f{i}"): make_file(direct_folder / f"f{i}", n, i) for i, n in enumerate((150_001, 4096))}
    for chunk in (BLOCK, 4 * BLOCK, 8 << 20):
        metrics = Metrics()
        with reading(*files, io=io, chunk=chunk, metrics=metrics) as reader:
            assert reader.direct == (io != "cached")
            wanted = rounding = 0
            for seed in range(15):
                extents = random_extents(random.Random(seed), files, in_place=in_place)
                into = target(max(e.at + e.nbytes for e in extents))
                read(reader, extents, into)
                check(extents, files, into, direct=reader.direct)
                wanted += sum(e.nbytes for e in extents)
                rounding += 2 * BLOCK * len(extents)
            # No block is read twice: what a direct read brings beside the extent are its first and last block.
            assert wanted <= metrics.bytes_read <= wanted + (0 if io == "cached" else rounding)


@pytest.mark.parametrize("align", [1, 256])
@pytest.mark.parametrize("io", ["direct", "cached"])
def test_a_units_layout_is_read_into_an_mlx_slot_bit_for_bit(direct_folder: Path, io: str, align: int) -> None:
    data = make_file(direct_folder / "f", 700_003)
    for seed in range(10):
        rng = random.Random(seed)
        starts = sorted(rng.sample(range(0, 700_000), 6))
        ranges = [(a, min(b - a, 90_000)) for a, b in zip(starts, [*starts[1:], 700_003], strict=True)]
        sources = [Source(str(a), "U8", (n,), direct_folder / "f", a, n) for a, n in ranges]
        unit = place_unit("u", sources, direct=True, align=align)
        slot = Slot(unit.slot_bytes)
        with reading(direct_folder / "f", io=io, chunk=64 * 1024) as reader:
            read(reader, list(unit.extents), slot.payload)
        for f, s in zip(unit.fields, sorted(sources, key=lambda s: s.offset), strict=True):
            found = slot.array[slot.base + f.at : slot.base + f.at + f.nbytes]
            assert bytes(found) == data[s.offset : s.offset + s.nbytes]


def test_extents_in_place_are_read_into_the_slot_itself_block_by_block(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = direct_folder / "f"
    make_file(path, 20 * BLOCK)
    into = target(20 * BLOCK)
    start = ctypes.addressof(ctypes.c_char.from_buffer(into))
    seen: list[tuple[int, int, int]] = []

    def watch(fd: int, to: list[memoryview], at: int) -> int:
        seen.append((at, ctypes.addressof(ctypes.c_char.from_buffer(to[0])) - start, len(to[0])))
        return PREADV(fd, to, at)

    with reading(path, io="direct", chunk=4 * BLOCK, threads=1) as reader:
        monkeypatch.setattr(os, "preadv", watch)
        read(reader, [Extent(path, 100, 10 * BLOCK, BLOCK + 100, in_place=True)], into)
        first = [(0, BLOCK, 4 * BLOCK), (4 * BLOCK, 5 * BLOCK, 4 * BLOCK), (8 * BLOCK, 9 * BLOCK, 3 * BLOCK)]
        assert seen == first
        # Those that are not go through memory of the thread's own.
        read(reader, [Extent(path, 100, 10 * BLOCK, 7)], into)
        assert [(at, n) for at, _, n in seen[3:]] == [(at, n) for at, _, n in first]
        assert not any(0 <= where < 20 * BLOCK for _, where, _ in seen[3:])


def test_reads_of_one_unit_run_on_all_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_file(tmp_path / "f", 4 * BLOCK)
    together = threading.Barrier(4)
    with reading(tmp_path / "f", threads=4, chunk=BLOCK) as reader:

        def meet(fd: int, to: Any, at: int) -> int:
            together.wait(30)  # breaks, and fails the read, unless four are in flight
            return PREADV(fd, to, at)

        monkeypatch.setattr(os, "preadv", meet)
        read(reader, [Extent(tmp_path / "f", 0, 4 * BLOCK, 0, True)], target(4 * BLOCK))


@pytest.mark.parametrize("io", ["direct", "cached"])
def test_reads_that_bring_less_than_asked_are_continued(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, io: str
) -> None:
    files = {direct_folder / "f": make_file(direct_folder / "f", 200_003)}
    rng = random.Random(0)
    cuts = 0

    def partly(fd: int, to: list[memoryview], at: int) -> int:
        nonlocal cuts
        step = BLOCK if io == "direct" else 1
        most = max(1, len(to[0]) // step) * step
        n = min(most, rng.randint(1, max(1, most // step)) * step)
        cuts += n < len(to[0])
        return PREADV(fd, [to[0][:n]], at)

    with reading(direct_folder / "f", io=io, chunk=16 * BLOCK) as reader:
        monkeypatch.setattr(os, "preadv", partly)
        for seed in range(30):
            extents = random_extents(random.Random(seed), files, in_place=True)
            into = target(max(e.at + e.nbytes for e in extents))
            read(reader, extents, into)
            check(extents, files, into, direct=io == "direct")
    assert cuts > 30


# Around the page cache


def cached_pages(path: Path) -> int:
    """Pages of the file that lie in the page cache (mincore)."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as pages:
        held = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), held) == 0
        return sum(h & 1 for h in held)


@linux
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "bounced"])
def test_direct_reads_leave_the_page_cache_empty_and_cached_ones_fill_it(
    own_direct_folder: Path, in_place: bool
) -> None:
    path = own_direct_folder / "f"
    data = make_file(path, 64 * BLOCK)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system keeps its files in memory")
    for io, filled in (("auto", False), ("direct", False), ("cached", True)):
        into = target(64 * BLOCK)
        with reading(path, io=io) as reader:
            read(reader, [Extent(path, 0, 64 * BLOCK, 0, in_place)], into)
            assert reader.direct is not filled
        assert into == data
        assert bool(cached_pages(path)) == filled


def refused() -> OSError:
    return OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class RefusesToOpen(DiskCalls):
    """As tmpfs did before Linux 6.6."""

    def open(self, path: Path, flags: int = 0) -> int:
        if flags:
            raise refused()
        return super().open(path)


class RefusesToRead(DiskCalls):
    """As file systems that take the flag and refuse the read."""

    def __init__(self) -> None:
        self.flagged: set[int] = set()

    def open(self, path: Path, flags: int = 0) -> int:
        fd = super().open(path)
        (self.flagged.add if flags else self.flagged.discard)(fd)
        return fd

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        if fd in self.flagged:
            raise refused()
        return super().preadv(fd, target, offset)


@pytest.mark.parametrize(
    "calls", [RefusesToOpen(), RefusesToRead(), FakeDarwin(takes_nocache=False)], ids=["open", "read", "macOS"]
)
def test_a_file_system_that_refuses_direct_reads_is_read_cached_unless_direct_was_demanded(
    tmp_path: Path, calls: DiskCalls
) -> None:
    files = {tmp_path / n: make_file(tmp_path / n, 50_001) for n in "ab"}
    before = descriptors()
    with using(calls), pytest.raises(UsageError, match=f"{tmp_path / 'a'}.*refuses direct reads.*io auto"):
        FileReader(list(files), io="direct")
    assert (descriptors(), reader_threads()) == (before, [])
    with using(calls), reading(*files) as reader:
        assert not reader.direct
        for seed in range(10):
            extents = random_extents(random.Random(seed), files, in_place=True)
            into = target(max(e.at + e.nbytes for e in extents))
            read(reader, extents, into)
            check(extents, files, into, direct=False)
    assert descriptors() == before


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused(tmp_path: Path) -> None:
    for chunk in (0, -BLOCK, 1000, BLOCK + 1):
        with pytest.raises(UsageError, match=f"a chunk of {chunk} bytes"):
            FileReader([], chunk=chunk)


# Faults


def test_a_file_that_is_not_there_is_named_and_leaves_nothing_open(tmp_path: Path) -> None:
    make_file(tmp_path / "a", 10)
    before = descriptors()
    with pytest.raises(ReadError, match=f"{tmp_path / 'b'}: cannot be opened: No such file"):
        FileReader([tmp_path / "a", tmp_path / "b"])
    assert (descriptors(), reader_threads()) == (before, [])


@pytest.mark.parametrize("left", [0, 1, 5 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK - 1])
@pytest.mark.parametrize(("io", "in_place"), [("direct", True), ("direct", False), ("cached", False)])
def test_a_file_that_became_shorter_is_an_error_that_names_file_unit_and_bytes(
    direct_folder: Path, io: str, in_place: bool, left: int
) -> None:
    path = direct_folder / "f"
    data = make_file(path, 9 * BLOCK)
    with reading(path, io=io) as reader:
        os.truncate(path, left)
        failed = reader.submit("model.layers.7", [Extent(path, 100, 9 * BLOCK - 100, 100, in_place)], target(9 * BLOCK))
        with pytest.raises(ReadError) as caught:
            failed.wait()
        message = str(caught.value)
        assert f"{path}: reading model.layers.7, bytes 100 to {9 * BLOCK}, failed" in message
        assert f"ended {9 * BLOCK - max(left, 100 if io == 'cached' else 0)} bytes early" in message
        assert message.isprintable() and failed.ready
        # What is left can still be read, by the same threads.
        if left > 100:
            into = target(9 * BLOCK)
            read(reader, [Extent(path, 100, left - 100, 100, in_place)], into)
            assert into[100:left] == data[100:left]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_disk_that_fails_once_fails_that_unit_and_no_other(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    path = direct_folder / "f"
    data = make_file(path, 20 * BLOCK)

    def fail(fd: int, to: Any, at: int) -> int:
        if at == 7 * BLOCK:
            raise OSError(error, os.strerror(error))
        return PREADV(fd, to, at)

    with reading(path, threads=2, chunk=BLOCK) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        buffers = [target(5 * BLOCK) for _ in range(4)]
        reads = [
            reader.submit(f"unit {i}", [Extent(path, i * 5 * BLOCK, 5 * BLOCK, 0, True)], into)
            for i, into in enumerate(buffers)
        ]
        where = f"{path}: reading unit 1, bytes {7 * BLOCK} to {8 * BLOCK}, failed: "
        with pytest.raises(ReadError, match=where) as caught:
            reads[1].wait()
        assert os.strerror(error) in str(caught.value)
        for i in (0, 2, 3):
            reads[i].wait()
            assert buffers[i] == data[i * 5 * BLOCK : (i + 1) * 5 * BLOCK]
        monkeypatch.undo()
        assert len(reader_threads()) == 2
        read(reader, [Extent(path, 5 * BLOCK, 5 * BLOCK, 0, True)], buffers[1])
        assert buffers[1] == data[5 * BLOCK : 10 * BLOCK]


def test_a_buffer_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_file(tmp_path / "f", 2 * BLOCK)
    whole = target(2 * BLOCK)
    with reading(tmp_path / "f") as reader:
        extents = [Extent(tmp_path / "f", 0, BLOCK, 0), Extent(tmp_path / "f", 0, BLOCK, 1)]
        with pytest.raises(ValueError, match="unit does not fit in a buffer of 4096 bytes"):
            read(reader, extents, whole[:BLOCK])
    assert bytes(whole) == bytes([FILL]) * 2 * BLOCK


# Ending


def test_closing_joins_every_thread_and_closes_every_file_and_may_be_done_twice(tmp_path: Path) -> None:
    files = [tmp_path / str(i) for i in range(5)]
    for path in files:
        make_file(path, 10_000)
    before = descriptors()
    reader = FileReader(files, threads=6)
    assert len(reader_threads()) == 6
    buffers = [target(10_000) for _ in range(20)]
    reads = [reader.submit(str(i), [Extent(files[i % 5], 0, 10_000, 0)], b) for i, b in enumerate(buffers)]
    reader.close()
    assert all(r.ready and r.error is None for r in reads)  # what was submitted before is served
    assert (descriptors(), reader_threads()) == (before, [])
    reader.close()


def test_a_cancelled_read_leaves_what_had_not_begun_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    data = make_file(path, 4 * BLOCK)
    began, go = threading.Event(), threading.Event()

    def held(fd: int, to: Any, at: int) -> int:
        began.set()
        assert go.wait(30)
        return PREADV(fd, to, at)

    with reading(path, threads=1, chunk=BLOCK) as reader:
        monkeypatch.setattr(os, "preadv", held)
        first, second = target(4 * BLOCK), target(4 * BLOCK)
        under_way = reader.submit("a", [Extent(path, 0, 4 * BLOCK, 0, True)], first)
        waiting = reader.submit("b", [Extent(path, 0, 4 * BLOCK, 0, True)], second)
        assert began.wait(30)
        under_way.cancel()
        waiting.cancel()
        assert not under_way.ready and not waiting.ready  # a thread still writes to the first
        go.set()
        under_way.wait_quietly()
        waiting.wait_quietly()
        assert first[:BLOCK] == data[:BLOCK]
        assert bytes(first[BLOCK:]) == bytes([FILL]) * 3 * BLOCK
        assert bytes(second) == bytes([FILL]) * 4 * BLOCK
        # And the thread goes on.
        read(reader, [Extent(path, 0, 4 * BLOCK, 0, True)], second)
        assert second == data


def test_a_unit_without_bytes_is_there_at_once(tmp_path: Path) -> None:
    make_file(tmp_path / "f", 10)
    with reading(tmp_path / "f") as reader:
        for extents in ([], [Extent(tmp_path / "f", 3, 0, 0)]):
            assert reader.submit("a", extents, target(1)).ready


# Counting


def test_reading_time_is_counted_once_however_many_reads_are_under_way() -> None:
    now = 0.0
    metrics = Metrics(clock=lambda: now)
    metrics.read_started()
    now = 1.0
    metrics.read_started()
    now = 3.0
    metrics.read_ended(2_000_000_000)
    assert metrics.read_gbps == pytest.approx(2 / 3)  # the one under way counts its time
    now = 4.0
    metrics.read_ended(6_000_000_000)
    now = 100.0
    assert (metrics.bytes_read, metrics.read_s) == (8_000_000_000, 4.0)
    assert metrics.read_gbps == pytest.approx(2.0)
    metrics.reset()
    assert (metrics.bytes_read, metrics.read_s, metrics.read_gbps) == (0, 0.0, 0.0)


# Slots


@pytest.mark.parametrize("nbytes", [1, BLOCK, 100_000, 9 << 20])
def test_a_slots_payload_is_mlxs_own_memory_aligned_for_direct_reads(nbytes: int) -> None:
    slot = Slot(nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.payload))
    assert address % slot_alignment(nbytes) == 0
    assert len(slot.payload) >= nbytes and len(slot.payload) % BLOCK == 0
    assert slot.base + len(slot.payload) <= slot.array.nbytes
    view = slot.array[slot.base : slot.base + nbytes]
    mx.eval(view)
    for value in (1, 254):
        slot.payload[:nbytes] = bytes([value]) * nbytes
        assert mx.all(view == value).item()  # a view that was evaluated before shows what is written later
        assert int(slot.array[slot.base + nbytes - 1].item()) == value


def test_a_file_that_is_written_to_is_noticed_and_a_file_that_is_only_renamed_is_not(tmp_path: Path) -> None:
    def write(path: Path, data: bytes) -> None:
        with path.open("r+b") as f:
            f.write(data)

    for io in ("direct", "cached"):
        path = tmp_path / io
        path.write_bytes(bytes(10_000))
        os.utime(path, ns=(0, 0))
        reader = FileReader([path], io=io)
        try:
            whole = [Extent(path, 0, 10_000, 0)]
            read(reader, whole, target(10_000))
            reader.check()
            other = path.with_name("other")
            path.rename(other)
            os.link(other, path)
            other.unlink()
            path.chmod(0o600)
            read(reader, whole, target(10_000))
            reader.check()
            write(path, b"changed")
            reader.check()  # nothing was read from it since
            read(reader, whole, target(10_000))
            # As archives and container layers do: the times of before.
            os.utime(path, ns=(0, 0))
            with pytest.raises(ReadError, match=f"{path}: was written to"):
                reader.check()
            # And with another mode, which moves that time too.
            path.chmod(0o644)
            with pytest.raises(ReadError, match=f"{path}: was written to"):
                reader.check()
        finally:
            reader.close()
