"""What was measured beside other programs is measured again, unasked, when they are still."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import zoo
from outcore.calibration import calibrate as calibrating
from outcore.calibration import compute
from outcore.calibration.calibrate import calibrated, kinds_of, measure_kinds
from outcore.calibration.calibration_file import load_calibration, store_calibration
from outcore.calibration.compute import LayerTimes
from outcore.calibration.renewal import REST_S, Brief, due, is_quiet, quieter
from outcore.errors import ReadError
from outcore.loading import loader, renewal
from outcore.loading.loader import load_model
from outcore.loading.preparation import prepare
from outcore.machine.neighbours import BUSY, Neighbours
from outcore.plan.certainty import unsure
from outcore.plan.machine_profile import Calibration, Conditions

QUIET, BUSILY = 0.01, 0.6
AT = 1.9e9


def machine(disk: float | None, layers: float | None, at: float = AT) -> Calibration:
    """A calibration, by what others used of the cores meanwhile; None: nobody wrote it down."""
    return Calibration(
        read_gbps=2.0,
        kinds={"a": {1: 0.03}, "rest": {1: 0.01}},
        disk_conditions=None if disk is None else Conditions(at, disk, 0.1),
        kind_conditions={} if layers is None else {kind: Conditions(at, layers, 0.1) for kind in ("a", "rest")},
        product_s=0.02,
        measured=True,
    )


def others(load: float) -> Neighbours:
    """Others use this share of one core, for ever."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return Neighbours(lambda: load * now[0], lambda: 0.0, clock, cores=1)


def test_what_others_disturbed_is_unsure_and_so_is_what_nobody_wrote_down() -> None:
    assert unsure(machine(QUIET, QUIET), {"a", "rest"}) == ()
    assert unsure(machine(BUSILY, QUIET), {"a"}) == ("disk",)
    assert unsure(machine(QUIET, BUSY), {"a"}) == ("layers",)
    assert unsure(machine(None, None), {"a"}) == ("disk", "layers")
    assert unsure(machine(QUIET, None), {"unknown"}) == (), "what was never measured is no matter of doubt"


def test_it_is_due_where_others_are_still_and_have_been_for_a_while() -> None:
    busy = machine(BUSILY, BUSILY)
    asked: list[bool] = []

    def quiet() -> bool:
        asked.append(True)
        return True

    assert due(busy, {"a"}, quiet, AT + REST_S) == ("disk", "layers") and asked
    assert due(busy, {"a"}, lambda: False, AT + REST_S) == ()
    asked.clear()
    assert due(busy, {"a"}, quiet, AT + REST_S - 1) == (), "it was measured just now"
    assert due(machine(QUIET, QUIET), {"a"}, quiet, AT + REST_S) == ()
    assert not asked, "nobody waits for quiet where nothing is to be done"
    assert due(busy, {"a"}, quiet, AT - 86400) == ("disk", "layers"), "a clock that was set back"


def test_still_is_less_than_disturbs_a_measurement() -> None:
    waited: list[float] = []
    assert is_quiet(others(BUSY / 2), waited.append) and waited
    assert not is_quiet(others(BUSY), waited.append)
    assert not is_quiet(Neighbours(lambda: None), waited.append), "a system that does not say"


def test_of_two_measurements_the_quieter_one_is_kept() -> None:
    old = replace(machine(BUSILY, QUIET), io="cached")
    new = replace(machine(QUIET, BUSILY), read_gbps=3.0, kinds={"a": {1: 0.5}}, product_s=0.01)
    found = quieter(old, new)
    assert (found.read_gbps, found.io) == (3.0, "auto") and found.disk_conditions == new.disk_conditions
    assert found.kinds == old.kinds and found.kind_conditions == old.kind_conditions
    assert found.product_s == 0.01
    other = quieter(machine(BUSILY, BUSILY), replace(new, disk_conditions=Conditions(AT, 0.9, 0.0)))
    assert other.read_gbps == 2.0 and other.kinds == {"a": {1: 0.5}, "rest": {1: 0.01}}


def brief(known: Calibration, what: tuple[str, ...], rate: Callable[..., float], size: int = 10**9) -> Calibration:
    class File:
        def stat(self) -> Any:
            return type("Stat", (), {"st_size": size})()

    files: Any = [File()]
    times = LayerTimes({"a": {1: 0.02}}, Conditions(AT + 1, QUIET, 0.0))
    made = Brief(files, 2, 10**9, lambda: times, rate, lambda _: [0.2, 0.1], lambda: others(QUIET))
    return made.again(known, what)


def test_before_a_load_only_what_was_disturbed_is_measured_and_only_briefly() -> None:
    asked: list[dict[str, Any]] = []

    def rate(*_: Any, **how: Any) -> float:
        asked.append(how)
        return [2.5, 9.0, 3.0][len(asked) % 3]

    known = machine(BUSILY, BUSILY)
    found = brief(known, ("disk", "layers"), rate)
    assert found.read_gbps == 3.0 and unsure(found, {"a"}) == ()
    assert found.kinds == {"a": {1: 0.02}, "rest": {1: 0.01}} and found.product_s == 0.02
    assert sum(how["seconds"] for how in asked) < 3 and all(how["most_bytes"] == 10**9 for how in asked)
    asked.clear()
    assert brief(known, ("layers",), rate).read_gbps == 2.0 and not asked
    assert brief(known, ("disk",), rate).kinds == known.kinds

    def fails(*_: Any, **__: Any) -> float:
        raise ReadError("gone")

    assert brief(known, ("disk",), fails) == known
    assert brief(known, ("disk",), rate, size=10**6) == known, "too small to say anything of a disk"


def test_plans_measure_again_what_was_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    prepared = prepare(folder)
    kinds = kinds_of(prepared)
    how = Conditions(time.time() - 86400, BUSILY, 0.1)
    known = replace(
        machine(QUIET, None), kinds={kind: {1: 0.5} for kind in kinds}, kind_conditions=dict.fromkeys(kinds, how)
    )
    store_calibration(folder, prepared.cpu_streams, known)
    now = Conditions(time.time(), QUIET, 0.0)
    monkeypatch.setattr(
        calibrating, "measure_kinds", lambda *_, **__: LayerTimes({kind: {1: 0.25} for kind in kinds}, now)
    )
    notes: list[str] = []
    streams = prepared.cpu_streams
    same, measured = calibrated(prepared, folder, streams, quiet=lambda: False)
    assert measured == () and same.kinds[next(iter(kinds))] == {1: 0.5}
    found, measured = calibrated(prepared, folder, streams, note=notes.append, quiet=lambda: True)
    assert measured == ("layers",) and all(found.kinds[kind] == {1: 0.25} for kind in kinds)
    assert load_calibration(folder, streams)[0] == found, "kept for the next time"
    assert len(notes) == 1 and "others used 60 % of the cores" in notes[0] and "measured again" in notes[0]
    assert calibrated(prepared, folder, streams, quiet=lambda: True)[1] == ()


def test_a_load_measures_again_what_was_disturbed_says_so_and_stays_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "TOKENS", (1, 4))
    monkeypatch.setattr(compute, "PROMPT_TOKENS", (8,))
    monkeypatch.setattr(compute, "MOST_TURNS", 3)
    monkeypatch.setattr(renewal, "PROMPT_TOKENS", (8,))
    monkeypatch.setattr(compute, "Neighbours", lambda: others(QUIET))
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    prepared = prepare(folder, memory="1MB", least=True)
    budget, streams = prepared.plan.smallest_budget_bytes, prepared.cpu_streams
    kinds = kinds_of(prepared)
    how = Conditions(time.time() - 86400, BUSILY, 0.1)
    known = replace(
        machine(QUIET, None), kinds={kind: {1: 0.5} for kind in kinds}, kind_conditions=dict.fromkeys(kinds, how)
    )
    store_calibration(folder, streams, known)
    renew = renewal.renewed
    monkeypatch.setattr(loader, "renewed", partial(renew, quiet=lambda: False))
    model, _ = load_model(folder, memory=budget)
    assert not any("measured again" in note for note in model.outcore.notes)
    model.outcore.close()
    monkeypatch.setattr(loader, "renewed", partial(renew, quiet=lambda: True))
    del model
    notes: list[str] = []
    assert not measure_kinds(prepared, note=notes.append, most_bytes=1000).kinds and "only 1.00 KB are free" in notes[0]
    budget, began = 40_000_000, mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = load_model(folder, memory=budget, resident=0)
    assert mx.get_peak_memory() - began <= budget
    (note,) = [note for note in model.outcore.notes if "measured again" in note]
    assert "this model's layers had been measured while others used 60 % of the cores" in note
    model.outcore.close()
    found, _ = load_calibration(folder, streams)
    assert found is not None and all(found.kinds[kind][1] < 0.5 for kind in kinds)
