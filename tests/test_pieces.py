"""What a layer takes more in pieces: measured, kept, and left out where others would be measured instead."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import zoo
from outcore.calibration import pieces
from outcore.calibration.calibration_file import load_calibration, merge, store_calibration
from outcore.calibration.pieces import part_seconds
from outcore.calibration.random_model import rig
from outcore.loading.preparation import Preparation, prepare
from outcore.machine.neighbours import BUSY, Neighbours
from outcore.plan.machine_profile import Calibration


def others(load: float) -> Neighbours:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return Neighbours(lambda: load * now[0], lambda: 0.0, clock, cores=1)


def found(prepared: Preparation, load: float = 0.0) -> dict[str, float]:
    with rig(prepared.profile, 1) as made:
        classes = [type(m) for m in prepared.profile.lazy.model.modules()]
        seconds = part_seconds(made, 0.0, neighbours=others(load))
        assert [type(m) for m in prepared.profile.lazy.model.modules()] == classes, "left as it was"
    return seconds


def test_what_each_piece_costs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(zoo.save_checkpoint("qwen3_5", tmp_path / "m"))
    kinds = {layer.kind for layer in prepared.profile.size.layers}
    plain = found(prepared)
    assert plain.keys() == kinds and all(s > 0 for s in plain.values())
    arrays_in = pieces.arrays_in

    def slowly(out: Any) -> Any:
        time.sleep(0.005)
        return arrays_in(out)

    monkeypatch.setattr(pieces, "arrays_in", slowly)
    slow = found(prepared)
    assert all(slow[kind] - plain[kind] > 0.003 for kind in kinds)


def test_beside_others_nothing_is_said(tmp_path: Path) -> None:
    prepared = prepare(zoo.save_checkpoint("llama", tmp_path / "m"))
    assert found(prepared, load=2 * BUSY) == {}
    whole = prepare(zoo.save_checkpoint("mamba", tmp_path / "mamba"))
    assert found(whole) == {}, "its layers are one piece each"


def test_it_is_kept_with_the_kinds_of_layers(tmp_path: Path) -> None:
    one = Calibration(kinds={"a": {1: 0.1}}, parts={"a": 0.002}, measured=True)
    store_calibration(tmp_path, 2, one)
    more = merge(one, {"b": {1: 0.2}}, None, {"b": 0.003})
    assert more.parts == {"a": 0.002, "b": 0.003} and more.part_s("b") == 0.003 and more.part_s("c") == 0.0
    assert merge(more, {"a": {1: 0.1}}).parts == {"b": 0.003}, "measured again, without them"
    store_calibration(tmp_path, 2, Calibration(kinds={"b": {1: 0.2}}, parts={"b": 0.003}, measured=True))
    kept, _ = load_calibration(tmp_path, 2)
    assert kept is not None and kept.parts == {"a": 0.002, "b": 0.003}
