"""Packed copies whose codes lie in two planes: all bits for who needs them, and a draft, with nothing written twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest

import outcore
import zoo
from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.manifest import MANIFEST
from outcore.checkpoint.packed_store import open_packed
from outcore.decode.preparation import prepare
from outcore.errors import StoreError
from outcore_drafts.nested_layers import nested_modules
from outcore_packs.full_copy import pack_model
from outcore_packs.stored_planes import BITS, Planes, high_words, low_plane
from stand_ins import TokensOnly
from test_nested import IDS, expected, same

OPTIONS: dict[str, Any] = {"memory": "1GB", "context": 64, "prefill_step_size": 16, "govern": False}
CUTS = [(bits, high) for bits in BITS for high in range(1, bits)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTCORE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint(
        "qwen3", tmp_path_factory.mktemp("planes") / "model", quantize={"bits": 4, "group_size": 32}
    )


@pytest.fixture(scope="module")
def packed(original: Path) -> Path:
    return pack_model(original, original.parent / "packed", coding="planes:2").folder


@pytest.mark.parametrize(("bits", "high"), CUTS)
def test_words_come_back(bits: int, high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = mx.array(np.random.default_rng(bits).integers(0, 2**32, (37, 3 * bits), np.uint32))
    shape = tuple(words.shape)
    monkeypatch.setattr("outcore_packs.stored_planes.CUT_BYTES", 5 * 12 * bits)  # five rows at a time
    planes = Planes(shape, bits, high)
    stored = b"".join(planes.encoded(np.array(words)))
    assert len(stored) == np.prod(planes.stored_shape) == words.nbytes
    found = planes.decode(mx.array(np.frombuffer(stored, np.uint8)).reshape(planes.stored_shape))
    assert found.dtype == mx.uint32 and mx.array_equal(found, words).item()
    info = TensorInfo("w", Path("file"), "U32", shape, 4096, len(stored), ("U8", planes.stored_shape))
    for place, plane in zip(
        planes.places(info), (low_plane(words, bits, high), high_words(words, bits, high)), strict=True
    ):
        there = np.frombuffer(stored, "<u4", place.nbytes // 4, place.offset - 4096).reshape(place.shape)
        assert place.stored is None and place.dtype == "U32" and np.array_equal(there, np.array(plane))


def written(folder: Path) -> list[str]:
    """What is there of copies."""
    found = folder.iterdir() if folder.exists() else ()
    return sorted(p.name for p in found if p.name.startswith(("overlay-", "draft-", "full-")))


@pytest.mark.parametrize(
    ("model_type", "bits", "high"),
    [("qwen3", 8, 3), ("qwen3_5", 4, 3)],
)
def test_answers_are_the_same_bits(model_type: str, bits: int, high: int, tmp_path: Path, cache: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize={"bits": bits, "group_size": 32})
    store = pack_model(folder, tmp_path / "packed", coding=f"planes:{high}")
    assert {(c.coding, c.bits, c.high) for c in store.manifest.codings.values()} == {("planes", bits, high)}
    wanted = expected(folder, 4)
    # What MLX quantizes nothing to is no draft.
    drafts = ["none", *([f"self:{high}"] if high in BITS else []), "self:4" if bits == 8 else "ngram"]
    for draft, resident in zip(drafts, (2, 0, 2), strict=False):
        model, _ = outcore.load_model(tmp_path / "packed", draft=draft, resident=resident, **OPTIONS)
        with model.outcore as session:
            nested = any(nested_modules(model))
            assert session.plan.streamed and nested == draft.startswith("self")
            assert any(any(u.decoders) for u in session.streaming.layers.units)
            assert same(model, wanted)
    assert len(written(cache)) == (1 if bits == 8 else 0), "low bits, once more, where others than those draft"


def test_the_draft_and_what_is_read_are_the_copys_own(packed: Path, original: Path, cache: Path) -> None:
    wanted = expected(original, 4)
    low = {}
    for folder in (original, packed):
        model, _ = outcore.load_model(folder, draft="self:2", resident=0, **OPTIONS)
        with model.outcore as session:
            low[folder] = sum(f.nbytes for u in session.streaming.layers.units if u.rows is None for f in u.unit.fields)
            assert same(model, wanted)
        if folder == original:
            assert len(written(cache)) == 2, "an overlay of low bits, and a draft"
    assert low[original] == low[packed] and len(written(cache)) == 2
    own = [name for name in open_packed(packed / "draft-2bit").tensors if ".layers." in name]
    assert own and all(name.endswith(".scales") for name in own), "the high bits are in the model's own files"


def test_a_draft_is_given_up_in_the_middle(packed: Path, original: Path) -> None:
    wanted = expected(original, 8)
    model, _ = outcore.load_model(packed, draft="self:2", resident=1, **OPTIONS)
    with model.outcore as session:
        found = []
        for n, r in enumerate(outcore.stream_generate(model, TokensOnly(), IDS, max_tokens=8, prefill_step_size=16)):
            found.append(r)
            if n == 3:
                assert session.residency.layers.give_up_draft() > 0 and session.drafting.name == "ngram"
        assert [r.token for r in found] == [token for token, _ in wanted]
        assert all(mx.array_equal(r.logprobs, w).item() for r, (_, w) in zip(found, wanted, strict=True))
        assert same(model, wanted)


def test_what_is_cut_elsewhere_is_decoded_when_a_draft_is_given_up(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model", quantize={"bits": 4, "group_size": 32})
    model, config = mlx_lm.utils.load_model(folder, lazy=True)
    layer = model.layers[1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):  # too much of it has no more bits than the draft
        module = layer[name]
        whole = mx.dequantize(module.weight, module.scales, module.biases, 32, 4)
        linear = nn.Linear(whole.shape[1], whole.shape[0], bias=False)
        linear.weight = whole
        layer[name] = linear.to_quantized(32, 3)
        config["quantization"][f"model.layers.1.mlp.{name}"] = {"bits": 3, "group_size": 32}
    mx.eval(model.parameters())
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    wanted = expected(folder, 4)
    store = pack_model(folder, tmp_path / "packed", coding="planes:2")
    assert {(c.bits, c.high) for c in store.manifest.codings.values()} == {(4, 2), (3, 2)}
    model, _ = outcore.load_model(tmp_path / "packed", draft="self:3", resident=0, **OPTIONS)
    with model.outcore as session:
        assert same(model, wanted)
        assert session.residency.layers.give_up_draft() > 0
        decoders = [p.decoders for p in session.profile.parts]
        assert [sum(isinstance(d, Planes) for d in layer) for layer in decoders] == [0, 7, 0, 0]
        layer = session.profile.size.layers[1]
        assert layer.cast == 2 * layer.decoded > 0
        assert same(model, wanted)


def test_a_copy_in_the_cache_is_taken_where_its_bits_draft(original: Path, cache: Path, tmp_path: Path) -> None:
    copy = pack_model(original, None, coding="planes:2").folder
    before = written(cache)
    options = {key: value for key, value in OPTIONS.items() if key != "govern"}

    def folder_of(draft: str, **more: Any) -> Path:
        return prepare(original, draft=draft, resident=0, **options, **more).profile.lazy.checkpoint.folder

    assert folder_of("self:2") == copy
    assert folder_of("none") == folder_of("ngram") == folder_of("self:3") == original
    model, _ = outcore.load_model(original, draft="self:2", resident=0, **OPTIONS)
    with model.outcore:
        assert same(model, expected(original, 4))
    assert written(cache) == before
    mirror = tmp_path / "mirror"
    shutil.copytree(original, mirror)
    assert folder_of("self:2", mirror=mirror) == original


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: [change(coded) for coded in manifest["codings"].values()] and None


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no bits": _changed(lambda coded: coded.update(bits=0)),
    "all are high": _changed(lambda coded: coded.update(high=4)),
    "none is high": _changed(lambda coded: coded.update(high=0)),
    "bits that do not fit": _changed(lambda coded: coded.update(bits=7)),
    "rows of other lengths": _changed(lambda coded: coded.update(bits=5)),
    "another coding": _changed(lambda coded: coded.update(coding="split16")),
    "no coding that is known": lambda manifest: manifest.update(coding="planes:9"),
    "no weight": lambda manifest: manifest["codings"].update(
        {"model.layers.0.mlp.up_proj.scales": manifest["codings"].popitem()[1]}
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_lie_are_refused(lie: str, packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in packed.iterdir():
        if file.is_file():
            (copy / file.name).hardlink_to(file)
    manifest = json.loads((packed / MANIFEST).read_text())
    LIES[lie](manifest)
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="pack again"):
        open_packed(copy)


def test_what_has_no_codes_to_cut_is_refused(original: Path, tmp_path: Path, cache: Path) -> None:
    plain = zoo.save_checkpoint("qwen3", tmp_path / "plain")
    for folder, coding, why in ((plain, "planes:2", "not quantized"), (original, "planes:4", "of more than 4 bits")):
        for out in (tmp_path / "out", None):
            with pytest.raises(StoreError, match=f"can be packed.*{why}"):
                pack_model(folder, out, coding=coding)
    assert not (tmp_path / "out").exists() and not written(cache), "nor an empty folder"


def test_what_was_cut_elsewhere_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model", quantize={"bits": 8, "group_size": 32})
    out = tmp_path / "out"

    def cut_off(what: str, done: int, total: int) -> None:
        if what == "packing model.layers.2":
            raise KeyboardInterrupt

    for coding in ("planes:2", "plain", "planes:4"):
        with pytest.raises(KeyboardInterrupt):
            pack_model(folder, out, coding=coding, progress=cut_off)
    assert (out / "layer_0001.safetensors").exists() and not (out / MANIFEST).exists()
    store = pack_model(folder, out, coding="planes:3")
    assert {coded.high for coded in store.manifest.codings.values()} == {3}
