"""The largest slot: no plan asks for one that no array or Metal buffer can be, and no ring makes one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

import outcore
from fake_darwin_memory import FakeDarwin
from outcore.decode.preparation import prepare
from outcore.disk.ring import Slot
from outcore.errors import BudgetError
from outcore.machine import device
from outcore.machine.device import most_slot_bytes
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize, PieceSize, smallest_slot, unit_sizes
from outcore.plan.planner import make_plan
from outcore.sizes import ARRAY_BYTES, BLOCK, PAGE, most_unit, slot_bytes
from outcore_tools.doctor import WORKING_SET, device_limits

GB = 10**9
MOST = most_unit(ARRAY_BYTES)
PROMPT = "def read_lines(path):\n    "


def test_an_array_of_bytes_ends_below_two_to_the_31() -> None:
    assert mx.zeros((ARRAY_BYTES,), dtype=mx.uint8).shape == (2**31 - 1,)  # lazy: nothing is allocated
    with pytest.raises(OverflowError):
        mx.zeros((ARRAY_BYTES + 1,), dtype=mx.uint8)


def test_the_largest_unit_has_a_slot_within_the_limit_and_hardly_smaller() -> None:
    rng = random.Random(3)
    for limit in [0, 1, BLOCK, 2 * BLOCK, 4 * PAGE, 5 * PAGE, 6 * PAGE, ARRAY_BYTES, 2**31, 2**33] + [
        rng.randrange(1, 2 ** rng.randrange(10, 34)) for _ in range(500)
    ]:
        most = most_unit(limit)
        assert most == 0 or slot_bytes(most) <= limit
        assert limit < 3 * BLOCK or limit - most < 3 * PAGE
    assert MOST % PAGE == 0 and slot_bytes(MOST) < 2**31 < slot_bytes(MOST + PAGE) + PAGE


def test_a_mac_tells_its_largest_buffer() -> None:
    mac = FakeDarwin(info={"max_buffer_length": 10 * GB})
    with mac.here():
        set_bytes = mac.total * 2 // 3
        assert device_limits() == {"largest slot": ARRAY_BYTES, "largest buffer": 10 * GB, WORKING_SET: set_bytes}
        mac.info["max_buffer_length"] = GB
        mac.names["iogpu.wired_limit_mb"] = bytes(4)
        assert "wired limit" not in device_limits(), "0 stands for macOS's own"
        mac.names["iogpu.wired_limit_mb"] = (4096).to_bytes(4, sys.byteorder)
        assert most_slot_bytes() == GB and device_limits()["wired limit"] == 4 << 30
    if not mx.metal.is_available():
        assert device_limits() == {"largest slot": ARRAY_BYTES}


# Plans, by numbers


def large(*pieces: int, splittable: bool = True, most: int = MOST) -> LayerSize:
    total = sum(pieces)
    layer = LayerSize(
        resident=total, slot=total + len(pieces) * BLOCK, read=total, splittable=splittable, kind="large",
        pieces=tuple(PieceSize(n, n + BLOCK, n) for n in pieces),
    )  # fmt: skip
    return LayerSize(**{**vars(layer), "streamable": smallest_slot(layer) <= most})


def sized(*layers: LayerSize, most: int = MOST, head: LayerSize | None = None) -> ModelSize:
    return ModelSize(
        layers, non_layer=2 * GB, cache=20_000_000, token=100_000, hidden=8_000, score=64, window=0, state=0,
        logits=1_000_000, context=512, prompt=64, most_unit=most, head=head,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pieces", "limit"),
    [
        ((GB, GB, GB), ARRAY_BYTES),
        ((int(2.1 * GB),) * 2, ARRAY_BYTES),
        ((GB // 2,) * 80, ARRAY_BYTES),  # eighths of it are too large still
        ((300_000_000, 2 * GB, 100_000_000), ARRAY_BYTES),
        ((400_000_000,) * 4, GB),  # a buffer smaller than the layer
        ((400_000_000,) * 4, 450_000_000),
    ],
)
def test_a_layer_larger_than_a_slot_can_be_is_cut(pieces: tuple[int, ...], limit: int) -> None:
    most = most_unit(limit)
    head = LayerSize(resident=GB, slot=1_000_000, read=GB)
    size = sized(*[large(*pieces, most=most)] * 6, most=most, head=head)
    layer = size.layers[0]
    assert layer.streamable and max(unit_sizes(size.layers, most)) <= most < layer.slot
    with pytest.raises(BudgetError) as caught:
        make_plan(size, 1)
    assert caught.value.smallest is not None and "stay in memory" not in str(caught.value)
    for budget in (caught.value.smallest, caught.value.smallest + 3 * GB, 3 * layer.slot + 3 * GB, 5 * layer.slot):
        plan = make_plan(size, max(budget, caught.value.smallest))
        assert plan.streams and 0 < plan.unit_bytes <= most
        assert slot_bytes(plan.unit_bytes) <= limit and slot_bytes(plan.unit_bytes) < 2**31
        assert all(p.slot <= plan.unit_bytes for p in plan.parts)
    assert not make_plan(size, 10 * layer.slot).streams


def test_a_layer_that_cannot_be_cut_stays_and_a_budget_without_room_for_it_says_so() -> None:
    small = large(10**8, 10**8)
    for whole in (large(3 * GB, splittable=False), large(int(2.2 * GB), 10**8)):
        assert not whole.streamable
        size = sized(*[small] * 10, whole)
        with pytest.raises(BudgetError, match=r"1 of 11 layers stay in memory: .* hold 2\.14 GB at most") as caught:
            make_plan(size, 2 * GB)
        assert caught.value.smallest is not None and caught.value.smallest > whole.resident
        plan = make_plan(size, caught.value.smallest)
        assert 10 in plan.resident and plan.unit_bytes <= small.slot


def test_layers_that_fit_are_looked_at_as_ever() -> None:
    layers = [large(10**8, 10**8, 10**8), large(5 * 10**7, 10**8)]
    assert unit_sizes(layers, MOST) == unit_sizes(layers, 10**12)
    assert unit_sizes(layers, MOST)[0] == layers[0].slot


# Real models, on a device that makes small buffers


def small_buffers(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """This machine, with a largest buffer."""
    monkeypatch.setattr(device, "metal_info", lambda: {"max_buffer_length": limit})


def test_a_slot_that_cannot_be_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match=r"a slot of 2\.15 GB cannot be made"):
        Slot(MOST + 2 * PAGE)
    small_buffers(monkeypatch, 10**6)
    with pytest.raises(BudgetError, match=r"1\.00 MB at most"):
        Slot(10**6)
    assert len(Slot(most_unit(10**6)).payload) == most_unit(10**6)


def test_a_model_with_layers_larger_than_a_buffer_runs_in_parts(
    short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tokenizer = mlx_lm.load(str(short_model))
    expected = [r.token for r in mlx_lm.stream_generate(plain, tokenizer, PROMPT, max_tokens=4)]
    layer = max(prepare(short_model, memory="60MB").profile.size.layers, key=smallest_slot)
    limit = slot_bytes(smallest_slot(layer)) + BLOCK
    assert limit < layer.slot
    small_buffers(monkeypatch, limit)
    model, tokenizer = outcore.load(str(short_model), memory="60MB", resident=0, prompt=32, govern=False)
    with model.outcore as session:
        assert session.plan.streams and session.plan.split
        assert all(slot.array.nbytes <= limit for slot in session.streaming.ring.slots)
        assert [r.token for r in outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=4)] == expected


def test_a_model_with_pieces_larger_than_a_buffer_stays_in_memory_and_says_why(
    short_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buffers(monkeypatch, 100_000)
    found = prepare(short_model, memory="1GB").profile
    assert not any(layer.streamable for layer in found.size.layers) and {part.unit for part in found.parts} == {None}
    assert any("too large for a slot of this device (94.2 KB at most)" in note for note in found.notes)
    with pytest.raises(BudgetError, match="4 of 4 layers stay in memory"):
        outcore.load(str(short_model), memory="5MB")
