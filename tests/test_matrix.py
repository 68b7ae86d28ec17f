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
from outcore_bench import matrix_runner
from outcore_bench.disk import DiskRate
from outcore_bench.document import BUSY, BenchRow, Document, Stat
from outcore_bench.jobs import BenchJob, RunSettings
from outcore_bench.matrix import Cell, Grid, GridPoint, cells_of, choose_budgets, in_order, is_run, job_of, size_text
from outcore_bench.matrix_runner import DISK_EVERY_S, MatrixRunner
from outcore_bench.verdict import Fall, sentences, verdict
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


def test_a_resident_budget_is_one_run_and_what_does_not_fit_says_why(size: ModelSize) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    grid = Grid((least, most), ("direct", "cached"), slots=(2, 40), threads=(1, 4))
    cells = {c.point: c for c in cells_of(grid, {"direct": size, "cached": size})}
    assert [p for p in cells if p.memory == most] == [GridPoint(most)]
    streaming = [p for p in cells if p.memory == least]
    assert streaming == [GridPoint(least, *rest) for rest in product(("direct", "cached"), (2, 40), (1, 4))]
    assert {p.slots for p in streaming if cells[p].state == "unfit"} == {40}
    assert "the smallest that works is" in (cells[GridPoint(least, "direct", 40, 1)].unfit or "")


def test_every_point_has_a_file_of_its_own() -> None:
    points = [
        GridPoint(m, *rest)
        for m in (1_660_000_000, 1_663_214_592, 1_660_000_001)
        for rest in [*product(("direct", "cached"), (2, 3), (1, 11)), ("none", 0, 0)]
    ]
    names = [p.file for p in points]
    assert len(set(names)) == len(points) and all(is_run(n) for n in names)
    assert GridPoint(1_660_000_000, "direct", 3, 4).file == "1.66GB-direct-3-slots-4-threads.json"
    assert (size_text(1_663_214_592), GridPoint(5 * KB).file) == ("1663214592B", "5.00KB-resident.json")
    assert not is_run("matrix.json") and not is_run("notes-1.66GB-resident.json")


def test_the_order_is_shuffled_over_every_axis_and_always_the_same() -> None:
    points = [GridPoint(m, *rest) for m in (1, 2, 3, 4) for rest in product(("direct", "cached"), (2, 3), (1, 4))]
    order = in_order(points)
    assert order == in_order(points[::-1]) and sorted(order) == sorted(points)
    half = order[: len(order) // 2]
    for axis in ("memory", "io", "slots", "threads"):
        values = {getattr(p, axis) for p in points}
        share = {v: sum(getattr(p, axis) == v for p in half) / len(half) * len(values) for v in values}
        assert all(0.4 < s < 1.6 for s in share.values()), axis


def test_a_points_job_is_what_bench_would_be_told(tiny: Path) -> None:
    job = job_of(GridPoint(16_000_000, "cached", 4, 8), SETTINGS, str(tiny), 128)
    assert job.command("tiny").startswith("outcore bench tiny --modes outcore --memory 16.0MB --io cached ")
    assert job.command("tiny").endswith("--slots 4 --threads 8 --batch 1")
    resident = job_of(GridPoint(16_000_000), SETTINGS, str(tiny), 128).command("tiny")
    assert "--io auto" in resident and "--slots" not in resident and "--threads" not in resident


# The verdict


def stat(s: float, spread: float = 0.0) -> Stat:
    return Stat(s, s - spread, s + spread, 3)


def cell(tps: float, *point: Any, spread: float = 0.0) -> Cell:
    at = GridPoint(*point)
    row = {"mode": "outcore", "label": at.setting, "command": "", "io": at.io, "s_per_token": stat(1 / tps, spread)}
    row |= {"budget_bytes": at.memory, "peak_memory_bytes": at.memory, "memory": size_text(at.memory)}
    return Cell(at, BenchRow.of(row))


def noted(found: Cell, note: str) -> Cell:
    assert found.row is not None
    return replace(found, row=replace(found.row, notes=[note]))


def test_between_points_equally_fast_there_is_no_best_and_the_one_that_takes_least_is_named() -> None:
    found = verdict(
        [
            cell(10.0, 300, "direct", 4, 8),
            cell(9.9, 200, "direct", 4, 8),
            cell(9.85, 200, "direct", 3, 4),
            cell(9.88, 200, "cached", 2, 8),
            cell(9.7, 100, "direct", 2, 1),
        ]
    )
    assert found is not None
    assert found.best is None and found.start.point == GridPoint(200, "direct", 3, 4)
    assert [c.point for c in found.equals] == [
        GridPoint(200, "direct", 3, 4),
        GridPoint(200, "cached", 2, 8),
        GridPoint(200, "direct", 4, 8),
        GridPoint(300, "direct", 4, 8),
    ]
    assert [c.point.memory for c in found.by_budget] == [100, 200, 300]


def test_points_whose_repeats_overlap_are_equals_however_far_apart_their_medians() -> None:
    fast, slow, far = cell(10.0, 300, "direct", 2, 4, spread=0.01), cell(8.5, 200, "direct", 2, 4, spread=0.01), 100
    found = verdict([fast, slow, cell(8.0, far, "direct", 2, 4)])
    assert found is not None and found.best is None
    assert [c.point.memory for c in found.equals] == [200, 300]
    assert found.falls == (Fall("memory", 300, 100, pytest.approx(0.2)),)  # not at 200, which may be as fast
    assert found.start is fast  # what is looked along from is within 2 % all the same
    apart = verdict([cell(10.0, 300, "direct", 2, 4), slow, cell(8.0, far, "direct", 2, 4)])
    assert apart is not None and apart.best is not None and apart.best.point.memory == 300


def test_a_best_that_met_a_busy_machine_says_so() -> None:
    cells = [noted(cell(10.0, 300), f"{BUSY} 40 %"), cell(5.0, 200, "direct", 2, 4)]
    found = verdict(cells)
    assert found is not None
    best, streams, *_ = sentences(found, cells)
    assert best.endswith("; it met a busy machine: measure again") and "busy" not in streams


def test_speed_falls_off_at_the_first_value_in_each_direction() -> None:
    best = (300, "direct", 3, 4)
    found = verdict(
        [
            cell(10.0, *best),
            cell(9.5, 200, *best[1:]),
            cell(8.9, 100, *best[1:]),
            cell(5.0, 50, *best[1:]),
            cell(9.1, 300, "cached", 3, 4),
            cell(7.0, 300, "direct", 2, 4),
            Cell(GridPoint(300, "direct", 4, 4), unfit="too small"),
            cell(6.0, 300, "direct", 3, 1),
            cell(9.6, 300, "direct", 3, 8),
            Cell(GridPoint(300, "direct", 3, 2)),
            cell(1.0, 300, "cached", 2, 1),
        ]
    )
    assert found is not None and found.best is not None and found.best.point == GridPoint(*best)
    assert [replace(f, drop=round(f.drop, 6)) for f in found.falls] == [
        Fall("memory", 300, 100, 0.11),
        Fall("slots", 3, 2, 0.3),
        Fall("slots", 3, 4, 1.0, "too small"),
        Fall("threads", 4, 1, 0.4),
    ]


def test_where_everything_resident_is_best_reading_is_looked_at_from_the_best_that_streams() -> None:
    found = verdict(
        [
            cell(20.0, 300),
            cell(10.0, 200, "direct", 2, 4),
            cell(9.0, 200, "cached", 2, 4),
            cell(7.0, 200, "direct", 2, 1),
            cell(3.0, 100, "direct", 2, 4),
        ]
    )
    assert found is not None and found.streamed is not None and found.best is not None
    assert (found.best.point, found.streamed.point) == (GridPoint(300), GridPoint(200, "direct", 2, 4))
    assert [(f.axis, f.at, round(f.drop, 2)) for f in found.falls] == [("memory", 200, 0.5), ("threads", 1, 0.3)]


def test_axes_along_which_speed_holds_are_named_where_they_have_several_values() -> None:
    cells = [cell(10.0, 100, "direct", 2, 4), cell(9.9, 100, "direct", 2, 8), cell(5.0, 50, "direct", 2, 4)]
    found = verdict(cells)
    assert found is not None
    assert sentences(found, cells) == [
        "No best: 2 points are equally fast (within 2 %, or their repeats overlap); of the fastest this takes least: "
        "100 B, direct, 2 slots, 4 threads: 10 tok/s, 0.1 s a token, 100 B at most",
        "Falls off: from 100 B to 50 B, 50 % slower",
        "No fall of more than 10 % along: threads",
    ]


def test_nothing_measured_has_no_verdict() -> None:
    assert verdict([Cell(GridPoint(1)), Cell(GridPoint(2), unfit="too small")]) is None


# Running, and going on


class Bench:
    """Stands for the processes: seconds per token by point, and a clock that moves with every run."""

    def __init__(self, run_s: float = 10.0) -> None:
        self.jobs: list[BenchJob] = []
        self.disks: list[tuple[float, bool]] = []
        self.now = 0.0
        self.run_s = run_s
        self.stop_after: int | None = None
        self.error: str | None = None

    def row(self, job: BenchJob, files: Sequence[Path]) -> BenchRow:
        if len(self.jobs) == self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.now += self.run_s
        run, row = job.run, BenchRow("outcore", job.label, "", error=self.error)
        row.setting.memory, row.setting.io = job.memory, job.io if run.slots else "none"
        row.setting.cache = "warm" if job.io == "cached" and run.cache == "warm" else None
        row.speed.s_per_token = stat(1 / (run.slots or 9) / (run.threads or 1)) if self.error is None else None
        return row

    def disk(self, files: Sequence[Path], warm: bool) -> DiskRate:
        self.disks.append((self.now, warm))
        return DiskRate({"4": 2.0}, 2.0 + len(self.disks), {"4": [2.0]}, not warm)

    def runner(self, tiny: Path, output: Path, settings: RunSettings = SETTINGS, **options: Any) -> MatrixRunner:
        grid = options.pop("grid", Grid(io=("cached",), slots=(2, 3), threads=(1, 4)))
        return MatrixRunner(
            tiny,
            "tiny",
            grid,
            settings,
            output,
            "outcore matrix tiny",
            row=self.row,
            disk=self.disk,
            clock=lambda: self.now,
            **options,
        )


def runs(output: Path) -> list[str]:
    return sorted(f.name for f in output.iterdir() if is_run(f.name))


def test_a_matrix_that_is_cut_off_goes_on_where_it_stopped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    bench.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        bench.runner(tiny, tmp_path).run()
    assert len(runs(tmp_path)) == 3
    record = json.loads((tmp_path / "matrix.json").read_text())
    states = [p["state"] for p in record["points"]]
    assert states.count("measured") == 3 and states.count("missing") > 5
    bench.stop_after = None
    monkeypatch.setattr(matrix_runner, "last_resort", lambda: record["grid"]["memory"][2])  # less is free now
    again = bench.runner(tiny, tmp_path)
    assert again.reused == 3
    summary = again.run()
    labels = [(j.memory, j.label) for j in bench.jobs]
    assert len(set(labels)) == len(labels) == len(runs(tmp_path)) == len(summary.cells) - states.count("unfit")
    assert {c.state for c in summary.cells} <= {"measured", "unfit"}
    assert Bench().runner(tiny, tmp_path).run().record()["verdict"] == summary.record()["verdict"] is not None
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".")]


def test_a_broken_run_and_one_that_failed_are_measured_again(tiny: Path, tmp_path: Path) -> None:
    Bench().runner(tiny, tmp_path).run()
    broken, failed = runs(tmp_path)[:2]
    (tmp_path / broken).write_text((tmp_path / broken).read_text()[:-40])
    document = Document.read(tmp_path / failed)
    document.rows[0].error = "killed for memory"
    document.write(tmp_path / failed)
    bench = Bench()
    bench.runner(tiny, tmp_path).run()
    assert len(bench.jobs) == 2
    assert {Document.read(tmp_path / name).rows[0].error for name in runs(tmp_path)} == {None}


def test_runs_with_other_settings_or_of_another_machine_or_model_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bench().runner(tiny, tmp_path).run()
    kept = {name: (tmp_path / name).read_bytes() for name in runs(tmp_path)}
    with pytest.raises(UsageError, match=r"settings.repeats was 1, is 2.*--output.*--overwrite"):
        Bench().runner(tiny, tmp_path, replace(SETTINGS, repeats=2))
    # Of a grid that shares no point with the one before, too.
    with pytest.raises(UsageError, match=r"settings.repeats was 1, is 2"):
        elsewhere = Grid((1_234_567,), ("cached",))
        Bench().runner(tiny, tmp_path, replace(SETTINGS, repeats=2), grid=elsewhere)
    other = save_checkpoint("llama", tmp_path / "other" / "tiny-llama")
    with pytest.raises(UsageError, match=r"settings.identity"):
        Bench().runner(other, tmp_path)
    machine = matrix_runner.fingerprint.machine(tiny)
    changed = replace(machine, cores=99, versions=machine.versions | {"mlx": "0.1"}, git_changed_files=77)
    monkeypatch.setattr(matrix_runner.fingerprint, "machine", lambda _: changed)
    with pytest.raises(UsageError, match=r"machine.cores was \d+, is 99; machine.versions.mlx was .*, is 0.1\)"):
        Bench().runner(tiny, tmp_path)
    assert kept == {name: (tmp_path / name).read_bytes() for name in runs(tmp_path)}
    bench = Bench()
    bench.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        bench.runner(tiny, tmp_path, replace(SETTINGS, repeats=2), overwrite=True).run()
    assert len(runs(tmp_path)) == 1
    monkeypatch.setattr(matrix_runner.fingerprint, "machine", lambda _: replace(changed, git_changed_files=3))
    assert Bench().runner(tiny, tmp_path, replace(SETTINGS, repeats=2)).reused == 1


def test_more_values_on_an_axis_measure_only_what_is_new(tiny: Path, tmp_path: Path) -> None:
    Bench().runner(tiny, tmp_path).run()
    bench = Bench()
    bench.runner(tiny, tmp_path, grid=Grid(io=("cached",), slots=(2, 3), threads=(1, 2, 4))).run()
    assert bench.jobs and {j.run.threads for j in bench.jobs} == {2}


def test_the_disk_is_measured_again_when_the_last_look_is_old(tiny: Path, tmp_path: Path) -> None:
    bench = Bench(run_s=DISK_EVERY_S / 2 - 1)
    bench.runner(tiny, tmp_path, replace(SETTINGS, cache="warm")).run()
    streamed = [j for j in bench.jobs if j.run.slots]
    assert 1 < len(bench.disks) <= len(streamed) / 2 and all(warm for _, warm in bench.disks)
    assert all(b - a > DISK_EVERY_S for (a, _), (b, _) in pairwise(bench.disks))
    documents = [Document.read(tmp_path / name) for name in runs(tmp_path)]
    for document in documents:
        (row,) = document.rows
        measured = document.disk["measurements"]
        assert [m["best_gbps"] for m in measured] == ([] if row.setting.io == "none" else [row.reading.disk_gbps])
        assert all(0 <= m["age_s"] <= DISK_EVERY_S for m in measured)
    rates = json.loads((tmp_path / "matrix.json").read_text())["disk"]
    assert (rates["warm_least_gbps"], rates["warm_most_gbps"]) == (3.0, 2.0 + len(bench.disks))


def test_direct_is_left_out_where_the_file_system_refuses_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("this file system refuses direct reads")

    monkeypatch.setattr(matrix_runner, "FileReader", refuse)
    assert Bench().runner(tiny, tmp_path, grid=Grid()).summary.grid.io == ("cached",)
    with pytest.raises(UsageError, match="refuses direct reads"):
        Bench().runner(tiny, tmp_path, grid=Grid(io=("direct", "cached")))


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--io", "auto"], "--io auto: choose from direct, cached"),
        (["--io", ""], "--io: give at least one value"),
        (["--slots", "3,1"], "--slots 1: at least 2"),
        (["--threads", "0"], "--threads 0: at least 1"),
        (["--threads", "many"], "--threads many: give whole numbers, separated by commas"),
        (["--memory", "2GB,4"], "--memory 4: no unit"),
        (["--tokens", "0"], "--tokens 0: at least 1"),
        (["--output", __file__], f"--output {__file__}: not a folder"),
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
    assert main(command) == 0
    capsys.readouterr()
    folder = tmp_path / "tiny-llama-matrix"
    assert runs(folder) == sorted(
        [f"{size_text(least)}-cached-2-slots-2-threads.json", f"{size_text(most)}-resident.json"]
    )
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert "2 runs are there already" in printed.err
    text, last = printed.err.splitlines(), printed.out
    record = json.loads(last)
    assert record == json.loads((folder / "matrix.json").read_text())
    assert str(tmp_path) not in last and str(tiny.parent) not in last
    by_state = {p["state"]: p for p in record["points"]}
    assert set(by_state) == {"measured", "unfit"} and by_state["unfit"]["slots"] == 40
    streamed = next(p for p in record["points"] if p["io"] == "cached" and p["state"] == "measured")
    assert streamed["streamed_units"] == 4 and streamed["efficiency"] > 0 and streamed["disk_gbps"] > 0
    row = Document.read(folder / streamed["file"]).rows[0]
    assert (row.setting.slots, row.setting.threads, row.setting.cache) == (2, 2, "cold")
    assert any(line.startswith(("Best: ", "No best: ")) for line in text)
    assert any(line.startswith("Not run: 1 of 3 points do not fit") for line in text)


def test_when_nothing_fits_the_command_fails_and_says_why(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(tiny), "--memory", "1KB", "--io", "cached", "-o", str(tmp_path / "out")]) == 1
    assert "no point could be measured: 1.00 KB, cached, 2 slots, 1 thread: a budget of" in capsys.readouterr().err
