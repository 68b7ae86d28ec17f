"""Measuring the machine: what is read only once, what a layer takes, what is kept, and what is refused and why."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import zoo
from outcore.calibration import calibration_file
from outcore.calibration.calibration_file import load_calibration, store_calibration
from outcore.cli.main import main
from outcore.decode.preparation import Preparation, prepare
from outcore.disk import open_file
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader
from outcore.disk.ring import Slot
from outcore.errors import CalibrationError
from outcore.plan.machine_profile import Calibration
from outcore.sizes import BLOCK
from outcore_calibrate import calibration as calibrate
from outcore_calibrate import disk_rate as disk
from outcore_calibrate import layer_times as layers
from outcore_calibrate.disk_rate import (
    GAIN,
    SCRATCH,
    Bench,
    ReadSetting,
    UnreadRanges,
    best_setting,
    choose,
    scratch_file,
)

MEASURED = Calibration(
    read_gbps=3.5,
    read_latency_s=1e-4,
    sync_s=2e-5,
    threads=4,
    chunk=8 << 20,
    kinds={"Block a": {1: 0.01, 32: 0.02}},
    measured=True,
)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers of tokens, small weights, short reads, and a small scratch file."""
    monkeypatch.setattr(layers, "TOKENS", (1, 4))
    monkeypatch.setattr(layers, "PAST_CACHES", 4 << 20)
    monkeypatch.setattr(disk, "POINT_S", 0.05)
    monkeypatch.setattr(disk, "RATE_S", 0.1)
    monkeypatch.setattr(disk, "SCRATCH_BYTES", 48 << 20)
    monkeypatch.setattr(disk, "LEAST_SCRATCH", 48 << 20)


# What is kept


def test_a_calibration_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, 2) is None
    store_calibration(tmp_path, 2, MEASURED)
    assert load_calibration(tmp_path, 2) == MEASURED
    # Linear layers on another number of cores take another time.
    assert load_calibration(tmp_path, 1) is None


def test_kinds_of_several_models_gather_in_one_calibration(tmp_path: Path) -> None:
    store_calibration(tmp_path, 2, MEASURED)
    store_calibration(tmp_path, 2, Calibration(read_gbps=2.0, kinds={"Block b": {1: 0.5}}))
    found = load_calibration(tmp_path, 2)
    assert found is not None
    assert found.read_gbps == 2.0 and found.kinds.keys() == {"Block a", "Block b"}


@pytest.mark.parametrize(("function", "value"), [("version", "0.31.0"), ("cpu_name", "Another CPU"), ("cores", 96)])
def test_what_was_measured_on_another_machine_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, value: Any
) -> None:
    with monkeypatch.context() as then:
        then.setattr(calibration_file, function, lambda *_: value)
        store_calibration(tmp_path, 2, MEASURED)
    assert load_calibration(tmp_path, 2) is None


def test_a_calibration_of_an_earlier_version_is_read_for_what_is_still_in_it(tmp_path: Path) -> None:
    path = store_calibration(tmp_path, 2, MEASURED)
    document = json.loads(path.read_text())
    document["calibration"] |= {"read_slowdown": 1.1, "unit_s": {"1": 0.002}, "disk_conditions": {"at": 1.7e9}}
    path.write_text(json.dumps(document | {"schema": 1}))
    assert load_calibration(tmp_path, 2) == MEASURED


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "calibration",
    [
        {},
        None,
        {"sync_s": 0},
        {"kinds": {"a": {"one": 1.0}}},
        {"threads": "4"},
        {"io": "fast"},
    ],
)
def test_a_damaged_calibration_is_not_used(tmp_path: Path, calibration: Any) -> None:
    path = store_calibration(tmp_path, 2, MEASURED)
    good = json.loads(path.read_text())["calibration"]
    change(path, calibration={**good, **calibration} if calibration else calibration)
    assert load_calibration(tmp_path, 2) is None


def test_another_schema_and_other_files_are_not_used(tmp_path: Path) -> None:
    path = store_calibration(tmp_path, 2, MEASURED)
    change(path, schema=99)
    assert load_calibration(tmp_path, 2) is None
    for data in (b"", b"[1]", b"\xff\xfe{", os.urandom(64)):
        path.write_bytes(data)
        assert load_calibration(tmp_path, 2) is None
    store_calibration(tmp_path, 2, MEASURED)
    assert load_calibration(tmp_path, 2) == MEASURED


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CalibrationError, match="OUTCORE_CACHE"):
        store_calibration(tmp_path, 2, MEASURED)


# The disk


def extents_of(file: Path, rng: random.Random) -> list[Extent]:
    """The whole file, cut anywhere."""
    size = file.stat().st_size
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(12))})
    return [Extent(file, a, b - a, 12345, True) for a, b in pairwise(cuts)]


def test_no_range_is_given_out_twice_and_every_byte_has_a_place(tmp_path: Path) -> None:
    rng = random.Random(0)
    file = tmp_path / "file"
    data = rng.randbytes(3_000_001)
    file.write_bytes(data)
    ranges = UnreadRanges(extents_of(file, rng))
    assert ranges.nbytes == len(data)
    slot = Slot(1 << 20)
    seen = bytearray(len(data))
    with contextlib.closing(FileReader([file], threads=2, chunk=64 << 10)) as reader:
        while pieces := ranges.take(rng.choice([1, BLOCK, 300_000, 2_000_000]), 1 << 20):
            for piece in pieces:
                reader.submit("piece", piece, slot.payload).wait()
                for e in piece:
                    assert slot.payload[e.at : e.at + e.nbytes] == data[e.offset : e.offset + e.nbytes]
                    assert (e.at - e.offset) % BLOCK == 0
                    assert not any(seen[e.offset : e.offset + e.nbytes])
                    seen[e.offset : e.offset + e.nbytes] = b"\1" * e.nbytes
    assert all(seen) and ranges.nbytes == 0


def test_the_disk_is_measured_without_reading_anything_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    submit = FileReader.submit

    def noting(self: FileReader, name: str, extents: Any, target: Any) -> Any:
        asked.extend((e.offset, e.offset + e.nbytes) for e in extents)
        return submit(self, name, extents, target)

    monkeypatch.setattr(FileReader, "submit", noting)
    with scratch_file(tmp_path, nbytes=48 << 20) as path:
        bench = Bench(UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)]))
        best = best_setting(bench)
        asked.sort()
        assert len(asked) > 20 and all(a <= b for (_, a), (b, _) in pairwise(asked))
    assert best.read_gbps > 0 and 0 < best.read_latency_s < 1


def test_other_settings_than_the_default_must_be_clearly_faster() -> None:
    default, cached = ReadSetting(), ReadSetting(direct=False)
    for other in (ReadSetting(threads=16), cached):
        assert choose({default: 3.0, other: 3.0 * GAIN * 0.999}) == default
        assert choose({default: 3.0, other: 3.0 * GAIN * 1.001}) == other


def test_a_scratch_file_has_no_name_before_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[Path]] = []
    numbers: list[int] = []
    write = disk._write_random

    def writing(number: int, nbytes: int) -> None:
        names.append(list(tmp_path.iterdir()))
        numbers.append(number)
        write(number, nbytes)

    monkeypatch.setattr(disk, "_write_random", writing)
    with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path, nbytes=20 << 20) as path:
        assert path.stat().st_size == 20 << 20
        blocks = [path.read_bytes()[at : at + 4096] for at in (0, 16 << 20)]
        assert blocks[0] != blocks[1] and len(set(blocks[0])) > 200
        assert list(tmp_path.iterdir()) == [] and names == [[]]
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(numbers[0])


def test_a_slow_disk_gets_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LEAST_SCRATCH", 32 << 20)
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for step, size in ((1.0, 80 << 20), (6.0, 32 << 20), (20.0, 16 << 20)):
            os.ftruncate(number, 0)
            os.lseek(number, 0, os.SEEK_SET)
            disk._write_random(number, 80 << 20, Ticking(step))
            assert os.fstat(number).st_size == size
    finally:
        os.close(number)


KILLED = """
import os, signal, sys
from pathlib import Path
from statistics import median
from outcore_calibrate.disk_rate import scratch_file
with scratch_file(Path(sys.argv[1]), nbytes=8 << 20) as path:
    assert path.stat().st_size == 8 << 20
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cache")], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=300_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CalibrationError, match=r"512 MB, but only 300 MB are free: free some"), scratch_file(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CalibrationError, match="writable, or name a model"), scratch_file(tmp_path / "file" / "model"):
        pass


def test_a_folder_on_another_disk_is_left_alone(tmp_path: Path) -> None:
    disk = tmp_path.stat().st_dev
    with (
        pytest.raises(CalibrationError, match="is not on the disk to measure"),
        scratch_file(tmp_path / "not" / "there", disk + 1, 1 << 20),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with scratch_file(tmp_path / "not" / "there", disk, 1 << 20) as path:
        assert path.stat().st_size == 1 << 20


def ranges(prepared: Preparation | None, folder: Path = Path()) -> tuple[list[Path], int]:
    with calibrate._ranges(prepared.profile if prepared else None, folder, lambda *_: None) as found:
        return found.files, found.nbytes


def test_a_model_that_is_large_enough_is_read_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path / "model"))
    monkeypatch.setattr(calibrate, "ENOUGH_BYTES", 1000)
    monkeypatch.setattr(calibrate, "scratch_file", None)
    files, nbytes = ranges(prepared)
    assert files == [tmp_path / "model" / "model.safetensors"] and nbytes == files[0].stat().st_size


def test_a_small_model_on_the_disk_of_the_cache_is_left_alone(tmp_path: Path, brief: None) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path / "model"))
    files, nbytes = ranges(prepared)
    assert nbytes == 48 << 20
    assert not files[0].is_relative_to(tmp_path / "model")
    assert (tmp_path / "outcore-cache").is_dir()


def test_the_disk_of_a_small_model_is_not_measured_where_no_scratch_file_can_be_on_it(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    prepared = prepare(folder)
    disk_of = disk.disk_of
    monkeypatch.setattr(disk, "disk_of", lambda path: disk_of(path) + ("outcore-cache" in str(path)))
    before = {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]}
    notes: list[str] = []
    found, _ = calibrate.calibrated(prepared.profile, folder, 1, note=notes.append)
    assert {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]} == before
    (line,) = notes
    assert line.startswith("the disk was not measured, 3 GB/s are assumed: ")
    assert "is not on the disk to measure" in line
    assert not found.measured and found.kinds
    with pytest.raises(CalibrationError, match="is not on the disk"):
        ranges(None, folder)


def test_a_folder_that_may_only_be_read_is_measured_and_never_written_to(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    opened, real = [], os.open

    def noting(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(folder)):
            opened.append(path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    before = {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]}
    status, record, _ = run(capsys, str(folder))
    assert status == 0 and record["notes"] == [] and opened == []
    assert {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]} == before


# A model's layers


def state(prepared: Preparation) -> list[Any]:
    """All that measuring could have changed in a model."""
    modules = prepared.profile.lazy.model.modules()
    return [(type(m), {k: id(v) for k, v in m.items()}, set(m.__dict__)) for m in modules]


def kinds_of(prepared: Preparation) -> set[str]:
    return {layer.kind for layer in prepared.profile.size.layers} | {prepared.profile.size.rest_kind}


QUANTIZED: dict[str, Any] = {"bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("model_type", "quantize"),
    [("llama", None), ("qwen3_5", QUANTIZED), ("qwen3_5_moe", None), ("mamba2", None), ("gpt_oss", None),
     ("llama", {"bits": 4, "group_size": 32, "mode": "mxfp4"})],
)  # fmt: skip
def test_every_kind_of_layer_is_measured_and_the_model_left_as_it_was(
    tmp_path: Path, brief: None, model_type: str, quantize: dict[str, Any] | None
) -> None:
    prepared = prepare(zoo.save_checkpoint(model_type, tmp_path, quantize=quantize))
    before = state(prepared)
    notes: list[str] = []
    kinds = calibrate.measure_kinds(prepared.profile, 1, note=notes.append)
    assert notes == [] and kinds.keys() == kinds_of(prepared)
    assert all(times.keys() == {1, 4} and min(times.values()) > 0 for times in kinds.values())
    assert state(prepared) == before


def test_a_layer_that_takes_longer_is_found_to(tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(zoo.save_checkpoint("qwen3_5", tmp_path))
    modules = [layer.module for layer in prepared.profile.layers]
    kinds = [size.kind for size in prepared.profile.size.layers]
    slow = next(i for i, m in enumerate(modules) if not m.is_linear)
    cls = type(modules[slow])
    call = cls.__call__

    def slowly(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        end = time.thread_time() + (0.0 if self.is_linear else 0.01 * x.shape[1])
        while time.thread_time() < end:  # working, not sleeping: others' time does not count where they disturb
            pass
        return call(self, x, *args, **kwargs)

    monkeypatch.setattr(cls, "__call__", slowly)
    found = calibrate.measure_kinds(prepared.profile, 1)
    fast = next(kind for kind in kinds if kind != kinds[slow])
    # A little less than it sleeps: shares are scaled to a whole pass, which other work may speed up or slow down.
    assert found[kinds[slow]][1] > 0.005 and found[kinds[slow]][4] > 0.025
    assert found[fast][1] < found[kinds[slow]][1] and found[fast][4] < found[kinds[slow]][4]


def test_memory_for_one_layer_of_each_kind_is_enough(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 16384}
    monkeypatch.setitem(zoo.CONFIGS, "qwen3", {**zoo.CONFIGS["qwen3"], **large})
    monkeypatch.setattr(layers, "PAST_CACHES", 4 << 20)
    folder = zoo.save_checkpoint("qwen3", tmp_path)
    mx.clear_cache()
    prepared = prepare(folder)
    assert prepared.profile.lazy.checkpoint.nbytes > 60_000_000
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kinds = calibrate.measure_kinds(prepared.profile, 1)
    assert kinds.keys() == kinds_of(prepared)
    # Two copies of a layer of 3.6 MB, slices of 4 MiB of both tables, two blocks of noise.
    assert mx.get_peak_memory() - before < 40_000_000
    assert mx.get_active_memory() - before < 1_000_000


def test_a_head_of_which_a_slice_is_computed_counts_as_a_whole(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"hidden_size": 256, "vocab_size": 16384, "num_hidden_layers": 4}
    monkeypatch.setitem(zoo.CONFIGS, "llama", {**zoo.CONFIGS["llama"], **large})
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path))
    monkeypatch.setattr(layers, "PAST_CACHES", 2 << 20)
    with layers.rig(prepared.profile, 1) as made:
        model = prepared.profile.lazy.model
        assert model.lm_head["weight"].shape == (2048, 256)
        # Ids of rows that are not there are looked up elsewhere, and logits are as many as ever.
        logits = model(mx.array([[16383, 3]]))
        assert logits.shape == (1, 2, 16384) and mx.isfinite(logits).all().item()
        # What it is multiplied with is drawn by a key of its own: the caller's random numbers are the caller's.
        mx.random.seed(3)
        expected = mx.random.uniform().item()
        mx.random.seed(3)
        assert made.head(4) > 0 and [scale for *_, scale in made._products.values()] == [8]
        assert mx.random.uniform().item() == expected
        seen = made.watched(1)
    assert len(seen.layers) == 1 and sum(map(len, seen.layers.values())) == 4 and 0 < seen.prelude < seen.seconds


def test_a_model_that_cannot_run_is_a_note_and_the_disk_is_measured(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path / "model"))
    before = state(prepared)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(type(prepared.profile.layers[0].module), "__call__", broken)
    notes: list[str] = []
    found, _ = calibrate.calibrated(prepared.profile, tmp_path / "model", 1, note=notes.append)
    assert found.kinds == {} and found.measured and found.read_gbps > 0
    assert notes == ["this model's layers could not be measured: no such kernel"]
    assert state(prepared) == before


def test_layers_larger_than_memory_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path))
    monkeypatch.setattr(layers, "last_resort", lambda: 1000)
    notes: list[str] = []
    assert calibrate.measure_kinds(prepared.profile, 1, note=notes.append) == {}
    assert len(notes) == 1 and "and only 1.00 KB are free" in notes[0]


class Ticking:
    """A clock that moves on by itself, each time that it is asked."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_measuring_ends_in_time(tmp_path: Path) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path))
    clock = Ticking(0.1)
    with layers.rig(prepared.profile, 1, clock) as made:
        kinds = layers.times_of(made, 1e-5, budget_s=20.0)
        assert clock.now < 30
        few = layers.times_of(made, 1e-5, budget_s=1.0)
    assert kinds.keys() == kinds_of(prepared)
    assert all(1 in times for times in few.values())


def test_a_disk_that_is_very_slow_is_measured_in_the_same_time(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is no more than it reads in the time that there is, and what was measured by then is used."""
    rate, fill, turn = 20e6, open_file.fill, threading.Lock()

    def slowly(*args: Any, **kwargs: Any) -> int:
        with turn:
            found: int = fill(*args, **kwargs)
            time.sleep(found / rate)
        return found

    @contextmanager
    def sparse(*_: Any) -> Iterator[Path]:
        (tmp_path / "file").touch()
        os.truncate(tmp_path / "file", 2 << 30)
        yield tmp_path / "file"

    monkeypatch.setattr(open_file, "fill", slowly)
    monkeypatch.setattr(calibrate, "scratch_file", sparse)
    monkeypatch.setattr(calibrate, "decode_gbps", lambda *_: 1.0)
    monkeypatch.setattr(disk, "POINT_S", 0.1)
    monkeypatch.setattr(disk, "RATE_S", 0.4)
    began = time.perf_counter()
    found, _ = calibrate.calibrated(None, tmp_path, 1)
    assert time.perf_counter() - began < 45, "such a disk would be read for a minute"
    assert found.measured and rate / 3e9 < found.read_gbps < rate * 1.5e-9


def test_kernels_are_compiled_first_and_what_no_time_is_left_for_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path))
    clock = Ticking(0.001)
    compiled = {1: 0.0}
    with layers.rig(prepared.profile, 1, clock) as made:
        watched = made.watched

        def compiling(n: int, *args: Any) -> layers.TimedPass:
            clock.now += 0 if n in compiled else 5 if n < 16 else 30
            compiled[n] = clock.now
            return watched(n, *args)

        monkeypatch.setattr(made, "watched", compiling)
        monkeypatch.setattr(layers, "on_cpu", lambda: False)
        kinds = layers.times_of(made, 1e-5, budget_s=100.0)
    assert set(compiled) == {1, 4, 16}, "after one that took more than 20 s no other is begun"
    assert all(times.keys() == {1, 4} and max(times.values()) < 1 for times in kinds.values())


# The command


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any], str]:
    status = main(["calibrate", *args, "--json"])
    out = capsys.readouterr()
    return status, json.loads(out.out.splitlines()[-1]) if status == 0 else {}, out.out + out.err


def test_calibrate_measures_once_and_keeps_it(
    capsys: pytest.CaptureFixture[str], brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "llama")
    status, record, text = run(capsys, str(folder))
    assert status == 0 and "GB/s" in text and "4 ×" in text
    assert record["measured_now"] == ["disk", "layers"] and record["notes"] == []
    assert record["read_gbps"] > 0
    assert set(record["model_kinds"]) == record["kinds"].keys()
    assert json.loads(Path(record["stored"]).read_text())["calibration"]["read_gbps"] == record["read_gbps"]
    assert main(["calibrate", str(folder), "--quiet"]) == 0 and capsys.readouterr() == ("", "")
    _, again, text = run(capsys, str(folder))
    assert again["measured_now"] == [] and again["read_gbps"] == record["read_gbps"] and "--force" in text
    # Another model on the same disk: its layers alone.
    other = zoo.save_checkpoint("qwen3", tmp_path / "qwen3")
    _, more, _ = run(capsys, str(other))
    assert more["measured_now"] == ["layers"] and more["read_gbps"] == record["read_gbps"]
    assert more["kinds"].keys() > record["kinds"].keys()
    monkeypatch.setattr(calibration_file, "version", lambda _: "99.0")
    _, new, text = run(capsys, str(folder))
    assert new["measured_now"] == ["disk", "layers"] and new["notes"] == []
    assert not [p for p in tmp_path.rglob("*") if SCRATCH in p.name or p.name.endswith(".partial")]


def test_calibrate_without_a_model_measures_the_disk(
    capsys: pytest.CaptureFixture[str], brief: None, tmp_path: Path
) -> None:
    status, record, _ = run(capsys)
    assert status == 0 and record["measured_now"] == ["disk"] and record["kinds"] == {} and record["weight_gbps"] > 0
    _, forced, _ = run(capsys, "--force")
    assert forced["measured_now"] == ["disk"]
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".json"]


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["no/such/model/here"], 1, "no/such/model"),
        (["--dtype", "float32"], 2, "give --model"),
        (["--cpu-streams", "0"], 2, "at least 1"),
    ],
)
def test_calibrate_refuses_what_cannot_be_meant(
    capsys: pytest.CaptureFixture[str], args: list[str], status: int, says: str
) -> None:
    found, _, text = run(capsys, *args)
    assert found == status and says in text
