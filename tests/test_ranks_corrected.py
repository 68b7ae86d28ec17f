"""Runs over ranks correct what ranks foresee: each its own part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rank_work
import zoo
from outcore.cli.ranks_alone import SingleMachine
from outcore.cli.ranks_table import ranks_table
from outcore.engine.sweep_log import SweepLog
from outcore.plan.correction import LAYERS, LEAST_SWEEPS, SEEN, Swept
from outcore.plan.planner import make_plan, replan
from outcore.plan.rank_runs import attributed_to_rank, foreseen_of_rank
from outcore_cluster.ranks_plan import RanksPlan
from outcore_cluster.timing import LinkTimes
from rank_processes import RankProcesses
from test_correction import MACHINE, MB, MODEL, Machine, others
from test_ranks_plan import part


def test_each_run_corrects_what_all_ranks_foresee_next(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    found = two.run(rank_work.corrected, folder, tmp_path / "caches", 0.01, {"resident": 0, "slots": 2})
    for told in found:
        assert [r.sweeps > LEAST_SWEEPS for r in told["runs"]] == [True] * 3 and not told["alone"], (
            "kept as runs of a rank"
        )
        assert all(r.how == LAYERS and 0 < r.compute < 1 for r in told["runs"]), "computed faster than was said"
        first, then = told["first"], told["then"]
        assert first["calibrated"] and [p["runs"] for p in first["ranks"]] == [0, 0]
        assert [p["runs"] for p in then["ranks"]] == [3, 3]
        assert first["predicted_token_s"] / SEEN < then["predicted_token_s"] < 0.9 * first["predicted_token_s"]
    assert found[0]["then"] == found[1]["then"]


@pytest.mark.parametrize("layer_s", [0.01, 0.05, 0.1])
@pytest.mark.parametrize(("compute", "read"), [(1.0, 1.3), (1.3, 1.0), (0.8, 0.9), (1.0, 1.0)])
def test_a_rank_that_is_slower_than_measured_is_found_by_its_run(compute: float, read: float, layer_s: float) -> None:
    """Whatever it waits for others; a part that says nothing is left as it was."""
    plan = make_plan(MODEL, 400 * MB, calibration=MACHINE)
    plain = foreseen_of_rank(MODEL, plan, MACHINE, first=False)
    true = foreseen_of_rank(MODEL, plan, MACHINE.slower(compute, read), first=False)
    for stalled in (0.0, 0.2, 5.0):
        stall_s = stalled * true[0]
        seen = Swept(true[0] + stall_s, stall_s, true[1])
        computing, reading = attributed_to_rank(seen, *plain)
        assert (computing is None) == (stalled == 5.0) and (reading is None) == (stalled == 0.0)
        assert computing in (None, pytest.approx(compute)) and reading in (None, pytest.approx(read))


def test_sweeps_count_until_the_last_streamed_part_is_done() -> None:
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)
    plan = replan(MODEL, plan, range(12, 20), MACHINE)
    compute_s, read_s = foreseen_of_rank(MODEL, plan, MACHINE, first=True)
    each = MACHINE.sync_s + MACHINE.kinds["layer"][1]
    assert compute_s == pytest.approx(12 * each, rel=0.01) and read_s >= 12 * 100 * MB / 2e9


@pytest.mark.parametrize("late", [0, 1])
def test_others_that_are_late_are_no_part_of_a_sweep(late: int, two: RankProcesses, tmp_path: Path) -> None:
    """Whether they are waited for before the last streamed layer or behind it."""
    found = two.run(rank_work.while_others_are_late, zoo.save_checkpoint("llama", tmp_path / "m"), late)
    seconds = found[1 - late]
    assert len(seconds) >= 6 and min(seconds) > 0 and sorted(seconds)[3] < rank_work.LATE_S


def test_what_was_read_while_others_were_waited_for_counts() -> None:
    """A sweep's seconds are without that, and may be fewer than those of reading."""
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)
    state: Any = Machine(plan)
    state.link = "to others"
    log = SweepLog(state, lambda: others(0.0))
    for _ in range(LEAST_SWEEPS + 1):
        state.sweep(log, 1.0, stall=0.25, reading=1.75)
        state.now += 1.0
    log.begin()
    assert log.found() == (Swept(1.0, 0.25, 1.75), 0.0)


def test_the_table_of_ranks_says_which_runs_corrected_it() -> None:
    parts = [part([0]), part([1])]
    parts = [replace(parts[0], runs=3), parts[1], replace(parts[1], calibrated=False, runs=1)]
    table = ranks_table(RanksPlan(tuple(parts), 1.0, 1.0, 1, LinkTimes.same(3, 0.0), 1), [SingleMachine()] * 3)
    assert list(table.columns[-1].cells) == ["corrected by 3 runs", "", "not measured"]
