"""The tiny models cover mlx-lm, load with it, and compute something."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import zoo
from test_equality import EVERY_WAY

TOKENS = 128


def _logits(model: nn.Module) -> mx.array:
    """The logits of a prompt of five tokens, and of one more token after it."""
    cache = make_prompt_cache(model)
    prompt = model(mx.array([[3, 17, 99, 5, 42]]), cache=cache)
    mx.eval(prompt, [layer.state for layer in cache])
    return mx.concatenate([prompt, model(mx.array([[7]]), cache=cache)], axis=1)[0, :, :TOKENS]


@pytest.mark.parametrize("model_type", sorted(EVERY_WAY))
def test_logits_are_finite_and_tell_tokens_and_positions_apart(model_type: str) -> None:
    """test_equality.py looks at those of all other types."""
    logits = _logits(zoo.build(model_type))
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all().item()
    assert logits.std(axis=0).min().item() > 1e-3
    assert logits.std(axis=1).min().item() > 1e-3


@pytest.mark.parametrize("model_type", ["baichuan_m1", "deepseek_v3", "mamba2"])
def test_a_saved_model_loads_and_computes_what_it_did_in_memory(model_type: str, tmp_path: Path) -> None:
    """test_equality.py loads those of all types, and compares with what mlx-lm computes there."""
    model, config = load_model(zoo.save_checkpoint(model_type, tmp_path / "model"))
    assert config["model_type"] == zoo.CONFIGS[model_type]["model_type"]
    assert mx.abs(_logits(model) - _logits(zoo.build(model_type))).max().item() < 1e-5


AFFINE, MXFP4 = {"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize(
    ("model_type", "quantize"),
    [("deepseek_v3", MXFP4), ("gpt_oss", MXFP4), ("kimi_linear", AFFINE)],
)
def test_quantized_checkpoints_load(model_type: str, quantize: dict[str, int | str], tmp_path: Path) -> None:
    model, config = load_model(zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize))
    packed = [path for path, array in tree_flatten(model.parameters()) if array.dtype == mx.uint32]
    assert len(packed) > 10
    assert config["quantization"]["group_size"] == quantize["group_size"]
    assert mx.isfinite(_logits(model)).all().item()


def test_shards_have_about_the_size_asked_for(tmp_path: Path) -> None:
    whole, folder = zoo.build("qwen3_moe", seed=3), tmp_path / "model"
    zoo.save_checkpoint("qwen3_moe", folder, seed=3, shard_bytes=100_000)
    sizes = [path.stat().st_size for path in folder.glob("model-*-of-*.safetensors")]
    assert len(sizes) > 5
    assert max(sizes) < 110_000
    sharded, _ = load_model(folder)
    for (path, expected), (other, found) in zip(
        tree_flatten(whole.parameters()), tree_flatten(sharded.parameters()), strict=True
    ):
        assert path == other
        assert mx.array_equal(expected, found), path


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (zoo.build("jamba", seed).model.layers[0].mamba for seed in (1, 1, 2))
    for (path, a), (_, b), (_, c) in zip(*(tree_flatten(m.parameters()) for m in (first, again, other)), strict=True):
        assert mx.array_equal(a, b), path
        assert not mx.array_equal(a, c), path


def test_other_precisions_can_be_saved(tmp_path: Path) -> None:
    model, _ = load_model(zoo.save_checkpoint("llama", tmp_path / "model", dtype=mx.bfloat16))
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.bfloat16}


def _defines_a_model(module: Path) -> bool:
    """Whether the module has a Model, of its own or of another module; without importing it, which olmo forbids."""
    tree = ast.parse(module.read_text())
    imported = (
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    return "Model" in {*(node.name for node in tree.body if isinstance(node, ast.ClassDef)), *imported}


def test_every_architecture_of_mlx_lm_is_accounted_for() -> None:
    folder = Path(mlx_lm.models.cache.__file__).parent
    types = {module.stem for module in folder.glob("*.py") if _defines_a_model(module)}
    assert zoo.CONFIGS.keys() | zoo.NOT_CONSTRUCTIBLE.keys() == types
    assert not zoo.CONFIGS.keys() & zoo.NOT_CONSTRUCTIBLE.keys()
    assert zoo.NOT_ON_CPU.keys() <= zoo.CONFIGS.keys()


@pytest.mark.parametrize("model_type", zoo.NOT_ON_CPU)
def test_types_that_need_metal_can_still_be_built(model_type: str) -> None:
    assert len(zoo.build(model_type).layers) == 4
