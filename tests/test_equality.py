"""Every model type of mlx-lm that can be built here, streamed: equal to the resident model bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import zoo
from equality import BRIEF, HOLDINGS, NONE_RESIDENT, differences

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


EVERY_WAY = {"deepseek_v3", "recurrent_gemma", "rwkv7"}
"""Latents and experts, windows, states; ``contract`` has plain caches, and states beside them."""

KINDS = {
    *EVERY_WAY, *IN_PART, *WHOLE, *HEAD_STAYS,
    "afm7", "bailing_hybrid", "deepseek_v32", "exaone4", "falcon_h1", "gear", "gemma2", "gemma3_text", "gemma4", "gpt2",
    "gpt_oss", "jamba", "kimi_linear", "lfm2", "llama", "llama4", "longcat_flash_ngram", "mamba2", "minicpm3",
    "minimax_m3_vl", "mixtral", "nanbeige", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "qwen3_vl_moe",
}  # fmt: skip
"""Every set of caches, of kinds of layers and of where these lie: what holds them has no other cases."""


@pytest.mark.parametrize("model_type", sorted(EVERY_WAY))
def test_streamed_logits_equal_resident_ones_however_layers_are_held(model_type: str, tmp_path: Path) -> None:
    """``benchmarks/equality.py`` runs all types so."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    found, (none_resident, headless, half, everything, least) = differences(folder, holdings=HOLDINGS)
    assert not found
    assert none_resident.plan.streamed and not none_resident.plan.resident
    assert half.plan.streamed and half.plan.resident
    assert everything.streaming is None
    assert none_resident.metrics.misses == half.metrics.misses == 0, "the trace has the order of the layers"
    assert headless.plan.head_streamed and least.plan.split


@pytest.mark.parametrize("model_type", sorted(KINDS - EVERY_WAY))
def test_streamed_logits_equal_resident_ones(model_type: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    found, (headless, least) = differences(folder, holdings=BRIEF)
    assert not found
    assert headless.metrics.bytes_read > 0 and headless.plan.streamed
    if model_type in IN_PART:
        assert headless.plan.resident and any(IN_PART[model_type] in note for note in headless.notes)
        return
    assert not headless.plan.resident
    assert headless.plan.head_streamed == (model_type not in HEAD_STAYS)
    assert least.plan.split == (model_type not in WHOLE)
    assert headless.metrics.misses == least.metrics.misses == 0, "the trace has the order of the layers"
    assert least.plan.peak_bytes <= headless.plan.peak_bytes


@pytest.mark.parametrize("model_type", sorted(set(zoo.RUNNABLE) - KINDS))
def test_streamed_logits_of_types_that_are_like_others_equal_resident_ones(model_type: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    found, (headless,) = differences(folder, holdings=NONE_RESIDENT)
    assert not found
    assert headless.plan.streamed and not headless.plan.resident and headless.plan.head_streamed
    assert headless.metrics.misses == 0 and headless.metrics.bytes_read > 0


@pytest.mark.parametrize(
    ("model_type", "quantize"),
    [
        ("llama", {"group_size": 64, "bits": 3}),  # bits that do not fill bytes evenly
        ("qwen3_5_moe", {"group_size": 64, "bits": 4}),
        ("gpt2", {"group_size": 64, "bits": 8}),
        ("llama", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        ("gpt_oss", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_quantized_models(model_type: str, quantize: dict[str, Any], tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize)
    found, sessions = differences(folder, holdings=BRIEF)
    assert not found
    assert all(s.plan.streamed for s in sessions)


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("gemma3_text", mx.bfloat16), ("qwen3_5", mx.bfloat16), ("mamba2", mx.float16)]
)
def test_half_precision_checkpoints(model_type: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", dtype=dtype)
    found, (headless,) = differences(folder, holdings=NONE_RESIDENT)
    assert not found
    assert headless.plan.streamed


def test_computing_in_another_dtype_equals_set_dtype(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_moe", tmp_path / "model", dtype=mx.bfloat16)
    found, _ = differences(folder, dtype="float32", holdings=BRIEF)
    assert not found


AFFINE, MXFP4 = {"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize(
    ("model_type", "tied", "quantize"),
    [("llama", False, AFFINE), ("phi", False, None), ("gemma3_text", True, MXFP4)],  # phi's head has a bias
)
def test_a_head_in_many_slices(
    model_type: str, tied: bool, quantize: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        zoo.CONFIGS, model_type, zoo.CONFIGS[model_type] | {"vocab_size": 10007, "tie_word_embeddings": tied}
    )
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize)
    found, (headless, _) = differences(folder, holdings=BRIEF)  # with the head in memory there is nothing to slice
    assert not found
    assert headless.streaming is not None and headless.plan.head_streamed
    slices = len(headless.streaming.layers.units) - len(headless.plan.parts)
    assert slices > 2
    assert headless.metrics.misses == 0 and headless.metrics.rows_read > 0


@pytest.mark.parametrize("options", [{"io": "cached", "slots": 2}, {"io": "direct", "slots": 5}, {"cpu_streams": 1}])
def test_no_option_changes_a_bit(options: dict[str, object], quick_models: Callable[[int], Path]) -> None:
    found, _ = differences(quick_models(2), holdings=BRIEF, **options)
    assert not found


def test_shards_and_an_index(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model", shard_bytes=200_000)
    assert len(list(folder.glob("model*.safetensors"))) > 2
    found, _ = differences(folder, holdings=BRIEF)
    assert not found
