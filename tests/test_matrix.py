"""``outcore matrix``: points of a grid, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.errors import BudgetError
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import make_plan, resident_budget
from outcore.sizes import format_size
from outcore_bench import bench as runner
from outcore_bench.bench import Grid, choose_budgets, jobs_of, size_text
from outcore_bench.disk import DiskRate
from outcore_bench.document import BUSY, BenchRow, Stat
from outcore_bench.jobs import BenchJob, RunSettings, failed
from outcore_bench.measure import measure
from outcore_bench.report.tables import by_budget, sentences, start
from zoo import save_checkpoint

SETTINGS = RunSettings(max_tokens=2, prompt_tokens=4, repeats=1)
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


def test_budgets_end_at_what_is_free(size: ModelSize) -> None:
    budgets = choose_budgets(size, 2, available=10**10)
    free = (budgets[0] + budgets[-1]) // 2
    assert free <= choose_budgets(size, 2, available=free)[-1] < 1.01 * free
    assert choose_budgets(size, 2, available=budgets[0] - 1) == budgets[:1]


def jobs(grid: Grid, size: ModelSize) -> list[BenchJob]:
    return jobs_of(grid, resident_budget(size), BenchJob("outcore", "tiny", "", SETTINGS, SETTINGS.context, 128))


def test_a_resident_budget_is_one_run(size: ModelSize) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    found = [job.label for job in jobs(Grid((least, most), ("direct", "cached"), slots=(2, 40)), size)]
    streaming = [
        f"{format_size(least)}, {io}, {slots}" for io, slots in product(("direct", "cached"), ("2 slots", "40 slots"))
    ]
    assert found == [*streaming, f"{format_size(most)}, all resident"]


def test_budgets_are_reported_to_the_byte_and_read_back() -> None:
    assert (size_text(1_660_000_000), size_text(1_663_214_592)) == ("1.66GB", "1663214592B")


def test_a_points_job_is_what_bench_would_be_given(size: ModelSize) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    streamed, resident = jobs(Grid((least, most), ("cached",), slots=(4,)), size)
    assert (streamed.memory, streamed.io, streamed.run.slots) == (size_text(least), "cached", 4)
    assert (resident.memory, resident.io, resident.run) == (size_text(most), "auto", SETTINGS)


# The verdict


def stat(s: float, spread: float = 0.0) -> Stat:
    return Stat(s, s - spread, s + spread, 3)


def cell(tps: float | None, memory: int, io: str = "none", slots: int = 0, spread: float = 0) -> BenchRow:
    label = f"{memory} B, {f'{io}, {slots} slots' if slots else 'all resident'}"
    row = {"mode": "outcore", "label": label, "command": "", "io": io, "slots": slots}
    row |= {"peak_memory_bytes": memory, "memory": size_text(memory), "error": None if tps else "too small"}
    return BenchRow.of(row | {"s_per_token": stat(1 / tps, spread) if tps else None})


def test_of_points_equally_fast_the_one_that_takes_least_is_named() -> None:
    rows = [
        cell(10.0, 300, "direct", 4),
        cell(9.9, 200, "direct", 4),
        cell(9.85, 200, "direct", 3),
        cell(9.88, 200, "cached", 4),
        cell(9.7, 100, "direct", 2),
    ]
    assert start(rows) is rows[2]
    assert [r.setting.memory for r in by_budget(rows)] == ["100B", "200B", "300B"]
    assert sentences(rows) == [
        "Best: 200 B, direct, 3 slots: 9.85 tokens/s, 0.102 s per token, peak 200 B; 4 more are as "
        "fast (within 2 %, or their repeats overlap)",
    ]


def test_points_with_overlapping_repeats_are_as_fast_however_far_apart_their_medians() -> None:
    fast, slow = cell(10.0, 300, "direct", 2, spread=0.01), cell(8.5, 200, "direct", 2, spread=0.01)
    far = cell(8.0, 100, "direct", 2)
    assert start([fast, slow, far]) is fast and sentences([fast, slow, far])[0].endswith(
        "; 1 more are as fast (within 2 %, or their repeats overlap)"
    )
    assert sentences([cell(10.0, 300, "direct", 2), slow, far])[0].endswith("peak 300 B")


def test_a_point_of_a_busy_machine_is_not_the_best() -> None:
    busy, quiet = replace(cell(10.0, 300), notes=[f"{BUSY} 40 %"]), cell(5.0, 200, "direct", 2)
    best, note = sentences([busy, quiet])
    assert (
        best.startswith("Best: 200 B")
        and note == "Note: 1 of 2 rows ran on a busy machine and do not count: measure again"
    )
    assert by_budget([busy]) == []


def test_nothing_measured_has_no_verdict() -> None:
    rows = [cell(None, 2, "direct", 2)]
    assert sentences(rows) == ["No numbers: 1 of 1 rows; 2 B, direct, 2 slots: too small"]
    assert not by_budget(rows)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--io", "auto"], "--io auto: choose one of direct, cached"),
        (["--io", ""], "--io: give at least one value"),
        (["--slots", "3,1"], "--slots 1: must be at least 2"),
        (["--slots", "many"], "--slots many: give whole numbers, separated by commas"),
        (["--memory", "2GB,4"], "--memory 4: no unit"),
        (["--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
        (["--output", "."], "--output .: a folder; name a file"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tiny: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(tiny), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"outcore matrix: {message}")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of bench's rows are tested with its command."""

    def row(job: BenchJob, _: object) -> BenchRow:
        try:
            return measure(job)
        except BudgetError as e:
            return failed(job, str(e))

    monkeypatch.setattr(runner, "measure_row", row)
    monkeypatch.setattr(runner, "measure_disk", lambda _: DiskRate({"4": 2.0}, 2.0, {"4": [2.0]}, True))


@pytest.mark.usefixtures("in_this_process")
def test_the_command_measures_and_ends_with_the_summary(
    tiny: Path, size: ModelSize, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    least, *_, most = choose_budgets(size, 2, available=10**10)
    flags = f"--memory {size_text(least)},{size_text(most)} --io cached --slots 2,40 --max-tokens 2"
    command = ["matrix", str(tiny), *flags.split(), "--prompt-tokens", "4", "--repeats", "1"]
    monkeypatch.chdir(tmp_path)

    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    text, record = printed.err.splitlines(), json.loads(printed.out)
    said = record.pop("verdict")
    assert record == json.loads((tmp_path / "tiny-llama-matrix.json").read_text())
    assert str(tmp_path) not in printed.out and str(tiny.parent) not in printed.out
    unfit, *rows = sorted(record["rows"], key=lambda row: row["error"] is None)
    assert "the smallest that works" in unfit["error"] and unfit["slots"] == 40
    resident, streamed = sorted(rows, key=lambda row: row["io"] != "none")
    assert (resident["io"], resident["streamed_units"]) == ("none", 0)
    assert streamed["streamed_units"] == 4 and streamed["efficiency"] > 0 and streamed["disk_gbps"] > 0
    assert (streamed["slots"], streamed["cache"]) == (2, "cold")
    assert said[0].startswith("Best: ") and said[1].startswith("No numbers: 1 of 3 rows") and set(said) <= set(text)
    assert main(command) == 2
    assert "tiny-llama-matrix.json: already exists; give another file" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


@pytest.mark.usefixtures("in_this_process")
def test_when_nothing_fits_the_command_fails_and_says_why(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["--memory", "1KB", "--io", "cached", "--slots", "2"]
    assert main(["matrix", str(tiny), *one, "-o", str(tmp_path / "out")]) == 1
    assert "nothing could be measured: 1.00 KB, cached, 2 slots: a budget of" in capsys.readouterr().err
