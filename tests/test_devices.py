"""The paper's devices: their engine from two rows of each table, the cliff from memory alone, and what plans assume."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import pytest

from outcore.errors import UsageError
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import make_plan
from outcore_bench import devices
from outcore_bench.devices import (
    DEVICES,
    ComparedRow,
    PublishedRow,
    TheirEngine,
    calibration_rows,
    device,
    mean_error,
    published_comparison,
    sweeps,
)

IPAD, IPHONE, MAC = "ipad-air-m3", "iphone-15-pro-max", "mac-studio-m2-ultra"


def compared(table: int, name: str) -> list[ComparedRow]:
    return [r for r in published_comparison() if (r.table, r.device) == (table, name)]


def rows_of(engine: TheirEngine, *residents: int) -> list[PublishedRow]:
    return [PublishedRow(n, 1 / engine.seconds(n), engine.base_bytes + n * engine.layer_bytes) for n in residents]


def test_an_unknown_device_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError) as error:
        device("ipad-air-m4")
    assert all(name in str(error.value) for name in ("ipad-air-m4", IPAD, IPHONE, MAC))


def test_devices_are_those_of_the_published_tables() -> None:
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    assert [d.name for d in DEVICES] == [d["name"] for d in json.loads(text)["devices"]]
    assert device(IPAD).memory_bytes == 8 * 2**30 and device(IPAD).ssd_gbps == 2.0


def test_two_rows_of_each_table_predict_the_others_within_a_tenth_on_average() -> None:
    judged = [r for r in published_comparison() if r.judged]
    assert len(judged) == 19
    error = mean_error(judged)
    assert error is not None and error < 0.10
    streamed = mean_error([r for r in judged if r.streamed])
    assert streamed is not None and streamed < 0.06


@pytest.mark.parametrize(
    ("table", "name", "most"),
    # The one judged row of table 8 says 2 of 32 layers resident, and memory for 23.
    [(4, MAC, 0.03), (7, IPAD, 0.04), (7, IPHONE, 0.03), (8, IPAD, 0.12), (9, IPAD, 0.10), (9, IPHONE, 0.10)],
)
def test_each_table_of_streaming_is_predicted(table: int, name: str, most: float) -> None:
    error = mean_error([r for r in compared(table, name) if r.streamed])
    assert error is not None and error < most


def test_two_rows_of_each_table_are_fitted_exactly_and_not_judged() -> None:
    for sweep in sweeps():
        rows = compared(sweep.table, sweep.device.name)
        used = [r for r in rows if r.used_for_calibration]
        assert len(used) == 2 and not any(r.judged or r.thrashing_published for r in used)
        assert [r.error for r in used] == pytest.approx([0, 0], abs=1e-9)
        candidates = [r.resident for r in rows if r.streaming and r.streamed and not r.thrashing_published]
        assert [r.resident for r in used] == [min(candidates), max(candidates)]


def test_both_thrashing_rows_and_no_others_are_above_the_cliff() -> None:
    flagged = [(r.table, r.device, r.resident) for r in published_comparison() if r.above_cliff_predicted]
    assert flagged == [(7, IPHONE, 20), (8, IPAD, 24)]
    assert flagged == [(r.table, r.device, r.resident) for r in published_comparison() if r.thrashing_published]


def test_the_cliff_follows_from_memory() -> None:
    sweep = next(s for s in sweeps() if (s.table, s.device.name) == (7, IPAD))
    engine, usable = sweep.engine(), sweep.device.usable_bytes
    assert engine.needed_bytes(0) == pytest.approx(1.78e9 + 150e6)
    assert not engine.above_cliff(20, usable) and engine.above_cliff(20, usable // 2)
    assert engine.above_cliff(20, usable, kv_bytes=1e9)
    most = max(n for n in range(33) if not engine.above_cliff(n, usable))
    assert engine.needed_bytes(most) <= usable < engine.needed_bytes(most + 1)


def test_a_note_about_one_device_says_nothing_about_the_other() -> None:
    thrashing = {s.device.name: [r.resident for r in s.rows if r.thrashing] for s in sweeps() if s.table == 7}
    assert thrashing == {IPAD: [], IPHONE: [20]}


def test_a_row_without_streaming_is_their_model_without_streaming() -> None:
    row = next(r for r in compared(4, MAC) if r.resident == 32)
    assert not row.streaming and row.judged
    assert row.predicted_tps == 67.3 and row.published_tps == 68.3


def test_an_engine_is_found_again_from_two_of_its_rows() -> None:
    d = device(IPAD)
    layer = d.file_cache_bytes / 10
    made = TheirEngine(32, 0.05, 0.01, d.ssd_gbps, d.file_cache_bytes, layer, 4e8)
    found = TheirEngine.fit(rows_of(made, 0, 28), 32, d)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(made))
    # Ten layers come from memory, the others from the disk.
    per_layer = [found.seconds(n) - found.seconds(n + 1) for n in range(32)]
    assert per_layer[:22] == pytest.approx([0.01 + layer / 2e9] * 22)
    assert per_layer[22:] == pytest.approx([0.01] * 10)


def test_reads_never_take_longer_than_the_rows_differ() -> None:
    d = device(IPAD)
    made = TheirEngine(32, 0.05, 0.0, 4 * d.ssd_gbps, d.file_cache_bytes, d.file_cache_bytes / 4, 4e8)
    found = TheirEngine.fit(rows_of(made, 0, 20), 32, d)
    assert found.layer_s == 0 and found.read_gbps == pytest.approx(4 * d.ssd_gbps)
    backwards = TheirEngine.fit([PublishedRow(0, 2.0, 1e9), PublishedRow(20, 1.0, 5e9)], 32, d)
    assert backwards.seconds(0) == backwards.seconds(20) == 1.0


def test_thrashing_and_plain_rows_are_not_fitted_to() -> None:
    rows = [
        PublishedRow(0, 1.0, 1e9, thrashing=True),
        PublishedRow(4, 2.0, 2e9),
        PublishedRow(8, 3.0, 3e9),
        PublishedRow(16, 4.0, 5e9, streaming=False),
        PublishedRow(32, 9.0, 9e9),
    ]
    assert calibration_rows(rows, 32) == (rows[1], rows[2])
    with pytest.raises(UsageError, match="two residencies"):
        calibration_rows(rows[2:], 32)


@pytest.mark.parametrize(("name", "low", "high"), [(IPAD, 0.8, 0.87), (IPHONE, 0.84, 0.9), (MAC, 0.5, 0.8)])
def test_compute_is_what_their_resident_models_get_of_the_memory_bandwidth(name: str, low: float, high: float) -> None:
    d = device(name)
    assert low < d.efficiency < high
    calibration = d.calibration()
    assert calibration.read_gbps == d.ssd_gbps and not calibration.measured
    assert calibration.weight_gbps == pytest.approx(d.efficiency * d.memory_gbps)


def test_every_device_says_what_a_process_may_use_and_why() -> None:
    for d in DEVICES:
        assert 0.4 * d.memory_bytes < d.usable_bytes < 0.9 * d.memory_bytes
        assert "memory" in d.usable_source


def test_a_plan_of_ours_on_a_device_is_bound_by_its_disk() -> None:
    d = device(IPAD)
    layer = LayerSize(resident=168_000_000, slot=168_000_000, read=168_000_000)
    size = ModelSize((layer,) * 32, 1_500_000_000, 10_000_000, 100_000, 10_000, 100, 0, 0, 1_000_000, 512, 64)
    streamed = make_plan(size, d.usable_bytes, resident=8, calibration=d.calibration())
    assert streamed.token_s == pytest.approx(24 * 168e6 / 2.0e9, rel=0.1) and not streamed.calibrated
    theirs = next(s for s in sweeps() if (s.table, s.device) == (7, d)).engine()
    assert streamed.token_s < theirs.seconds(8)


def test_the_file_cache_is_found_from_the_small_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    share = devices.file_cache_share()
    assert 0.15 < share < 0.25
    # Rows that no engine is fitted to must not move it: only lowest and highest residency count.
    kept = tuple(dataclasses.replace(s, rows=calibration_rows(s.rows, s.layers)) for s in sweeps())
    monkeypatch.setattr(devices, "sweeps", lambda: kept)
    assert devices.file_cache_share.__wrapped__() == share
