"""``outcore matrix``: points of a grid, runs that are gone on with, the verdict, and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.errors import BudgetError, UsageError
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import make_plan
from outcore.sizes import format_size
from outcore_bench import matrix as matrix_module
from outcore_bench import runner
from outcore_bench.disk import DiskRate
from outcore_bench.document import BUSY, BenchRow, Stat, write_record
from outcore_bench.jobs import BenchJob, RunSettings
from outcore_bench.matrix import Grid, MatrixRunner, choose_budgets, in_order, jobs_of, size_text
from outcore_bench.measure import measure
from outcore_bench.verdict import GridPoint, by_budget, equals, point, sentences, start
from zoo import save_checkpoint

SETTINGS = RunSettings(tokens=2, prompt_tokens=4, repeats=1, warmup=0)
KB = 1000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def size(tiny: Path) -> ModelSize:
    return prepare(tiny, context=SETTINGS.context, prompt=SETTINGS.prompt_tokens).profile.size


# The grid


def test_budgets_go_from_the_smallest_plan_to_everything_resident(size: ModelSize) -> None:
    budgets = choose_budgets(size, 2, available=10**10)
    assert len(budgets) == 5 and sorted(budgets) == list(budgets)
    smallest, largest = make_plan(size, budgets[0], slots=2), make_plan(size, budgets[-1])
    assert smallest.streams and not largest.streams
    with pytest.raises(BudgetError):
        make_plan(size, int(0.99 * budgets[0]), slots=2)
    steps = [b - a for a, b in pairwise(budgets)]
    assert max(steps) - min(steps) <= 10 * KB  # the last of three digits


def test_budgets_end_at_what_is_free_and_too_little_is_refused(size: ModelSize) -> None:
    budgets = choose_budgets(size, 2, available=10**10)
    free = (budgets[0] + budgets[-1]) // 2
    assert 0.98 * free < choose_budgets(size, 2, available=free)[-1] <= free
    with pytest.raises(BudgetError, match="are free"):
        choose_budgets(size, 2, available=budgets[0] - 1)


def points(grid: Grid, size: ModelSize) -> dict[str, str | None]:
    job = BenchJob("outcore", "tiny", "", SETTINGS, SETTINGS.context, 128)
    return {each.label: unfit for each, unfit in jobs_of(grid, dict.fromkeys(grid.io or (), size), job)}


def test_a_resident_budget_is_one_run_and_what_does_not_fit_says_why(size: ModelSize) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    found = points(Grid((least, most), ("direct", "cached"), slots=(2, 40), threads=(1, 4)), size)
    of_slots = {2: "2 slots", 40: "40 slots"}
    streaming = [
        f"{format_size(least)}, {io}, {of_slots[n]}, {threads}"
        for io, n, threads in product(("direct", "cached"), (2, 40), ("1 thread", "4 threads"))
    ]
    assert sorted(found) == sorted([*streaming, f"{format_size(most)}, all resident"])
    assert {label for label, unfit in found.items() if unfit} == {label for label in streaming if "40 slots" in label}
    assert "the smallest that works is" in (found[streaming[-1]] or "")


def test_budgets_are_told_to_the_byte_and_read_back() -> None:
    assert (size_text(1_660_000_000), size_text(1_663_214_592)) == ("1.66GB", "1663214592B")


def test_the_order_is_shuffled_over_every_axis_and_always_the_same() -> None:
    axes = [("1GB", "2GB"), ("direct", "cached"), (2, 3), (1, 4)]
    made = [
        BenchJob("outcore", "m", f"{m} {io} {s} {t}", replace(SETTINGS, slots=s, threads=t), 9, 128, memory=m, io=io)
        for m, io, s, t in product(*axes)  # type: ignore[call-overload]
    ]
    order = in_order(made)
    assert order == in_order(made[::-1]) and sorted(j.label for j in order) == sorted(j.label for j in made)
    half = order[: len(order) // 2]
    for values, of in zip(axes, ("memory", "io", "slots", "threads"), strict=True):
        found = [getattr(j, of, None) or getattr(j.run, of) for j in half]
        assert all(0.4 < found.count(v) / len(half) * len(values) < 1.6 for v in values), of


def test_a_points_job_is_what_bench_would_be_told(size: ModelSize) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    job = BenchJob("outcore", "tiny", "", SETTINGS, SETTINGS.context, 128)
    grid = Grid((least, most), ("cached",), slots=(4,), threads=(8,))
    streamed, resident = (each for each, _ in jobs_of(grid, {"cached": size}, job))
    assert (streamed.memory, streamed.io, streamed.run.slots, streamed.run.threads) == (
        size_text(least),
        "cached",
        4,
        8,
    )
    assert (resident.memory, resident.io, resident.run) == (size_text(most), "auto", SETTINGS)


# The verdict


def stat(s: float, spread: float = 0.0) -> Stat:
    return Stat(s, s - spread, s + spread, 3)


def cell(
    tps: float | None, memory: int, io: str = "none", slots: int = 0, threads: int = 0, spread: float = 0
) -> BenchRow:
    label = f"{memory} B, {GridPoint(memory, io if slots else '', slots, threads).setting}"
    row = {"mode": "outcore", "label": label, "command": "", "io": io, "slots": slots, "threads": threads}
    row |= {"peak_memory_bytes": memory, "memory": size_text(memory), "error": None if tps else "too small"}
    return BenchRow.of(row | {"s_per_token": stat(1 / tps, spread) if tps else None})


def test_between_points_equally_fast_there_is_no_best_and_the_one_that_takes_least_is_named() -> None:
    rows = [
        cell(10.0, 300, "direct", 4, 8),
        cell(9.9, 200, "direct", 4, 8),
        cell(9.85, 200, "direct", 3, 4),
        cell(9.88, 200, "cached", 2, 8),
        cell(9.7, 100, "direct", 2, 1),
    ]
    assert start(rows) is rows[2]
    assert equals(rows) == [rows[2], rows[3], rows[1], rows[0]]
    assert [point(r).memory for r in by_budget(rows)] == [100, 200, 300]


def test_points_whose_repeats_overlap_are_equals_however_far_apart_their_medians() -> None:
    fast, slow = cell(10.0, 300, "direct", 2, 4, spread=0.01), cell(8.5, 200, "direct", 2, 4, spread=0.01)
    far = cell(8.0, 100, "direct", 2, 4)
    assert equals([fast, slow, far]) == [slow, fast]
    assert start([fast, slow, far]) is fast  # what is looked along from is within 2 % all the same
    alone = cell(10.0, 300, "direct", 2, 4)
    assert equals([alone, slow, far]) == [alone]


def test_a_best_that_met_a_busy_machine_says_so() -> None:
    busy = replace(cell(10.0, 300), notes=[f"{BUSY} 40 %"])
    best, streams, *_ = sentences([busy, cell(5.0, 200, "direct", 2, 4)])
    assert best.endswith("; it met a busy machine: measure again") and "busy" not in streams


def test_where_everything_resident_is_best_the_best_that_streams_is_named_too() -> None:
    rows = [
        cell(20.0, 300),
        cell(10.0, 200, "direct", 2, 4),
        cell(9.0, 200, "cached", 2, 4),
        cell(7.0, 200, "direct", 2, 1),
        cell(3.0, 100, "direct", 2, 4),
    ]
    assert equals(rows) == rows[:1] and sentences(rows)[1].startswith("Best that streams: 200 B, direct, 2 slots")


def test_what_is_said_of_points_equally_fast() -> None:
    rows = [cell(10.0, 100, "direct", 2, 4), cell(9.9, 100, "direct", 2, 8), cell(5.0, 50, "direct", 2, 4)]
    assert sentences(rows) == [
        "No best: 2 points are equally fast (within 2 %, or their repeats overlap); of the fastest this takes least: "
        "100 B, direct, 2 slots, 4 threads: 10 tok/s, 0.1 s a token, 100 B at most",
    ]


def test_nothing_measured_has_no_verdict() -> None:
    rows = [cell(None, 2, "direct", 2, 4)]
    assert sentences(rows) == ["No numbers: 1 of 1 points; 2 B, direct, 2 slots, 4 threads: too small"]
    assert not equals(rows) and not by_budget(rows)


# Running, and going on


class Bench:
    """Stands for the processes: seconds per token by point."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[BenchJob] = []
        self.stop_after: int | None = None
        self.error: str | None = None
        monkeypatch.setattr(runner, "measure_row", self.row)
        monkeypatch.setattr(runner, "measure_disk", lambda _, warm: DiskRate({"4": 2.0}, 2.0, {"4": [2.0]}, not warm))

    def row(self, job: BenchJob, files: Sequence[Path]) -> BenchRow:
        if len(self.jobs) == self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        run, row = job.run, BenchRow("outcore", job.label, "", error=self.error)
        row.setting.memory, row.setting.io = job.memory, job.io if run.slots else "none"
        row.setting.slots, row.setting.threads = run.slots, run.threads
        row.speed.s_per_token = stat(1 / (run.slots or 9) / (run.threads or 1)) if self.error is None else None
        return row


GRID = Grid(io=("cached",), slots=(2, 3), threads=(1, 4))


def matrix(
    tiny: Path, folder: Path, settings: RunSettings = SETTINGS, grid: Grid = GRID, **options: Any
) -> MatrixRunner:
    return MatrixRunner(tiny, "tiny", grid, settings, folder / "m.json", "outcore matrix tiny", **options)


def test_a_matrix_that_is_cut_off_goes_on_where_it_stopped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    bench.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        matrix(tiny, tmp_path).run()
    record = json.loads((tmp_path / "m.json").read_text())
    assert sum(row["error"] is None for row in record["rows"]) == 3
    bench.stop_after = None
    monkeypatch.setattr(matrix_module, "last_resort", lambda: record["settings"]["grid"]["memory"][2])  # less is free
    again = matrix(tiny, tmp_path)
    assert again.reused == 3 and len(again.jobs) > 5
    rows = again.run().rows
    labels = [(j.memory, j.label) for j in bench.jobs]
    assert len(set(labels)) == len(labels) == sum(row.error is None for row in rows)
    last = matrix(tiny, tmp_path)
    assert not last.jobs and sentences(last.run().rows) == sentences(rows)
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["m.json"]


def test_a_run_that_failed_is_measured_again_and_a_broken_file_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    document = matrix(tiny, tmp_path).run()
    next(row for row in document.rows if row.error is None).error = "killed for memory"
    write_record(tmp_path / "m.json", document.record())
    bench.jobs.clear()
    assert "killed for memory" not in {row.error for row in matrix(tiny, tmp_path).run().rows} and len(bench.jobs) == 1
    (tmp_path / "m.json").write_text((tmp_path / "m.json").read_text()[:-40])
    with pytest.raises(UsageError, match=r"m\.json: cannot be read.*--output.*--overwrite"):
        matrix(tiny, tmp_path)


def test_runs_with_other_settings_or_of_another_machine_or_model_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    matrix(tiny, tmp_path).run()
    kept = (tmp_path / "m.json").read_bytes()
    with pytest.raises(UsageError, match=r"settings.repeats was 1, is 2.*--output.*--overwrite"):
        matrix(tiny, tmp_path, replace(SETTINGS, repeats=2))
    # Of a grid that shares no point with the one before, too.
    with pytest.raises(UsageError, match=r"settings.repeats was 1, is 2"):
        matrix(tiny, tmp_path, replace(SETTINGS, repeats=2), Grid((1_234_567,), ("cached",)))
    other = save_checkpoint("llama", tmp_path / "other" / "tiny-llama")
    with pytest.raises(UsageError, match=r"settings.identity"):
        matrix(other, tmp_path)
    machine = runner.fingerprint.machine(tiny)
    changed = replace(machine, cores=99, kernel="other", git_changed_files=77)
    monkeypatch.setattr(runner.fingerprint, "machine", lambda _: changed)
    with pytest.raises(UsageError, match=r"machine.cores was \d+, is 99; machine.kernel was .*, is other\)"):
        matrix(tiny, tmp_path)
    assert kept == (tmp_path / "m.json").read_bytes()
    bench.jobs.clear()
    bench.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        matrix(tiny, tmp_path, replace(SETTINGS, repeats=2), overwrite=True).run()
    monkeypatch.setattr(runner.fingerprint, "machine", lambda _: replace(changed, git_changed_files=3))
    assert matrix(tiny, tmp_path, replace(SETTINGS, repeats=2)).reused == 1


def test_more_values_on_an_axis_measure_only_what_is_new(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    rows = len(matrix(tiny, tmp_path).run().rows)
    bench.jobs.clear()
    assert len(matrix(tiny, tmp_path, grid=Grid(io=("cached",), slots=(2, 3), threads=(1, 2, 4))).run().rows) > rows
    assert bench.jobs and {j.run.threads for j in bench.jobs} == {2}


def test_direct_is_left_out_where_the_file_system_refuses_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("this file system refuses direct reads")

    monkeypatch.setattr(matrix_module, "FileReader", refuse)
    assert matrix(tiny, tmp_path, grid=Grid()).document.settings["grid"]["io"] == ("cached",)
    with pytest.raises(UsageError, match="refuses direct reads"):
        matrix(tiny, tmp_path, grid=Grid(io=("direct", "cached")))


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--io", "auto"], "--io auto: choose one of direct, cached"),
        (["--io", ""], "--io: give at least one value"),
        (["--slots", "3,1"], "--slots 1: at least 2"),
        (["--threads", "0"], "--threads 0: at least 1"),
        (["--threads", "many"], "--threads many: give whole numbers, separated by commas"),
        (["--memory", "2GB,4"], "--memory 4: no unit"),
        (["--tokens", "0"], "--tokens 0: at least 1"),
        (["--output", "."], "--output .: a folder; name a file"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tiny: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(tiny), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"outcore matrix: {message}")


def test_the_command_measures_resumes_and_ends_with_the_summary(
    tiny: Path, size: ModelSize, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    flags = f"--memory {size_text(least)},{size_text(most)} --io cached --slots 2,40 --threads 2 --tokens 2"
    command = ["matrix", str(tiny), *flags.split(), "--prompt-tokens", "4", "--repeats", "1", "--warmup", "0"]
    monkeypatch.chdir(tmp_path)
    # In this process: those of bench's rows are tested with its command.
    monkeypatch.setattr(runner, "measure_row", lambda job, _: measure(job))
    monkeypatch.setattr(runner, "measure_disk", lambda _, warm: DiskRate({"4": 2.0}, 2.0, {"4": [2.0]}, not warm))
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert "2 runs are there already" in printed.err
    text, record = printed.err.splitlines(), json.loads(printed.out)
    said = record.pop("verdict")
    assert record == json.loads((tmp_path / "tiny-llama-matrix.json").read_text())
    assert str(tmp_path) not in printed.out and str(tiny.parent) not in printed.out
    unfit, *rows = sorted(record["rows"], key=lambda row: row["error"] is None)
    assert "the smallest that works" in unfit["error"] and unfit["slots"] == 40
    resident, streamed = sorted(rows, key=lambda row: row["io"] != "none")
    assert (resident["io"], resident["streamed_units"]) == ("none", 0)
    assert streamed["streamed_units"] == 4 and streamed["efficiency"] > 0 and streamed["disk_gbps"] > 0
    assert (streamed["slots"], streamed["threads"], streamed["cache"]) == (2, 2, "cold")
    assert any(line.startswith(("Best: ", "No best: ")) for line in text) and set(said) <= set(text)
    assert any(line.startswith("No numbers: 1 of 3 points") for line in text)


def test_when_nothing_fits_the_command_fails_and_says_why(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(tiny), "--memory", "1KB", "--io", "cached", "-o", str(tmp_path / "out")]) == 1
    assert "no point could be measured: 1.00 KB, cached, 2 slots, 1 thread: a budget of" in capsys.readouterr().err
