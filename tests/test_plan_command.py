"""``outcore plan``: what it says before anything is loaded, and the curve of speed against memory."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore.calibration.calibration_file import store_calibration
from outcore.cli.main import main
from outcore.cli.plan import _rising, about
from outcore.decode.preparation import prepare
from outcore.plan.joint_plan import Planning, computing_from, knee, speed_curve
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import resident_budget
from outcore_calibrate import disk_rate as disk
from outcore_calibrate import layer_times as calibrate_layers
from outcore_packs.full_copy import pack_model

MB = 1_000_000
MODEL = ModelSize(
    layers=(LayerSize(resident=100 * MB, slot=100 * MB, read=100 * MB, kind="layer"),) * 20,
    non_layer=50 * MB, cache=20 * MB, token=100_000, hidden=8_000, score=64, window=0, state=0, logits=MB,
    context=64, prompt=16, rest_kind="rest",
)  # fmt: skip


def machine(read_gbps: float, layer_s: float) -> Calibration:
    kinds = {"layer": {1: layer_s, 16: 4 * layer_s}, "rest": {1: layer_s}}
    return Calibration(read_gbps=2.0, kinds=kinds, measured=True)


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of few budgets."""
    monkeypatch.setattr("outcore.cli.plan.speed_curve", partial(speed_curve, points=5))


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any], str, str]:
    status = main(["plan", *args, "--json"])
    out, err = capsys.readouterr()
    # With --json what is told to people goes to standard error.
    return status, json.loads(out) if status == 0 else {}, err, err


def test_a_curve_goes_from_the_smallest_budget_to_everything_resident() -> None:
    plans = speed_curve(Planning(MODEL), machine(2.0, 0.001), points=9, also=[500 * MB, 1])
    budgets = [p.budget_bytes for p in plans]
    assert budgets == sorted(budgets) and 500 * MB in budgets and 1 not in budgets and len(plans) == 10
    assert plans[0].budget_bytes == plans[0].smallest_budget_bytes
    assert budgets[-1] == resident_budget(MODEL) and not plans[-1].streams
    assert all(b.token_s <= a.token_s for a, b in pairwise(plans))
    assert plans[-1].token_s == pytest.approx(21 * 0.001)


def test_the_disk_as_the_limit_means_that_time_is_bytes_over_rate() -> None:
    for p in speed_curve(Planning(MODEL), machine(2.0, 0.0001)):
        if p.streams:
            assert p.token_s == pytest.approx(p.bytes_per_token / 2e9, rel=0.05)


def test_more_memory_than_the_disk_needs_is_not_recommended() -> None:
    slow_compute = speed_curve(Planning(MODEL), machine(2.0, 0.2))
    best = knee(slow_compute, 10_000 * MB)
    assert best is not None and best.budget_bytes < 500 * MB, "computing is the limit at any residency"
    slow_disk = speed_curve(Planning(MODEL), machine(0.5, 0.0001))
    best = knee(slow_disk, 10_000 * MB)
    assert best is not None and not best.streams
    best = knee(slow_disk, 1_000 * MB)
    assert best is not None and best.budget_bytes <= 1_000 * MB
    assert knee(slow_disk, 10 * MB) is None


def test_computing_is_the_limit_where_more_memory_makes_nothing_faster() -> None:
    always = speed_curve(Planning(MODEL), machine(2.0, 0.2))
    assert computing_from(always) is always[0]
    assert computing_from(speed_curve(Planning(MODEL), machine(0.5, 0.0001))) is None
    later = speed_curve(Planning(MODEL), machine(2.0, 0.02))
    limited = computing_from(later)
    assert limited is not None and limited.streams and limited is not later[0]
    assert limited.token_s <= later[-1].token_s / 0.9 < later[0].token_s
    assert computing_from(always[:-1]) is None, "nobody knows how fast computing alone would be"


def test_a_plan_says_where_computing_is_the_limit(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(served), "--memory", "8MB", "--context", "64", "--draft", "none"]
    known(served, layer_s=0.1)
    _, record, out, _ = plan(capsys, *asked)
    assert "At every budget computing is the limit, not the disk: everything in memory gives" in out
    assert record["computing_limits_from_bytes"] == record["smallest_budget_bytes"]
    assert len(record["curve"]) > 5 and out.count(" of 6 ") <= 4, "rows that are all as fast say nothing"
    known(served, layer_s=0.00001)
    _, record, out, _ = plan(capsys, *asked)
    assert "computing is the limit" not in out and record["computing_limits_from_bytes"] is None
    assert out.count(" of 6 ") > 4


def test_a_named_draft_is_compared_where_everything_is_in_memory_too(
    served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known(served, layer_s=0.001)
    _, record, out, _ = plan(capsys, str(served), "--context", "64", "--draft", "ngram")
    assert record["streamed_units"] == 0 and [row["draft"] for row in record["drafts"]] == ["none", "ngram"]
    assert "  none: about" in out and "  ngram: about" in out


def test_what_is_printed_and_what_the_json_says(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, record, out, _ = plan(capsys, str(served), "--memory", "8MB", "--context", "64", "--no-calibrate")
    assert status == 0
    wanted = {"predicted_tps", "predicted_ttft_s", "predicted_peak_bytes", "smallest_budget_bytes", "resident_units"}
    wanted |= {"streamed_units", "slots", "bytes_per_token", "curve", "recommended_budget_bytes"}
    assert wanted <= record.keys()
    assert record["resident_units"] + record["streamed_units"] == 6
    assert sum(record["items"].values()) == record["predicted_peak_bytes"] <= 8_000_000
    assert {"budget_bytes", "tps"} <= record["curve"][0].keys()
    assert record["curve"][0]["budget_bytes"] == record["smallest_budget_bytes"]
    assert "← this plan" in out and "← recommended" in out and "tokens/s" in out
    assert not record["calibrated"] and any("assumptions" in note for note in record["notes"])
    prepared = prepare(served, memory="8MB", context=64, draft="auto")
    assert prepared.plan.peak_bytes == record["predicted_peak_bytes"]


def test_a_model_is_called_as_the_hub_calls_it_wherever_it_is_read_from(
    served: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "models--own--m" / "snapshots" / ("0123456789" * 4)
    shutil.copytree(served, folder)
    asked = (str(folder), "--memory", "20MB", "--context", "64", "--no-calibrate")
    for packed in (False, True):
        if packed:
            pack_model(folder, None)
        _, record, out, _ = plan(capsys, *asked)
        assert record["model"] == "own/m" and out.startswith("own/m with 20.0 MB")


def test_this_machine_is_measured_once(
    quick_models: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = quick_models(2)
    monkeypatch.setattr(calibrate_layers, "TOKENS", (1, 4))
    monkeypatch.setattr(calibrate_layers, "PAST_CACHES", 4 << 20)
    monkeypatch.setattr(disk, "POINT_S", 0.05)
    monkeypatch.setattr(disk, "RATE_S", 0.1)
    monkeypatch.setattr(disk, "SCRATCH_BYTES", 48 << 20)
    monkeypatch.setattr(disk, "LEAST_SCRATCH", 48 << 20)
    _, record, _, err = plan(capsys, str(served), "--memory", "8MB", "--context", "64")
    assert record["calibrated"] and not record["notes"]
    assert err.splitlines()[0].startswith("measuring this machine") and err.count("measuring this machine") == 1
    _, again, _, err = plan(capsys, str(served), "--memory", "8MB", "--context", "64", "--no-calibrate")
    assert again["predicted_tps"] == record["predicted_tps"] and "measuring" not in err
    # What was measured is what a load goes by.
    assert prepare(served, memory="8MB", context=64).plan.calibrated


def known(model: Path, layer_s: float = 0.002) -> None:
    """This machine was measured already."""
    prepared = prepare(model)
    kinds = {kind: {1: layer_s, 32: 15 * layer_s} for kind in prepared.profile.size.kinds}
    store_calibration(model, prepared.cpu_streams, Calibration(read_gbps=2.0, kinds=kinds, measured=True))


def test_a_plan_gives_a_range_beside_the_speed(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (str(served), "--memory", "8MB", "--context", "64", "--no-calibrate")
    widths = []
    for measured in (False, True):
        if measured:
            known(served)
        _, record, out, _ = plan(capsys, *args)
        low, high = record["predicted_tps_low"], record["predicted_tps_high"]
        assert low < record["predicted_tps"] < high and f"tokens/s ({about(low)} to {about(high)})" in out
        widths.append(high / low)
    assert widths == [pytest.approx(4.0), pytest.approx(1.25**2)]


def test_a_speed_is_reported_in_as_many_digits_as_are_known(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known(served)
    asked = (str(served), "--memory", "8MB", "--context", "64", "--prompt-tokens", "40", "--no-calibrate")
    _, record, out, _ = plan(capsys, *asked)
    first = f"Predicted: about {about(record['predicted_tps'])} tokens/s"
    assert first in out and "s to the first token if the prompt has 40 tokens" in out
    assert not re.search(r"\d\.\d{2} tokens/s|\d{3,}\.\d s", out)
    assert [about(n) for n in (22.554, 182.3, 0.5921, 1234)] == ["23", "180", "0.59", "1200"]
    assert main(["plan", *asked, "--quiet"]) == 0
    assert capsys.readouterr().out == out.splitlines()[0] + "\n"


def test_a_larger_budget_is_not_shown_with_fewer_layers(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are such: a larger slot, or a longer chunk of the prompt, may be worth more than a layer."""
    known(demo_model, layer_s=0.00001)
    prepared = prepare(demo_model, memory="45MB", context=2048, draft="none")
    plans = speed_curve(prepared.planning, prepared.calibration, points=16)
    layers = [len(p.resident) for p in plans]
    assert layers != sorted(layers), "as without"
    for p in plans:
        kept = _rising(plans, p)
        assert p in kept and [len(k.resident) for k in kept] == sorted(len(k.resident) for k in kept)
    _, _, out, _ = plan(
        capsys, str(demo_model), "--memory", "30MB", "--context", "2048", "--no-calibrate", "--draft", "none"
    )
    layers = [int(n) for n in re.findall(r"(\d+) of 16 layers", out)]
    assert len(layers) > 2 and layers == sorted(layers)


def test_generate_runs_by_the_plan_of_its_length(quick_models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(quick_models(4))
    words = ["generate", model, "-p", "def read", "-m", "3", "--memory", "9MB", "--json", "--ignore-chat-template"]
    assert main(words) == 0
    ran = json.loads(capsys.readouterr().out)
    tokens = ran["prompt_tokens"]
    length = ("--context", str(tokens + 3), "--prompt-tokens", str(tokens), "--no-calibrate")
    _, record, _, _ = plan(capsys, model, "--memory", "9MB", *length)
    assert 0 < ran["streamed_units"] == record["streamed_units"] and ran["slots"] == record["slots"]
    assert ran["planned_peak_bytes"] == record["predicted_peak_bytes"]


def test_how_fast_a_device_computes_is_not_assumed(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where everything is in memory that is all that counts, and devices differ by a factor of a thousand."""
    status, record, out, _ = plan(capsys, str(served), "--no-calibrate", "--memory", "1GB")
    assert status == 0 and not record["calibrated"] and record["streamed_units"] == 0
    first, *_, last = (line for line in out.splitlines() if "everything resident" in line or "Recommended" in line)
    assert "Speed unknown" in first and "tokens/s" not in first + last
    speeds = [record[f"predicted_{name}"] for name in ("tps", "ttft_s", "tps_low", "tps_high")]
    assert not any(speeds) and record["curve"][-1]["tps"] is None and record["curve"][-1]["ttft_s"] is None
    status, record, out, _ = plan(capsys, str(served), "--no-calibrate", "--memory", "1GB", "--resident", "0")
    assert status == 0 and record["streamed_units"] > 0 and "tokens/s" in out
    assert record["predicted_tps"] > 0 < record["predicted_ttft_s"]
    model, _ = outcore.load(str(served), memory="1GB")
    with model.outcore as session:
        assert "tokens/s" not in repr(session.plan)


def test_published_devices_are_predictions(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, record, out, _ = plan(capsys, "--device", "ipad-air-m3")
    assert status == 0 and "Published results on ipad-air-m3" in out and "thrashes" in out
    assert all(row["tps"] > 0 for row in record["published"])
    status, record, out, _ = plan(capsys, str(served), "--device", "iphone-15-pro-max", "--context", "64")
    assert status == 0 and record["device"] == "iphone-15-pro-max" and "Predicted, not measured" in out
    assert not record["calibrated"] and record["predicted_tps_low"] is None


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ([], 2, "no model: give --model NAME"),
        (["--device", "ipad-7"], 2, "mac-studio-m2-ultra, ipad-air-m3, iphone-15-pro-max"),
        (["MODEL", "--memory", "1MB", "--no-calibrate"], 1, "the smallest that works is"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    demo_model: Path, capsys: pytest.CaptureFixture[str], args: list[str], status: int, says: str
) -> None:
    args = [str(demo_model) if a == "MODEL" else a for a in args]
    args += ["--no-calibrate"] if args and "--no-calibrate" not in args else []
    got, _, _, err = plan(capsys, *args)
    assert got == status
    assert says in err and len(err.strip().splitlines()) == 1


PRIORITIES = [("speed", 512), ("balanced", 1024), ("context", 1500)]


@pytest.mark.parametrize(("name", "tokens"), PRIORITIES)
def test_priorities_reserve_context(served: Path, name: str, tokens: int) -> None:
    assert prepare(served, memory="100MB", context=1500, priority=name).plan.context == tokens
    assert prepare(served, memory="100MB", context=100, priority=name).plan.context == 100
