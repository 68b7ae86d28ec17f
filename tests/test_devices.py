"""The paper's devices: what plans assume of them, and what its own system does there."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from outcore.errors import UsageError
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize
from outcore.plan.planner import make_plan
from outcore_bench.plan import DEVICES, device

IPAD, IPHONE, MAC = "ipad-air-m3", "iphone-15-pro-max", "mac-studio-m2-ultra"


def test_an_unknown_device_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError) as error:
        device("ipad-air-m4")
    assert all(name in str(error.value) for name in ("ipad-air-m4", IPAD, IPHONE, MAC))


def test_devices_are_those_of_the_published_tables() -> None:
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    assert [d.name for d in DEVICES] == [d["name"] for d in json.loads(text)["devices"]]
    assert device(IPAD).memory_bytes == 8 * 2**30 and device(IPAD).ssd_gbps == 2.0


def test_published_rows_are_those_of_the_device_and_say_which_thrash() -> None:
    rows = {name: device(name).published() for name in (IPAD, IPHONE, MAC)}
    assert {name: sorted({r.table for r in of}) for name, of in rows.items()} == {
        IPAD: [7, 8, 9], IPHONE: [7, 9], MAC: [4],
    }  # fmt: skip
    swaps = [(r.table, name, r.resident) for name, of in rows.items() for r in of if name in r.swaps]
    assert swaps == [(8, IPAD, 24), (7, IPHONE, 20)]


@pytest.mark.parametrize(
    ("name", "gbps", "low", "high"), [(IPAD, 100, 0.8, 0.87), (IPHONE, 50, 0.84, 0.9), (MAC, 800, 0.5, 0.8)]
)
def test_compute_is_what_their_resident_models_get_of_the_memory_bandwidth(
    name: str, gbps: float, low: float, high: float
) -> None:
    d = device(name)
    calibration = d.calibration()
    assert calibration.weight_gbps is not None and low < calibration.weight_gbps / gbps < high
    assert calibration.read_gbps == d.ssd_gbps and not calibration.measured


def test_every_device_says_what_a_process_may_use_and_why() -> None:
    for d in DEVICES:
        assert 0.4 * d.memory_bytes < d.usable_bytes < 0.9 * d.memory_bytes
        assert "memory" in d.usable_source


def test_a_plan_of_ours_on_a_device_is_bound_by_its_disk() -> None:
    d = device(IPAD)
    layer = LayerSize(resident=168_000_000, slot=168_000_000, read=168_000_000)
    size = ModelSize(
        (layer,) * 32, non_layer=1_500_000_000, cache=10_000_000, token=100_000, hidden=10_000, score=100, window=0,
        state=0, logits=1_000_000, context=512, prompt=64,
    )  # fmt: skip
    streamed = make_plan(size, d.usable_bytes, resident=8, calibration=d.calibration())
    assert streamed.token_s == pytest.approx(24 * 168e6 / 2.0e9, rel=0.1) and not streamed.calibrated
    theirs = next(r for r in d.published() if (r.table, r.resident) == (7, 8))
    assert 1 / streamed.token_s > theirs.tps[IPAD]
