"""Every model type of mlx-lm that can be built here, streamed: equal to the resident model bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import zoo
from disturbances import TYPES
from equality import differences

IN_PART = {"iquestloopcoder": "never called, so kept resident"}  # its own code calls what is inside its layers

WHOLE = {  # layers that cannot be streamed in parts, and why
    "dbrx": "evaluates inside its forward pass",
    "deepseek_v41": "calls its compressors in some passes only",
    "gemma3n": "calls a router twice in each layer",
    "mamba": "its layers hold weights themselves",
}

HEAD_STAYS = {
    "iquestloopcoder": "nothing can be streamed",
    "talkie": "its head is an array, not a linear layer",
    "prism_hadamard_qwen35": "its embedding and head are classes of its own",
    "baichuan_m1": "sanitize normalises its head at each load",
}


KINDS = {
    *TYPES, *IN_PART, *WHOLE, *HEAD_STAYS,
    "afm7", "bailing_hybrid", "deepseek_v32", "gear", "gemma4", "gpt2", "kimi_linear", "longcat_flash_ngram",
    "minicpm3", "minimax_m3_vl", "mixtral", "olmo_hybrid", "phi3small", "qwen3_next", "qwen3_vl_moe",
}  # fmt: skip
"""Every set of caches, of kinds of layers and of where these lie: what holds them has no other cases."""


@pytest.mark.parametrize("model_type", sorted(KINDS))
def test_streamed_logits_equal_resident_ones(model_type: str, tmp_path: Path) -> None:
    """In all ways of holding them; ``benchmarks/equality.py`` runs each of these in both ways of computing a prompt."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    found, (none_resident, headless, half, everything, least) = differences(folder, both=model_type in TYPES)
    assert not found
    if model_type in IN_PART:
        assert none_resident.plan.streamed and none_resident.plan.resident
        assert any(IN_PART[model_type] in note for note in none_resident.notes)
        return
    assert none_resident.plan.streamed and not none_resident.plan.resident
    assert half.plan.streamed and half.plan.resident
    assert everything.streaming is None
    assert headless.plan.head_streamed == (model_type not in HEAD_STAYS)
    assert none_resident.metrics.misses == headless.metrics.misses == 0, "the rehearsal learnt the order"
    assert least.plan.split == (model_type not in WHOLE) and least.metrics.misses == 0
    assert least.plan.peak_bytes <= headless.plan.peak_bytes
    assert none_resident.metrics.bytes_read > 0


@pytest.mark.parametrize("model_type", sorted(set(zoo.RUNNABLE) - KINDS))
def test_streamed_logits_of_types_that_are_like_others_equal_resident_ones(model_type: str, tmp_path: Path) -> None:
    """Nothing resident, in whole layers and in parts; ``benchmarks/equality.py`` holds them in all ways."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    found, (headless, least) = differences(folder, brief=True)
    assert not found
    assert headless.plan.streamed and not headless.plan.resident and headless.plan.head_streamed
    assert least.plan.split and headless.metrics.misses == least.metrics.misses == 0
    assert least.plan.peak_bytes <= headless.plan.peak_bytes
    assert headless.metrics.bytes_read > 0 and least.metrics.bytes_read > 0


@pytest.mark.parametrize(
    ("model_type", "bits"),
    [("llama", bits) for bits in (2, 3, 5, 8)]
    + [("qwen3_5_moe", bits) for bits in (4, 6)]
    + [("qwen3_5", 3), ("gpt2", 4)],
)
def test_affine_quantizations(model_type: str, bits: int, tmp_path: Path) -> None:
    """In all ways of holding them where bits fill bytes evenly, and where they do not."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize={"group_size": 64, "bits": bits})
    found, sessions = differences(folder, brief=bits not in (3, 4), both=False)
    assert not found
    assert all(s.plan.streamed for s in (sessions[0], sessions[-1]))


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)])
def test_float_quantizations(mode: str, group_size: int, bits: int, tmp_path: Path) -> None:
    quantize = {"group_size": group_size, "bits": bits, "mode": mode}
    folder = zoo.save_checkpoint("llama", tmp_path / "model", quantize=quantize)
    found, (none_resident, *_) = differences(folder, both=False)
    assert not found
    assert none_resident.plan.streamed


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(kind, mx.bfloat16) for kind in ("llama", "gemma3_text", "qwen3_5", "mamba2")]
    + [("llama", mx.float16), ("mamba2", mx.float16)],
)
def test_half_precision_checkpoints(model_type: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", dtype=dtype)
    found, (none_resident, *_) = differences(folder, both=False)
    assert not found
    assert none_resident.plan.streamed


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_computing_in_another_dtype_equals_set_dtype(model_type: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", dtype=mx.bfloat16)
    found, _ = differences(folder, dtype="float32", both=False)
    assert not found


AFFINE, MXFP4 = {"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}
HEADS = [("llama", True), ("llama", False), ("phi", False), ("gemma3_text", True)]  # phi's has a bias


@pytest.mark.parametrize(
    ("model_type", "tied", "quantize"),
    [(*head, quantize) for head, quantize in zip(HEADS, (None, AFFINE, None, MXFP4), strict=True)],
)
def test_a_head_in_many_slices(
    model_type: str, tied: bool, quantize: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        zoo.CONFIGS, model_type, zoo.CONFIGS[model_type] | {"vocab_size": 20011, "tie_word_embeddings": tied}
    )
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize)
    found, (headless, _) = differences(folder, brief=True)  # with the head in memory there is nothing to slice
    assert not found
    assert headless.streaming is not None and headless.plan.head_streamed
    slices = len(headless.streaming.layers.units) - len(headless.plan.parts)
    assert slices > 4
    assert headless.metrics.misses == 0 and headless.metrics.rows_read > 0


@pytest.mark.parametrize("options", [{"io": "cached", "slots": 2}, {"io": "direct", "slots": 5}, {"cpu_streams": 1}])
def test_no_option_changes_a_bit(options: dict[str, object], quick_models: Callable[[int], Path]) -> None:
    found, _ = differences(quick_models(4), **options)
    assert not found


def test_shards_and_an_index(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model", shard_bytes=200_000)
    assert len(list(folder.glob("model*.safetensors"))) > 2
    found, _ = differences(folder)
    assert not found
