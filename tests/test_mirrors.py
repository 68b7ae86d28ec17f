"""Mirrors: the same bytes from several folders, sooner; one that fails, or is none, changes no answer."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate as mlx_generate
from mlx_lm import load as mlx_load

import outcore
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.disk.disk_calls import DiskCalls, using
from outcore.disk.layout import Extent
from outcore.disk.metrics import Metrics
from outcore.disk.reader import RowReader
from outcore.errors import ReadError, StoreError, UsageError
from outcore.machine.small_files import state_of
from outcore.options import LoadOptions
from outcore.sizes import BLOCK
from outcore_mirrors import mirrors as mirror_files
from outcore_mirrors.mirrored_reader import FolderPace, MirroredReader, Replica, Replicas, quickest
from outcore_mirrors.mirrors import find_mirror
from test_reader import make_file, random_extents, target

SIZE = 2_100_001
"""Bytes of a file that is read in several chunks."""


class Disks(DiskCalls):
    """Folders on disks of their own: each gives so many bytes a second; one that ``dies`` fails after some reads."""

    def __init__(self) -> None:
        self.rates: dict[Path, float] = {}
        self._busy: dict[Path, threading.Lock] = defaultdict(threading.Lock)
        self.dies: dict[Path, int] = {}
        self.before: Callable[[Path], object] = lambda _: None
        self.reads: dict[Path, int] = {}
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, flags: int = 0) -> int:
        fd = super().open(path, flags)
        self._paths[fd] = path.parent
        return fd

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        folder = self._paths[fd]
        self.before(folder)
        self.reads[folder] = self.reads.get(folder, 0) + 1
        if self.reads[folder] > self.dies.get(folder, 1 << 60):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if folder in self.rates:
            with self._busy[folder]:
                time.sleep(len(target) / self.rates[folder])
        return super().preadv(fd, target, offset)


def copied(folder: Path, *names: str) -> list[Path]:
    """Copies of a folder beside it."""
    made = [folder.with_name(name) for name in names]
    for copy in made:
        shutil.copytree(folder, copy)
    return made


def replica(folder: Path, copy: Path) -> Replica:
    copies = {file: copy / file.name for file in folder.iterdir() if (copy / file.name).exists()}
    return Replica(copy, copies, {c: state_of(c) for c in copies.values()})


@contextlib.contextmanager
def reading(files: Sequence[Path], replicas: Replicas, **options: Any) -> Iterator[MirroredReader]:
    reader = MirroredReader(replicas, files, **options)
    try:
        yield reader
    finally:
        reader.close()


class Three:
    """A folder, two mirrors, and what was said of them."""

    def __init__(self, root: Path) -> None:
        self.own = root / "own"
        self.own.mkdir()
        self.files = {self.own / f"f{i}": make_file(self.own / f"f{i}", n, i) for i, n in enumerate((SIZE, 300_007))}
        self.first, self.second = copied(self.own, "first", "second")
        self.said: list[str] = []
        self.calls = Disks()
        # So slow that each gets to read something, whichever thread comes first.
        self.calls.rates = dict.fromkeys((self.own, self.first, self.second), 60e6)

    def replicas(self, *mirrors: Path) -> Replicas:
        wanted = mirrors or (self.first, self.second)
        return Replicas(self.own, [replica(self.own, m) for m in wanted], self.said.append)

    def read(self, reader: MirroredReader, seed: int) -> None:
        """Random extents and both files as wholes; they are what they should be."""
        extents = random_extents(random.Random(seed), self.files, in_place=bool(seed % 2))
        end = max(e.at + e.nbytes for e in extents)
        for file, data in self.files.items():
            end = -(-end // BLOCK) * BLOCK
            extents.append(Extent(file, 0, len(data), end, in_place=True))
            end += len(data) + BLOCK
        into = target(end)
        reader.submit("unit", extents, into).wait()
        data = bytes(into)
        # Without pytest's telling how two million bytes differ, which takes minutes.
        same = [data[e.at : e.at + e.nbytes] == self.files[e.file][e.offset : e.offset + e.nbytes] for e in extents]
        assert all(same)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    found = Three(tmp_path)
    with using(found.calls):
        yield found


# Bytes


@pytest.fixture(scope="session")
def served(quick_models: Callable[..., Path]) -> Path:
    """Mostly recurrent: its texts begin with what mlx-lm's own are compared by."""
    return quick_models(4, 4)


@pytest.mark.parametrize("io", ["auto", "cached"])
def test_all_folders_are_read_from_and_every_byte_is_in_its_place(three: Three, io: str) -> None:
    replicas = three.replicas()
    metrics = Metrics()
    with reading(list(three.files), replicas, io=io, metrics=metrics) as reader:
        for seed in range(5):
            three.read(reader, seed)
            reader.check()
    parts = [r.nbytes for r in replicas.all]
    assert sum(parts) == metrics.bytes_read, parts
    assert min(parts) > 0, "all are read from"
    assert three.said == [] and metrics.read_s > 0


# Faults


@pytest.mark.parametrize("io", ["auto", "cached"])
@pytest.mark.parametrize("who", ["own", "first"])
def test_a_disk_that_fails_in_the_middle_is_replaced_and_reported_once(three: Three, who: str, io: str) -> None:
    dead = getattr(three, who)
    replicas = three.replicas(three.first)
    with reading(list(three.files), replicas, io=io, threads=2) as reader:
        three.read(reader, 0)
        three.calls.dies[dead] = three.calls.reads[dead] + 3
        for seed in range(2):
            three.read(reader, seed)
        reader.check()
        assert three.calls.reads[dead] <= three.calls.dies[dead] + 2, "nobody goes on asking it"
        assert len(three.said) == 1 and str(dead) in three.said[0] and "Input/output error" in three.said[0]
        assert [r.lost is not None for r in replicas.all] == [r.folder == dead for r in replicas.all]
    # And who opens them next does not begin again with it.
    with reading(list(three.files), replicas, io=io) as reader:
        three.read(reader, 1)
        assert len(three.said) == 1


def test_when_the_last_one_fails_it_is_the_error_that_it_always_was(three: Three) -> None:
    replicas = three.replicas()
    with reading(list(three.files), replicas) as reader:
        three.read(reader, 0)
        three.calls.dies = dict.fromkeys((three.own, three.first, three.second), 0)
        into = target(BLOCK)
        file = next(iter(three.files))
        for _ in range(2):
            with pytest.raises(ReadError, match="reading unit, bytes 0 to 4096, failed: Input/output error"):
                reader.submit("unit", [Extent(file, 0, BLOCK, 0, True)], into).wait()
        assert len(three.said) == 2, "two are lost; the last one never is"
        # What was wrong may pass: whoever has the bytes is asked once more.
        three.calls.dies.clear()
        three.read(reader, 2)
    assert not [t for t in threading.enumerate() if t.name.startswith("outcore-read")]


def test_a_file_that_only_the_failing_folder_has_is_an_error_and_the_others_go_on(three: Three) -> None:
    (three.first / "f1").unlink()
    only = three.own / "f1"
    replicas = three.replicas(three.first)
    with reading(list(three.files), replicas) as reader:
        three.calls.dies[three.own] = 0
        with pytest.raises(ReadError, match=f"{only}: reading unit"):
            reader.submit("unit", [Extent(only, 0, BLOCK, 0)], target(BLOCK)).wait()
        file = three.own / "f0"
        into = target(SIZE)
        for _ in range(20):
            # Until its own folder was asked for a part of it, too.
            reader.submit("unit", [Extent(file, 0, SIZE, 0)], into).wait()
            same = into[:SIZE] == three.files[file]
            assert same
            if three.said:
                break
        # Who was lost is asked for what nobody else has.
        assert len(three.said) == 1
        three.calls.dies.clear()
        three.read(reader, 0)


@pytest.mark.parametrize("io", ["auto", "cached"])
@pytest.mark.parametrize("how", ["shorter", "gone", "other bytes", "other bytes and the times of before"])
@pytest.mark.parametrize("who", ["own", "first"])
def test_a_copy_that_changes_in_the_middle_gets_into_no_answer(three: Three, who: str, how: str, io: str) -> None:
    folder = getattr(three, who)
    replicas = three.replicas(three.first)
    with reading(list(three.files), replicas, io=io) as reader:
        three.read(reader, 0)
        for path in folder.iterdir():
            was = path.stat()
            if how == "shorter":
                os.truncate(path, was.st_size // 3)
            elif how == "gone":
                path.unlink()
            else:
                path.write_bytes(bytes(was.st_size))
                if "times" in how:
                    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        for seed in range(2):
            three.read(reader, seed)
            reader.check()
    # Who is only without a name can be read on; all others are told of.
    assert len(three.said) == (how != "gone")


def test_a_copy_that_changes_while_it_is_read_gets_into_no_answer(three: Three) -> None:
    """Bytes are written over between two reads of one unit, and before the next look at the files."""
    replicas = three.replicas(three.first)
    began = threading.Event()

    def overwrite(folder: Path) -> None:
        if folder == three.first and not began.is_set():
            began.set()
            for path in folder.iterdir():
                with path.open("r+b") as file:
                    file.write(bytes(path.stat().st_size))

    with reading(list(three.files), replicas, io="cached") as reader:
        three.calls.before = overwrite
        three.read(reader, 0)
        assert began.is_set()
        reader.check()
    assert len(three.said) == 1 and "was written to" in three.said[0]


def test_a_mirror_that_changed_since_it_was_compared_is_not_read(three: Three) -> None:
    replicas = three.replicas(three.first)
    (three.first / "f0").write_bytes(bytes(SIZE))
    with reading(list(three.files), replicas) as reader:
        three.read(reader, 0)
    assert len(three.said) == 1 and replicas.all[1].nbytes == 0


def test_a_cancelled_read_and_closing_in_the_middle_leave_no_thread(three: Three) -> None:
    replicas = three.replicas(three.first)
    file = three.own / "f0"
    with reading(list(three.files), replicas) as reader:
        cancelled = reader.submit("a", [Extent(file, 0, 2_000_000, 0)], target(2_000_000))
        cancelled.cancel()
        cancelled.wait_quietly()
        left = [reader.submit(str(i), [Extent(file, 0, 2_000_000, 0)], target(2_000_000)) for i in range(3)]
        three.calls.dies[three.first] = 0
    assert all(read.ready for read in left)
    assert not [t for t in threading.enumerate() if t.name.startswith("outcore-read")]


def test_rows_are_read_elsewhere_where_a_disk_fails(three: Three) -> None:
    file = three.own / "f1"
    rows = list(range(0, 290, 3))
    expected = [three.files[file][100 + r * 1000 : 1100 + r * 1000] for r in rows]
    for dead in (three.own, three.first):
        replicas = three.replicas(three.first)
        reader = RowReader([file], make=partial(MirroredReader, replicas))
        try:
            for after in (1 << 60, 0):
                three.calls.dies[dead] = after
                found = reader.read(file, 100, 1000, rows, "embed")
                assert [bytes(row) for row in found] == expected
                reader.check()
            three.calls.dies = dict.fromkeys((three.own, three.first), 0)
            with pytest.raises(ReadError, match=r"reading rows of embed, bytes .*, failed: Input/output error"):
                reader.read(file, 100, 1000, rows, "embed")
        finally:
            three.calls.dies.clear()
            reader.close()


# Who reads what


def simulated(rates: Sequence[float], units: int, unit: int, ahead: int = 3) -> list[float]:
    """Seconds at which each unit was there, where folders are read at these rates, by a clock of its own.

    Args:
        ahead: units that are asked for at a time, as a ring's slots allow.
    """
    now, chunk = 0.0, unit // 16
    paces = [FolderPace() for _ in rates]
    under_way: list[list[tuple[int, float]]] = [[] for _ in rates]
    left = [16] * units
    done: list[float] = []
    asked = 0
    while len(done) < units:
        while asked < min(units, len(done) + ahead):
            for _ in range(16):
                n = quickest(paces, range(len(rates)), chunk)
                paces[n].requested(chunk, now)
                begins = under_way[n][-1][1] if under_way[n] else now
                under_way[n].append((asked, begins + chunk / rates[n]))
            asked += 1
        n = min((n for n, reads in enumerate(under_way) if reads), key=lambda n: under_way[n][0][1])
        which, now = under_way[n].pop(0)
        paces[n].ended(chunk, True, now)
        left[which] -= 1
        while len(done) < units and not left[len(done)]:
            done.append(now)
    return done


@pytest.mark.parametrize("rates", [(20e6, 40e6), (40e6, 20e6), (3e9, 1e9), (1e9, 1e9, 1e9), (3e9, 2e9, 0.5e9)])
def test_rates_add_up_within_the_room_that_three_slots_give(rates: tuple[float, ...]) -> None:
    times = simulated(rates, 100, 64 << 20)
    assert (60 * 64 << 20) / (times[-1] - times[39]) > 0.9 * sum(rates)


@pytest.mark.parametrize("slow", [100, 30, 3, 1.5])
def test_a_slow_mirror_makes_nothing_later_than_without(slow: float) -> None:
    """But for what it takes until it is known to be slow."""
    fast = 3e9
    alone, both = simulated([fast], 200, 64 << 20), simulated([fast, fast / slow], 200, 64 << 20)
    assert both[-1] < alone[-1] * 1.05 + 4 * (4 << 20) / (fast / slow)
    if slow <= 3:
        assert both[-1] < alone[-1] * 1.1 / (1 + 1 / slow)


# Comparing


@pytest.fixture
def pair(short_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model's folder and a copy of it."""
    folder = tmp_path / "model"
    shutil.copytree(short_model, folder)
    return folder, copied(folder, "copy")[0]


def test_a_copy_is_found_in_a_folder_or_by_the_models_name_in_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder, copy = pair
    checkpoint = open_checkpoint(folder)
    (tmp_path / "disk").mkdir()
    shutil.copytree(copy, tmp_path / "disk" / "model")
    for named in (copy, tmp_path / "disk"):
        found = find_mirror(named, checkpoint)
        assert found.copies is not None and list(found.copies) == list(checkpoint.files)
    hub = tmp_path / "hub" / "models--o--n" / "snapshots" / "abc"
    shutil.copytree(folder, hub)
    shutil.copytree(tmp_path / "hub", tmp_path / "hub2")
    shutil.copytree(folder, tmp_path / "by-name" / "models--o--n")
    for named in (tmp_path / "hub2", tmp_path / "by-name"):
        assert find_mirror(named, open_checkpoint(hub)).copies


def _shorter(copy: Path) -> None:
    os.truncate(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 1)


def _link_to_nothing(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to("nowhere")


def _link_to_own(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(copy.with_name("model") / "model.safetensors")


def _empty(copy: Path) -> None:
    (copy / "model.safetensors").unlink()


def _folder(copy: Path) -> None:
    _empty(copy)
    (copy / "model.safetensors").mkdir()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_shorter, "bytes, where"),
        (_link_to_nothing, "cannot be read"),
        (_link_to_own, "the model's own file"),
        (_empty, "no copy of"),
        (_folder, "not a regular file"),
        (shutil.rmtree, "no such folder"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_a_folder_that_is_no_copy_is_refused_by_its_name_and_the_reason(
    pair: tuple[Path, Path], change: Callable[[Path], object], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, copy = pair
    change(copy)
    with pytest.raises(StoreError, match=why) as caught:
        find_mirror(copy, open_checkpoint(folder))
    assert str(copy) in str(caught.value)
    assert main(["info", str(folder), "--mirror", str(copy)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and why in err


def test_every_byte_of_a_mirror_is_compared_once_before_it_is_used(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(served, tmp_path / "own")
    (first,) = copied(own, "first")
    looks: list[Any] = []
    real = mirror_files.FileReader

    def counted(*args: Any, **kwargs: Any) -> Any:
        looks.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(mirror_files, "FileReader", counted)
    options: dict[str, Any] = {"mirror": first, "memory": "1GB", "resident": 0, "context": 64, "draft": "none"}

    def load() -> None:
        outcore.load_model(own, **options)[0].outcore.close()

    for _ in range(2):
        load()
        assert len(looks) == 1
    file = next(first.glob("*.safetensors"))
    at = file.stat().st_size // 2
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))
    assert prepare(own, **options).mirrors, "a look does not find it"
    with pytest.raises(StoreError, match=f"{file}: differs from .* at byte {at}"):
        load()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([byte]))
    load()
    assert len(looks) == 3


def test_what_cannot_be_a_mirror_is_refused_by_the_name_of_the_argument() -> None:
    for value in ("", 3, [3], ["a", ""], ["a", "a"], {"a": 1}):
        with pytest.raises(UsageError, match="mirror"):
            LoadOptions(mirror=value)  # type: ignore[arg-type]
    assert LoadOptions(mirror="a").mirrors == LoadOptions(mirror=[Path("a")]).mirrors == (Path("a"),)
    assert LoadOptions().mirrors == LoadOptions(mirror=()).mirrors == ()


def test_without_the_package_a_mirror_is_refused_in_one_line(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.checkpoint.mirrors.modules", lambda _: {})
    with pytest.raises(UsageError, match="needs the package outcore_mirrors"):
        prepare(pair[0], memory="1GB", mirror=pair[1])
    assert prepare(pair[0], memory="1GB").mirrors is None


# Answers


def answer(folder: Path, *mirrors: Path, before: Callable[[Any, int], object] = lambda *_: None, **options: Any) -> Any:
    """Greedy tokens, and the notes and folders of the session."""
    arguments: dict[str, Any] = {"resident": 0, "memory": "1GB", "draft": "none", "context": 64} | options
    model, tokenizer = outcore.load(str(folder), mirror=mirrors or None, **arguments)
    with model.outcore as session:
        tokens = []
        for n, r in enumerate(outcore.stream_generate(model, tokenizer, "one two three", max_tokens=7)):
            tokens.append(r.token)
            before(session, n)
        return tokens, session.notes, session.reading.mirrors.all if mirrors else ()


def test_answers_are_those_of_one_folder_and_of_mlx_lm(served: Path, tmp_path: Path) -> None:
    own = shutil.copytree(served, tmp_path / "own")
    first, second = copied(own, "first", "second")
    expected, _, _ = answer(own)
    tokens, notes, folders = answer(own, first, second)
    assert tokens == expected
    assert all(r.nbytes for r in folders) and not any("no longer" in n for n in notes)
    model, tokenizer, *_ = mlx_load(str(own))
    assert mlx_generate(model, tokenizer, "one two three", max_tokens=7) == tokenizer.decode(tokens)


@pytest.mark.parametrize(("who", "how"), [("own", "error"), ("first", "truncated")])
def test_a_folder_that_dies_in_mid_run_changes_no_token(served: Path, tmp_path: Path, who: str, how: str) -> None:
    own = shutil.copytree(served, tmp_path / "own")
    (first,) = copied(own, "first")
    expected, _, _ = answer(own)
    dead = {"own": own, "first": first}[who]
    calls = Disks()

    def die(_: Any, n: int) -> None:
        if n == 3 and how == "error":
            calls.dies[dead] = 0
        elif n == 3:
            for file in dead.glob("*.safetensors"):
                os.truncate(file, 5000)

    with using(calls):
        tokens, notes, folders = answer(own, first, before=die)
    assert tokens == expected
    assert [r.folder for r in folders if r.lost is not None] == [dead]
    assert len([n for n in notes if str(dead) in n and "no longer read" in n]) == 1


def test_a_model_with_a_failed_folder_of_its_own_gives_memory_back_all_the_same(served: Path, tmp_path: Path) -> None:
    """Layers that are shed are read from a mirror then: slots and files are made anew in mid-run."""
    own = shutil.copytree(served, tmp_path / "own")
    (first,) = copied(own, "first")
    expected, _, _ = answer(own)
    calls = Disks()

    def die(session: Any, n: int) -> None:
        if n == 3:
            calls.dies[own] = 0
            for file in own.glob("*.safetensors"):
                file.unlink()
        if n == 5:
            assert session.residency.layers.shed(100) == 2 and session.residency.layers.shrink(10**12)

    with using(calls):
        tokens, _, folders = answer(own, first, before=die, resident=2)
    assert tokens == expected and folders[0].lost is not None


# Predictions


def test_a_mirror_on_the_same_disk_is_reported(served: Path, tmp_path: Path) -> None:
    own = shutil.copytree(served, tmp_path / "own")
    (first,) = copied(own, "first")
    prepared = prepare(own, mirror=first, memory="1GB", context=64, cpu_streams=1)
    assert any("same disk" in n for n in prepared.notes)


def test_the_command_says_what_was_read_where(served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = shutil.copytree(served, tmp_path / "own")
    first, second = copied(own, "first", "second")
    line = ["generate", str(own), "--resident", "0", "--memory", "1GB", "--max-tokens", "2", "-p", "hello", "--json"]
    assert main([*line, "--mirror", str(first), "--mirror", str(second)]) == 0
    record = json.loads(capsys.readouterr().out)
    folders = record["mirrors"]
    assert [m["folder"] for m in folders] == [str(own), str(first), str(second)]
    # What is read ahead goes on meanwhile.
    assert sum(m["bytes_read"] for m in folders) >= record["bytes_read"] > 0 and not any(m["lost"] for m in folders)
