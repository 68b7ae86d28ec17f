"""What runs show corrects what is foreseen: by how much, which runs count, and what is kept of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import zoo
from outcore.calibration import run_file
from outcore.calibration.calibration_file import load_calibration, store_calibration
from outcore.calibration.run_file import MODELS, corrected, keep_run, load_runs, runs_file
from outcore.decode.generate_step import generate_step
from outcore.disk.metrics import Metrics
from outcore.engine.sweep_log import SweepLog
from outcore.engine.transport import Solo
from outcore.loading.loader import load_model
from outcore.loading.preparation import model_key, prepare
from outcore.machine.cache_contents import contents
from outcore.machine.neighbours import BUSY, Neighbours
from outcore.plan.certainty import corrected_by
from outcore.plan.correction import (
    FIRST,
    LAST,
    LAYERS,
    LEAST_SWEEPS,
    MOST,
    PARTS,
    SEEN,
    KeptRun,
    Swept,
    attributed,
    corrections,
    kind_of,
    settled,
)
from outcore.plan.machine_profile import Calibration, Conditions, Correction
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import make_plan
from outcore.plan.prediction import predict, sweep_s, token_timing
from outcore.plan.simulate import Timing

MB = 1_000_000
MODEL = ModelSize(
    layers=(LayerSize(resident=100 * MB, slot=100 * MB, read=100 * MB, kind="layer"),) * 20,
    non_layer=50 * MB, cache=20 * MB, token=100_000, hidden=8_000, score=64, window=0, state=0, logits=MB,
    context=64, prompt=16, rest_kind="rest",
)  # fmt: skip
MACHINE = Calibration(read_gbps=2.0, kinds={"layer": {1: 0.02, 16: 0.08}, "rest": {1: 0.02}}, measured=True)


def run(at: float, ratio: float, load: float | None = 0.0, how: str = LAYERS) -> KeptRun:
    return KeptRun(at, how, 30, load, ratio, 1.0, ratio, ratio)


# What a run shows


@pytest.mark.parametrize("budget", [400 * MB, 900 * MB, 1800 * MB])
@pytest.mark.parametrize(
    ("compute", "read"), [(1.0, 1.3), (1.3, 1.0), (1.25, 1.25), (0.8, 1.0), (1.1, 0.8), (1.0, 1.0)]
)
@pytest.mark.parametrize("layer_s", [0.01, 0.05, 0.1])
def test_a_machine_that_is_slower_than_measured_is_found_by_its_runs(
    budget: int, compute: float, read: float, layer_s: float
) -> None:
    """And what is foreseen then is what the machine does, at that budget."""
    machine = replace(MACHINE, kinds={"layer": {1: layer_s, 16: 4 * layer_s}, "rest": {1: 0.02}})
    plan = make_plan(MODEL, budget, calibration=machine)
    truth = token_timing(MODEL, plan, machine.slower(compute, read))

    def foreseen(compute: float, read: float) -> Timing:
        return token_timing(MODEL, plan, machine.slower(compute, read))

    found = attributed(Swept(truth.sweep_s, truth.stall_s, truth.reading_s), foreseen)
    assert found != (None, None)
    again = foreseen(found[0] or 1.0, found[1] or 1.0)
    assert again.sweep_s == pytest.approx(truth.sweep_s, rel=0.02)
    if truth.stall_s < 0.01 * truth.sweep_s:
        assert found[1] is None and found[0] == pytest.approx(compute, rel=0.05), "nothing is said of the disk"
    if truth.stall_s > 0.8 * truth.sweep_s:
        assert found[0] is None and found[1] == pytest.approx(read, rel=0.05), "nothing is said of computing"


def test_no_run_is_believed_beyond_a_bound() -> None:
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)

    def foreseen(compute: float, read: float) -> Timing:
        return token_timing(MODEL, plan, MACHINE.slower(compute, read))

    for seen in (Swept(50.0, 49.0, 50.0), Swept(50.0, 1.0, 1.0), Swept(1e-4, 0.0, 1e-5)):
        found = attributed(seen, foreseen)
        assert all(1 / SEEN <= each <= SEEN for each in found if each is not None)


# What runs say together


def test_a_disturbed_run_that_nobody_noticed_changes_little_or_nothing() -> None:
    assert settled([]) == 1.0
    assert settled([1.1]) == pytest.approx(1.1**0.5) and settled([5.0]) == FIRST and settled([0.1]) == 1 / FIRST
    assert settled([1.04, 2.0]) == settled([2.0, 1.04]) == 1.04 and settled([0.97, 2.0]) == 1.0
    for place in range(4):
        values = [1.1, 1.1, 1.1, 1.1]
        values[place] = 2.0
        assert settled(values) == pytest.approx(1.1)
    assert settled([2.0] * 5) == MOST


def test_only_the_last_runs_since_the_machine_was_measured_count_that_nobody_disturbed() -> None:
    runs = [run(n, 1.2) for n in range(10)]
    assert corrections(runs, 20) == {}
    assert corrections(runs, 0)[LAYERS] == Correction(pytest.approx(1.2), pytest.approx(1.2), LAST)
    assert corrections(runs, 7.5)[LAYERS].runs == 2
    busy = [run(n, 3.0, load=BUSY) for n in range(20, 40)]
    assert corrections([*busy, *runs], 0) == corrections(runs, 0)
    assert corrections([run(1, 1.3, None, PARTS), run(2, 1.3, 0.0, PARTS)], 0).keys() == {PARTS}


def test_a_prediction_is_corrected_by_runs_of_its_kind_alone() -> None:
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)
    assert kind_of(plan) == LAYERS
    shown = replace(MACHINE, corrections={LAYERS: Correction(1.1, 1.2, 3), PARTS: Correction(2.0, 2.0, 3)})
    assert predict(MODEL, plan, shown).token_s == predict(MODEL, plan, MACHINE.slower(1.1, 1.2)).token_s
    assert predict(MODEL, plan, shown).ttft_s == predict(MODEL, plan, MACHINE.slower(1.0, 1.2)).ttft_s
    everything = make_plan(MODEL, 5000 * MB, calibration=MACHINE)
    assert kind_of(everything) is None
    assert predict(MODEL, everything, shown).token_s == everything.token_s


# What is kept


def test_runs_are_kept_a_few_of_each_kind_beside_the_calibration(tmp_path: Path) -> None:
    assert load_runs(tmp_path, 2, "a") == ()
    for n in range(3 * LAST):
        keep_run(tmp_path, 2, "a", run(n + 1, 1.1))
    keep_run(tmp_path, 2, "a", run(100, 2.5, load=0.8))
    keep_run(tmp_path, 2, "b", run(101, 1.4, how=PARTS))
    kept = load_runs(tmp_path, 2, "a")
    assert [r.at for r in kept] == [*range(2 * LAST + 1, 3 * LAST + 1), 100], "also what others disturbed, as such"
    assert load_runs(tmp_path, 2, "b") == (run(101, 1.4, how=PARTS),)
    assert load_runs(tmp_path, 1, "a") == (), "another number of streams is another calibration"
    store_calibration(tmp_path, 2, replace(MACHINE, corrections={LAYERS: Correction(9.0, 9.0, 9)}))
    found, why = load_calibration(tmp_path, 2)
    assert found == MACHINE and why is None, "what is kept of a machine is of no model"
    assert corrected(MACHINE, tmp_path, 2, "a", ["layer"]).corrections[LAYERS].runs == LAST
    newer = replace(MACHINE, disk_conditions=Conditions(1e9, 0.0, 0.0))
    assert corrected(newer, tmp_path, 2, "a", ["layer"]).corrections == {}


def test_only_so_many_models_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "MODELS", 3)
    assert MODELS > 3
    for n in range(5):
        keep_run(tmp_path, 2, f"m{n}", run(n + 1, 1.1))
    assert [bool(load_runs(tmp_path, 2, f"m{n}")) for n in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "change",
    [
        {"at": -1.0}, {"how": "else"}, {"sweeps": 0}, {"sweeps": "9"}, {"load": 1.5}, {"seconds": 0.0},
        {"compute": 0.0}, {"read": 1e9}, {"predicted_s": None}, {"compute": float("nan")}, {"seconds": float("inf")},
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    keep_run(tmp_path, 2, "a", run(1, 1.1))
    path = runs_file(tmp_path, 2)
    document = json.loads(path.read_text())
    document["models"]["a"] = [asdict(run(1, 1.1)) | change]
    path.write_text(json.dumps(document))
    assert load_runs(tmp_path, 2, "a") == ()
    keep_run(tmp_path, 2, "a", run(2, 1.2))
    assert load_runs(tmp_path, 2, "a") == (run(2, 1.2),)
    for text in ("", "[]", "{}", '{"format": "outcore-runs", "schema": 2, "models": {}}', "\x00", "[" * 100_000):
        path.write_text(text)
        assert load_runs(tmp_path, 2, "a") == ()


# From a run


def others(load: float) -> Neighbours:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return Neighbours(lambda: load * now[0], lambda: 0.0, clock, cores=1)


class Machine:
    """A streamed model's counters, without the model."""

    def __init__(self, plan: Any) -> None:
        self.now = 0.0
        self.metrics = Metrics(clock=lambda: self.now)
        self.plan, self.streaming, self.transport = plan, self, Solo()
        self.sweep_s: float | None = None
        self.sweep_tokens = 0

    def sweep(self, log: SweepLog, seconds: float, stall: float = 0.0, reading: float = 0.0, tokens: int = 1) -> None:
        log.begin()
        self.metrics.sweeps += 1
        self.now += seconds
        self.sweep_s, self.sweep_tokens = seconds, tokens
        self.metrics.stall_s += stall
        self.metrics.read_s += reading


def test_sweeps_for_single_tokens_by_the_first_plan_are_counted() -> None:
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)
    state: Any = Machine(plan)
    log = SweepLog(state, lambda: others(0.3))
    state.sweep(log, 99.0, tokens=16)
    for n in range(LEAST_SWEEPS):
        assert log.found() is None
        state.sweep(log, 9.0 if n == 3 else 1.0, stall=0.25, reading=0.75)
    state.sweep(log, 77.0, tokens=5)
    found = log.found()
    assert found == (Swept(1.0, 0.25, 0.75), pytest.approx(0.3))
    state.metrics.reset()
    state.sweep(log, 55.0, stall=0.5)
    state.plan = replace(plan, budget_bytes=1)
    for _ in range(3):
        state.sweep(log, 44.0)
    state.plan = plan
    state.sweep(log, 33.0)
    assert log.sweeps == LEAST_SWEEPS, "prompts, drafts, other plans, and counters that began anew"


def test_each_run_is_kept_and_corrects_the_next_plan(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    prepared = prepare(folder)
    kinds = {layer.kind: {1: 0.01} for layer in prepared.profile.size.layers} | {
        prepared.profile.size.rest_kind: {1: 0.001}
    }
    how = Conditions(1.0, 0.0, 0.0)
    machine = replace(MACHINE, kinds=kinds, disk_conditions=how, kind_conditions=dict.fromkeys(kinds, how))
    store_calibration(folder, prepared.cpu_streams, machine)
    options: dict[str, Any] = {"memory": "20MB", "resident": 0, "slots": 2, "draft": "none"}
    before = prepare(folder, **options).plan
    for _ in range(3):
        model, _ = load_model(folder, **options)
        assert len(list(generated(model, LEAST_SWEEPS + 4))) == LEAST_SWEEPS + 4
        model.outcore.close()
        model.outcore.close()
    runs = load_runs(folder, prepared.cpu_streams, model_key(prepared.profile, None))
    assert len(runs) == 3 and all(r.how == LAYERS and r.load in (0.0, None) for r in runs)
    assert all(0 < r.seconds < r.predicted_s and r.compute is not None and r.compute < 1 for r in runs)
    after = prepare(folder, **options).plan
    assert after.token_s < before.token_s * 0.9, "layers are computed much faster than was said"
    assert after.token_s > before.token_s / SEEN
    # A few tokens say nothing.
    model, _ = load_model(folder, **options)
    list(generated(model, 3))
    model.outcore.close()
    assert load_runs(folder, prepared.cpu_streams, model_key(prepared.profile, None)) == runs


def generated(model: Any, tokens: int) -> Any:
    session = model.outcore
    yield from generate_step(
        mx.array([1, 2, 3]), model, lambda: session.streaming, max_tokens=tokens, prefill_step_size=16
    )


def test_nothing_is_noted_where_nothing_was_measured(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    model, _ = load_model(folder, memory="20MB", resident=0, slots=2, draft="none")
    list(generated(model, LEAST_SWEEPS + 4))
    model.outcore.close()
    assert load_runs(folder, prepare(folder).cpu_streams, model_key(prepare(folder).profile, None)) == ()


def test_a_plan_says_what_runs_have_shown() -> None:
    plan = make_plan(MODEL, 900 * MB, calibration=MACHINE)
    assert corrected_by(plan, MACHINE) == []
    assert corrected_by(plan, replace(MACHINE, corrections={LAYERS: Correction(1.01, 0.99, 5)})) == []
    (line,) = corrected_by(plan, replace(MACHINE, corrections={LAYERS: Correction(1.1, 0.9, 3)}))
    assert "3 runs of this model" in line and "1.10 times" in line and "0.90 times" in line


def test_what_is_kept_of_runs_is_in_the_caches_list_and_can_be_removed(tmp_path: Path) -> None:
    keep_run(tmp_path, 2, "a", run(1, 1.1))
    (entry,) = [e for e in contents() if e.kind == "speeds of runs"]
    entry.remove()
    assert load_runs(tmp_path, 2, "a") == ()


def test_a_sweep_of_one_token_takes_what_a_plan_says_however_it_is_asked_for() -> None:
    shown = replace(MACHINE, corrections={LAYERS: Correction(1.1, 1.2, 3)})
    for budget in (400 * MB, 900 * MB, 1800 * MB, 5000 * MB):
        plan = make_plan(MODEL, budget, calibration=shown)
        assert sweep_s(MODEL, plan, shown, 1, blocks=True) == sweep_s(MODEL, plan, shown, 1, blocks=False)
        assert sweep_s(MODEL, plan, shown, 1, blocks=True) == pytest.approx(plan.token_s)
