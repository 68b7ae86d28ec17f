"""``outcore bench``: what is asked for becomes rows, rows hold what was counted, and the document keeps them."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.cli.commands import parser_of
from outcore.cli.main import main
from outcore_bench import bench as runner
from outcore_bench import jobs, measure
from outcore_bench.disk import disk_rate
from outcore_bench.document import BUSY, SCHEMA, BenchRow, Document, DocumentError, Model, Stat, read_record
from outcore_bench.jobs import BenchJob, BenchSettings, RunSettings, make_jobs
from outcore_bench.measure import Loop
from zoo import save_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def job(folder: Path, mode: str, **changes: Any) -> BenchJob:
    own = {name: changes.pop(name) for name in list(changes) if name in RunSettings.__dataclass_fields__}
    run = RunSettings(**{"max_tokens": 3, "prompt_tokens": 5, "repeats": 2} | own)
    return replace(BenchJob(mode, str(folder), mode, run, 16, 128), **changes)


# Settings and jobs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "mlx-lm,other"], "--modes other: choose one of mlx-lm, plain, outcore"),
        (["--io", "mmap"], "--io mmap: choose one of auto, direct, cached"),
        (["--memory", "2GB,4"], "--memory 4: no unit; write 4GB or 4GiB"),
        (["--resident", "150%"], "--resident 150%: a share is between 0% and 100%"),
        (["--resident", "5"], "--resident 5: this model has 4 layers"),
        (["--resident", "half"], "--resident half: give numbers of layers or shares, such as 0,25%,50%"),
        (["--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
        (["--slots", "1"], "--slots 1: must be at least 2"),
        (["--batch", "1,0"], "--batch 0: must be at least 1"),
        (["--batch", "two"], "--batch two: give whole numbers, separated by commas"),
        (["--output", "nowhere/out.json"], "--output nowhere/out.json: no such folder"),
        (["--prefill-step-size", "0"], "--prefill-step-size 0: must be at least 1"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tiny: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"outcore bench: {message}")


def test_missing_model_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("outcore bench: ")


def test_flags_of_mlx_lms_benchmark_mean_the_same(tiny: Path) -> None:
    flags = "-p 5 -b 4 -n 2 --prefill-step-size 3 -qa --trust-remote-code"
    chosen = runner.settings(parser_of("bench").parse_args(["m", *flags.split()]))
    assert (chosen.run.prompt_tokens, chosen.batch, chosen.run.repeats) == (5, (4,), 2)
    for one in make_jobs(chosen, "m", 8, fits=True):
        assert one.run.model_config == {"quantize_activations": True} and one.run.trust_remote_code
        assert one.run.prefill_step_size == 3


def test_every_mode_computes_prompts_in_the_steps_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(measure, "mlx_lm_steps", lambda model, step, *_: steps.append(step))
    for mode in measure.LOOPS:
        measure.LOOPS[mode](job(tiny, mode, prefill_step_size=3, resident=4)).close()
    assert steps == [3, 3, 3]


def test_activations_that_cannot_be_quantized_are_one_line(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(demo_model), "-qa"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not support activation quantization" in line


def labels(settings: BenchSettings, **options: Any) -> list[str]:
    return [j.label for j in make_jobs(settings, "m", 8, **({"fits": True} | options))]


def test_each_budget_and_residency_is_a_row_beside_the_baselines() -> None:
    settings = BenchSettings(memory=("2GB", "4GB"), resident=("25%", "3"))
    assert labels(settings) == [
        "mlx-lm",
        "outcore, all resident",
        "plain",
        "outcore, 2GB",
        "outcore, 4GB",
        "outcore, 25 % resident",
        "outcore, 3 of 8 layers resident",
    ]
    jobs = {j.label: j for j in make_jobs(settings, "m", 8, fits=True)}
    assert jobs["outcore, 25 % resident"].resident == 2
    assert jobs["outcore, 4GB"].memory == "4GB"


def test_everything_resident_is_added_once_and_only_where_it_fits() -> None:
    whole = "outcore, all resident"
    assert labels(BenchSettings(memory=("2GB",)), fits=False).count(whole) == 0
    assert labels(BenchSettings(resident=("0%", "100%", "8"), io=("direct", "cached"))).count(whole) == 1
    assert whole not in labels(BenchSettings(modes=("plain", "mlx-lm"), memory=("2GB",)))


def test_every_batch_and_way_of_reading_is_a_row() -> None:
    found = labels(
        BenchSettings(modes=("outcore",), memory=("2GB",), io=("direct", "cached"), batch=(1, 4)), fits=False
    )
    assert found == [f"outcore, 2GB, {io}, batch {n}" for n in (1, 4) for io in ("direct", "cached")]


@pytest.mark.parametrize("vocabulary", [16, 128, 150_000])
def test_prompts_are_valid_in_any_vocabulary_and_differ_by_sequence(vocabulary: int) -> None:
    prompts = [measure.prompt_ids(40, i, vocabulary) for i in range(3)]
    assert all(0 <= token < vocabulary for prompt in prompts for token in prompt)
    assert len({tuple(p) for p in prompts}) == 3


# One row


class Ticks:
    """A clock that moves only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def scripted(clock: Ticks, seconds: Sequence[float], at_once: int = 1) -> Callable[[BenchJob], Loop]:
    """A loop whose steps take these times, one repeat after the other."""
    left = iter(seconds)

    def steps(prompts: Sequence[Sequence[int]], tokens: int) -> Generator[list[int], None, None]:
        for token in itertools.count(7):
            clock.now += next(left)
            yield [token] * max(at_once, len(prompts))

    return lambda _: Loop(None, steps)


@pytest.fixture
def other_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[BenchJob], Loop]], None]:
    return lambda opens: monkeypatch.setitem(measure.LOOPS, "other", opens)


def test_speeds_come_from_the_times_between_tokens(tiny: Path, other_mode: Any) -> None:
    clock = Ticks()
    warmup, first, second = [9.0, 9.0], [2.0, 0.1, 0.2, 0.3], [4.0, 0.2, 0.4, 0.6]
    other_mode(scripted(clock, [*warmup, *first, *second]))
    row = measure.measure(job(tiny, "other"), clock)
    assert row.speed.ttft_s == Stat(3.0, 2.0, 4.0, 2)
    assert row.speed.s_per_token is not None and row.speed.decode_tps is not None and row.speed.prompt_tps is not None
    assert row.speed.s_per_token.least == pytest.approx(0.2) and row.speed.s_per_token.most == pytest.approx(0.4)
    assert row.speed.decode_tps.most == pytest.approx(5) and row.speed.prompt_tps.most == pytest.approx(5 / 2)
    assert row.tokens == [7, 8, 9, 10]
    assert (row.setting.cache, row.speed.tokens_per_sweep, row.reading.read_gbps) == (None, None, None)


def test_a_batch_counts_the_tokens_of_all_its_sequences(tiny: Path, other_mode: Any) -> None:
    clock = Ticks()
    other_mode(scripted(clock, [9.0, 9.0, 2.0, 0.5, 0.5, 0.5]))
    row = measure.measure(job(tiny, "other", batch=4, repeats=1), clock)
    assert row.speed.decode_tps is not None and row.speed.prompt_tps is not None
    assert row.speed.decode_tps.median == pytest.approx(4 / 0.5) and row.speed.prompt_tps.median == pytest.approx(
        20 / 2
    )
    assert row.tokens == [7, 8, 9, 10]


def test_a_loop_may_give_several_tokens_at_a_step(tiny: Path, other_mode: Any) -> None:
    clock = Ticks()
    other_mode(scripted(clock, [9.0, 1.0, 0.5], at_once=2))
    row = measure.measure(job(tiny, "other", repeats=1), clock)
    assert row.speed.decode_tps is not None and row.speed.decode_tps.median == pytest.approx(4)
    assert row.tokens == [7, 7, 8, 8]


def test_modes_give_mlx_lms_tokens_and_count_what_they_read(tiny: Path) -> None:
    theirs = measure.measure(job(tiny, "mlx-lm"))
    plain = measure.measure(job(tiny, "plain"))
    ours = measure.measure(job(tiny, "outcore", resident=1))
    assert theirs.tokens == plain.tokens == ours.tokens
    assert len(ours.tokens or []) == 4
    assert (theirs.setting.io, plain.setting.io, plain.setting.cache) == ("none", "cached", "cold")
    assert (ours.setting.resident_units, ours.setting.streamed_units, ours.speed.tokens_per_sweep) == (1, 3, 1)
    assert ours.setting.cache == {"direct": "bypassed", "cached": "cold"}[str(ours.setting.io)]
    assert ours.reading.engine_bytes_per_token is not None and ours.reading.engine_bytes_per_token > 3 * 50_000
    assert ours.reading.stall_share is not None and 0 <= ours.reading.stall_share <= 1
    assert ours.reading.io_share is not None and 0 < ours.reading.io_share <= 1
    assert ours.use.parts is not None and ours.use.planned_peak_bytes is not None
    assert sum(ours.use.parts.values()) == ours.use.planned_peak_bytes


def test_a_streamed_batch_gives_mlx_lms_tokens_from_one_pass_a_step(tiny: Path) -> None:
    options: dict[str, Any] = {"batch": 3, "repeats": 1, "context": 512}
    theirs = measure.measure(job(tiny, "mlx-lm", **options))
    ours = measure.measure(job(tiny, "outcore", resident=0, **options))
    assert ours.tokens == theirs.tokens
    assert ours.speed.tokens_per_sweep == 3


def test_cached_files_are_dropped_before_every_token(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[set[str]] = []
    monkeypatch.setattr(measure, "drop_page_cache", lambda files: dropped.append({f.name for f in files}))
    options: dict[str, Any] = {"resident": 0, "io": "cached", "repeats": 1}
    cold = measure.measure(job(tiny, "outcore", **options))
    assert (cold.setting.io, cold.setting.cache, dropped) == ("cached", "cold", [{"model.safetensors"}] * 6)


# What the system counts


def test_disk_rate_reads_a_part_of_a_large_model(tmp_path: Path) -> None:
    file = tmp_path / "w.bin"
    file.write_bytes(os.urandom(1_000_000))
    part = disk_rate([file], threads=(2,), repeats=2, piece=100_000, most=300_000)
    assert len(part.repeats_gbps["2"]) == 2 and part.best_gbps > 0


# The document


def stat(value: float) -> Stat:
    return Stat(value, value, value, 1)


def row(mode: str, io: str, s_per_token: Stat, **more: Any) -> BenchRow:
    values = {"mode": mode, "label": mode, "command": "", "io": io, "s_per_token": s_per_token}
    return BenchRow.of(values | more)


def document(*rows: BenchRow) -> Document:
    found = Document.__new__(Document)
    found.rows = list(rows)
    found.model = Model("m", "llama", 10**9, 4, 800_000_000, 200_000_000, None, "bfloat16")
    return found


def test_efficiency_is_the_greater_of_disk_and_compute_time_over_the_measured() -> None:
    resident = row("outcore", "none", Stat(0.5, 0.4, 0.6, 3), tokens=[1, 2])
    read = {"engine_bytes_per_token": 8e8}
    streamed = row("outcore", "direct", stat(0.5), **read, read_gbps=1.5, disk_gbps=2.0, tokens=[1, 2])
    slow_disk = row("outcore", "direct", stat(1.0), **read, read_gbps=0.9, disk_gbps=1.0, tokens=[1, 3])
    theirs = row("mlx-lm", "none", stat(0.9), tokens=[1, 2])
    runner.compare(document(theirs, resident, streamed, slow_disk))
    assert (streamed.ceiling.disk_s, streamed.ceiling.compute_s, streamed.ceiling.ceiling_s) == (0.4, 0.4, 0.4)
    assert streamed.ceiling.efficiency == pytest.approx(0.8)
    assert streamed.reading.disk_share == pytest.approx(0.75)
    assert slow_disk.ceiling.ceiling_s == slow_disk.ceiling.efficiency == pytest.approx(0.8)
    assert (streamed.same_tokens, slow_disk.same_tokens, theirs.same_tokens) == (True, False, None)
    assert theirs.ceiling.efficiency is None and resident.ceiling.efficiency is None


def test_without_a_resident_row_the_ceiling_is_the_disk_and_says_so() -> None:
    plain = row("plain", "cached", stat(2.0), disk_gbps=1.0)
    for _ in range(2):
        runner.compare(document(plain))
    assert (plain.ceiling.ceiling_s, plain.same_tokens) == (0.8, None)
    assert plain.notes == [
        "the ceiling counts disk time only: no row with everything resident was measured on a quiet machine"
    ]


def test_no_row_is_above_its_ceiling() -> None:
    read = {"engine_bytes_per_token": 8e8, "disk_gbps": 1.0}
    resident = row("outcore", "none", Stat(0.5, 0.4, 0.6, 3))
    drifted = row("outcore", "direct", stat(0.55), **read, read_gbps=1.6)  # the disk was slower when it was measured
    cached = row("outcore", "cached", stat(0.3), **read, read_gbps=1.0)  # reads that took no time of the row's
    by_a_hair = row("outcore", "direct", stat(0.795), **read, read_gbps=1.0)
    for _ in range(2):
        runner.compare(document(resident, drifted, cached, by_a_hair))
    assert (drifted.ceiling.ceiling_s, drifted.reading.disk_share) == (0.5, 1.0)
    assert [note.partition(",")[0] for note in drifted.notes] == [
        "the row read faster than the disk's measurements around it"
    ]
    assert (cached.ceiling.ceiling_s, cached.ceiling.efficiency) == (None, None)
    assert len(cached.notes) == 1 and "the page cache helped; measure again" in cached.notes[0]
    assert (by_a_hair.ceiling.ceiling_s, by_a_hair.ceiling.efficiency, by_a_hair.notes) == (0.795, 1.0, [])


def test_a_busy_machine_gives_no_ceilings() -> None:
    busy = [f"{BUSY} 100 % of the cores right before"]
    read = {"engine_bytes_per_token": 8e8, "disk_gbps": 2.0}
    resident = row("outcore", "none", stat(2.0), notes=busy)
    quiet, loud = (row("outcore", "direct", stat(1.0), **read, notes=notes) for notes in ([], busy))
    runner.compare(document(resident, quiet, loud))
    assert (quiet.ceiling.compute_s, quiet.ceiling.efficiency) == (None, 0.4)  # 200 % with what the busy row took
    assert (loud.ceiling.ceiling_s, loud.ceiling.efficiency, loud.notes) == (None, None, busy)


def theirs(tiny: Path) -> Document:
    return runner.bench(tiny, "tiny", BenchSettings(modes=("mlx-lm",)), "outcore bench tiny")


def test_a_child_killed_for_memory_is_a_row_without_numbers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, -9, "", ""))
    (row,) = theirs(tiny).rows
    assert (row.error, row.speed.decode_tps) == ("killed for memory", None)


def test_a_child_that_fails_leaves_its_last_line_without_paths(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", f"Traceback\nReadError: {tiny}/model.safetensors: too short\n")
    monkeypatch.setattr(jobs.subprocess, "run", lambda *a, **k: failed)
    assert theirs(tiny).rows[0].error == "ReadError: model.safetensors: too short"


def test_a_model_that_does_not_fit_is_not_given_to_mlx_lm(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "last_resort", lambda: 1000)
    assert (theirs(tiny).rows[0].error or "").startswith("not run: everything resident needs ")


def test_commands_are_shown_without_paths() -> None:
    shown = jobs.names_only("outcore bench /home/me/models/m --output=/out/r.json -o out/r.json --io=auto")
    assert shown == "outcore bench m --output=r.json -o out/r.json --io=auto"


def test_other_files_are_no_documents(tmp_path: Path) -> None:
    for text in ("", "[]", '{"schema": "outcore-bench/0"}', '{"schema": "outcore-bench/1"}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(DocumentError, match=r"r\.json"):
            read_record(tmp_path / "r.json", {SCHEMA: Document.of})


def test_command_prints_a_table_and_ends_with_the_document(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def child(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """The first row in a process of its own, as every row and reading of the disk is; the others here."""
        *_, kind, arguments = command
        asked.append(kind)
        if asked.count("row") == 1 and kind == "row":
            return subprocess.run(command, **how)
        with redirect_stdout(io.StringIO()) as written:
            status = jobs.main(kind, arguments)
        return subprocess.CompletedProcess(command, status, written.getvalue(), "")

    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(run=child))
    monkeypatch.setattr(jobs.psutil, "cpu_percent", lambda interval: 0.0)
    out = tmp_path / "result.json"
    flags = "--modes outcore --resident 0 --max-tokens 2 --prompt-tokens 4 --repeats 2 --json"
    assert main(["bench", str(tiny), *flags.split(), "--output", str(out)]) == 0
    assert asked == ["row", "disk", "row", "disk"]
    printed = capsys.readouterr()
    assert max(len(line) for line in printed.err.splitlines() if line.startswith("outcore, ")) <= 100
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text() and str(tiny.parent) not in out.read_text()
    read = read_record(out, {SCHEMA: Document.of})
    assert read.command == f"outcore bench tiny-llama {flags} --output result.json"
    assert (read.model.name, read.model.layers, read.model.model_type) == ("tiny-llama", 4, "llama")
    resident, streamed = read.rows
    assert (resident.setting.streamed_units, streamed.setting.streamed_units) == (0, 4)
    assert (
        streamed.reading.disk_gbps is not None
        and streamed.ceiling.efficiency is not None
        and streamed.ceiling.compute_s is not None
    )
    assert streamed.tokens == resident.tokens
    assert read.disk["gbps"] > 0 and len(read.disk["measurements"]) == 2
