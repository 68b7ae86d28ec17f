"""Checkpoints of types that both libraries know, what mlx-vlm's models lack or spoil, and quantized ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import zoo
from outcore import CheckpointError, UnsupportedModelError, load_model
from outcore.checkpoint import lazy_model
from outcore.modules import mlx_lm_compat

BEFORE = "language_model."


class OtherNames(llama.Model):  # type: ignore[misc]
    """A library's model of a type that mlx-lm knows, whose weights have other names."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return super().sanitize({k.removeprefix(BEFORE): v for k, v in weights.items()})  # type: ignore[no-any-return]


@pytest.fixture
def other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(classes_of=lambda config: (OtherNames, llama.ModelArgs))
    for module in (lazy_model, mlx_lm_compat):
        monkeypatch.setattr(module, "modules", lambda group: {"other": package})


def logits(folder: Path) -> mx.array:
    model, _ = load_model(folder, draft="none", context=32, memory="1GB", resident=1)
    with model.outcore:
        found = model(mx.array([[3, 4, 5]]))
        mx.eval(found)
    return found


def renamed(folder: Path, before: str, gone: str = " ") -> Path:
    file = folder / "model.safetensors"
    weights = {before + k: v for k, v in mx.load(str(file)).items() if gone not in k}  # type: ignore[union-attr]
    mx.eval(weights)
    (folder / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(file), weights)
    return folder


def test_weights_with_a_packages_names_open_as_its_model(tmp_path: Path, other_library: None) -> None:
    expected = logits(zoo.save_checkpoint("llama", tmp_path / "theirs"))
    found = logits(renamed(zoo.save_checkpoint("llama", tmp_path / "other"), BEFORE))
    assert mx.array_equal(found, expected)


def test_what_neither_opens_is_told_as_mlx_lm_tells_it(tmp_path: Path, other_library: None) -> None:
    folder = renamed(zoo.save_checkpoint("llama", tmp_path / "broken"), "", gone="layers.1.mlp.up_proj")
    with pytest.raises(CheckpointError, match=r"Missing 1 parameters:.*layers\.1\.mlp\.up_proj"):
        logits(folder)


def made(kind: str, **more: Any) -> Any:
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_zoo
    from outcore_vision.text_model import text_classes

    model, arguments = text_classes(kind)
    return model(arguments.from_dict(vision_zoo.config_of(kind) | more))


def test_max_kv_size_bounds_models_without_caches_of_their_own() -> None:
    assert [type(c) for c in make_prompt_cache(made("llava"), 8)] == [RotatingKVCache] * 4
    assert len(make_prompt_cache(made("molmo"), 8)) == 4  # its class asks for layers where there are none
    assert {type(c) for c in make_prompt_cache(made("lfm2_vl"), 8)}.isdisjoint({RotatingKVCache})


def test_decoders_of_encoded_input_are_refused() -> None:
    """Florence 2 opened, and encoded each token anew; the other one failed in its trace."""
    layers = {"model_type": "florence2", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1}
    eyes = {"model_type": "davit", "depths": [1], "dim_embed": [64], "num_heads": [2], "num_groups": [2]}
    for kind, more in (
        ("florence2", {"text_config": layers, "vision_config": eyes, "projection_dim": 64}),
        ("nemotron_parse", {}),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"{kind}: needs all of its input encoded"):
            made(kind, **more)


def test_weights_that_keep_their_dtype_are_known_where_mlx_vlms_property_fails() -> None:
    cast = made("glm_moe_dsa").cast_predicate
    assert cast("model.layers.1.mlp.gate.weight") and not cast("model.layers.1.mlp.gate.e_score_correction_bias")


def test_a_checkpoint_of_mlx_vlm_opens_where_mlx_lm_knows_the_type_by_other_names(tmp_path: Path) -> None:
    """Of this type a layer asks another one's cache for its keys, which mlx-lm's usual cache gives with its length."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_types
    import vision_zoo

    folder = vision_zoo.save_checkpoint("afm7", tmp_path)
    expected, _ = vision_types.theirs(folder)
    assert vision_types.by_default(folder, expected) == "equal"


def test_mixed_quantization_streams_equal_to_mlx_vlms(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_types

    quantize = {"bits": 4, "group_size": 32}
    row = vision_types.survey("klear", tmp_path, "float32", quantize=quantize, recipe="mixed_3_6")
    assert row["equal"] and row["streamed"], row


def test_caches_that_layers_ask_give_what_they_hold() -> None:
    """Not the room that mlx-lm's keep for more, which Gemma 3n's last layers attended to."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    from outcore_vision.caches import within

    caches = [KVCache(), RotatingKVCache(8), BatchKVCache([0]), BatchRotatingKVCache(8, [0])]
    for cache in caches:
        cache.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
        cache.update_and_fetch(mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2)))
    kinds = [type(cache) for cache in caches]
    with within(caches, asked=True):
        assert [each.shape[2] for cache in caches for each in cache.state[:2]] == [4] * 8
        assert all(map(isinstance, caches, kinds))
    assert [type(cache) for cache in caches] == kinds


def test_changes_of_a_recurrent_cache_may_be_counted_while_the_model_runs() -> None:
    """mlx-vlm's methods do, as when texts of a server share passes."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    from mlx_lm.models.cache import ArraysCache

    from outcore_vision.caches import within

    cache: Any = ArraysCache(2)
    with within([cache]):
        before = cache.metadata_revision
        cache.metadata_revision += 1
        assert cache.metadata_revision != before
    assert type(cache) is ArraysCache
