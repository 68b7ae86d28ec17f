"""Routed experts that are read one by one, beside arrays of theirs that stay in memory: an adapter's, and scales."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from adapters import DORA, FULL, LORA, save_adapter
from outcore.decode.preparation import prepare
from outcore.plan.planner import smallest_budget

EXPERTS = 80
"""Of a layer; a token uses 4, so from 16 tokens on mlx-lm sorts their numbers, and 17 tokens' fit into 72 slots."""

PASSES = (17, 1, 3, 24, 1)
IDS = [(7 * i * i + 3 * i + 1) % 60 + 1 for i in range(sum(PASSES))]

WHAT: dict[str, dict[str, Any]] = {
    "default keys": {"kind": LORA},
    "a projection of the last layer": {"kind": LORA, "keys": ["mlp.switch_mlp.down_proj"], "layers": 1, "rank": 9},
    "attention": {"kind": LORA, "keys": ["self_attn.q_proj", "self_attn.v_proj"]},
    "whole weights": {"kind": FULL, "keys": ["switch_mlp.gate_proj"]},
    "all of a layer's experts": {"kind": FULL, "keys": ["layers.1.mlp.switch_mlp"]},
}


def save(
    folder: Path, quantize: dict[str, Any] | None, dtype: mx.Dtype = mx.float32, width: int = 64, layers: int = 2
) -> Path:
    whole = zoo.CONFIGS["qwen3_5_moe"]
    text = whole["text_config"] | {
        "num_hidden_layers": layers, "num_experts": EXPERTS, "num_experts_per_tok": 4, "mlp_only_layers": [],
        "vocab_size": 8192, "tie_word_embeddings": True, "hidden_size": width, "moe_intermediate_size": width,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        more = {"text_config": text, "vocab_size": 8192, "tie_word_embeddings": True}
        patch.setitem(zoo.CONFIGS, "qwen3_5_moe", whole | more)
        return zoo.save_checkpoint("qwen3_5_moe", folder, quantize=quantize, dtype=dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Callable[..., Path]:
    """A hybrid of so many experts in float32 or another dtype, or in 4 bit; with a tokenizer."""

    @functools.cache
    def made(quantized: bool, dtype: mx.Dtype = mx.float32, layers: int = 2) -> Path:
        folder = tmp_path_factory.mktemp("experts") / "model"
        if quantized:
            save(folder, {"group_size": 32, "bits": 4}, dtype, width=128, layers=layers)
        else:
            save(folder, None, dtype)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((demo_model / name).read_bytes())
        return folder

    return made


def logits(model: Any, passes: Sequence[int] = PASSES) -> npt.NDArray[np.float32]:
    cache, found, at = make_prompt_cache(model), [], 0
    for n in passes:
        out = model(mx.array(IDS[at : at + n])[None], cache=cache)
        found.append(np.array(out.astype(mx.float32))[0])
        at += n
    return np.concatenate(found)


def resident(folder: Path, adapter: Path | None) -> Any:
    model = mlx_lm.utils.load_model(folder)[0]
    return model if adapter is None else mlx_lm.utils.load_adapters(model, str(adapter)).eval()


def assert_equal(folder: Path, adapter: Path | None, experts: int, dtype: str | None = None) -> None:
    """To mlx-lm's resident model, and the next text to the beginning of the first."""
    theirs = resident(folder, adapter)
    if dtype is not None:
        theirs.set_dtype(getattr(mx, dtype))
    expected = logits(theirs)
    path = None if adapter is None else str(adapter)
    options: dict[str, Any] = {"memory": "1GB", "context": 128, "govern": False, "adapter_path": path, "dtype": dtype}
    model = outcore.load_model(folder, experts=experts, **options)[0]
    with model.outcore as session:
        assert session.plan.pools
        assert np.array_equal(logits(model), expected)
        assert np.array_equal(logits(model, PASSES[:3]), expected[: sum(PASSES[:3])])
        assert bool(session.metrics.experts.read) == (experts < EXPERTS)  # all of them are brought before they are used


@pytest.mark.parametrize(
    ("what", "experts", "quantized"),
    [(what, 3 if what == "default keys" else 40, n % 2 == 1) for n, what in enumerate(WHAT)]
    + [("whole weights", EXPERTS, False)],
)
def test_an_adapter_of_experts(
    folders: Callable[..., Path], tmp_path: Path, quantized: bool, what: str, experts: int
) -> None:
    folder = folders(quantized)
    assert_equal(folder, save_adapter(folder, tmp_path / "adapter", **WHAT[what]), experts)


def test_an_adapter_that_looks_at_weights_itself_has_layers_streamed_whole(
    folders: Callable[..., Path], tmp_path: Path
) -> None:
    """DoRA does; and mlx-lm has none for experts, so theirs is refused."""
    folder = folders(True)
    adapter = save_adapter(folder, tmp_path / "adapter", DORA, keys=["self_attn.q_proj"])
    with pytest.raises(outcore.UsageError, match=f"with the adapter {adapter} none can be read one by one"):
        outcore.load_model(folder, memory="1GB", experts=8, adapter_path=str(adapter))
    model = outcore.load_model(folder, memory="1GB", resident=0, context=128, govern=False, adapter_path=str(adapter))[
        0
    ]
    with model.outcore as session:
        assert session.plan.streams
        assert np.array_equal(logits(model), logits(resident(folder, adapter)))
    about = adapter / "adapter_config.json"
    about.write_text(about.read_text().replace("self_attn.q_proj", "mlp.switch_mlp.up_proj"))
    with pytest.raises(outcore.CheckpointError, match="QuantizedSwitchLinear doesn't support DoRA"):
        outcore.load_model(folder, memory="1GB", adapter_path=str(adapter))


def test_an_adapter_is_computed_in_the_dtype_that_was_asked_for(folders: Callable[..., Path], tmp_path: Path) -> None:
    folder = folders(True, mx.bfloat16)
    adapter = save_adapter(folder, tmp_path / "adapter", dtype=mx.bfloat16)
    assert_equal(folder, adapter, 40, "float32")


def test_an_adapter_that_mlx_computes_on_a_gpu_only_is_refused_before_it_is_loaded(
    folders: Callable[..., Path], tmp_path: Path
) -> None:
    """By mlx-lm itself in the middle of the first pass."""
    folder = folders(True, mx.bfloat16)
    adapter = save_adapter(folder, tmp_path / "adapter", dtype=mx.bfloat16)
    with pytest.raises(RuntimeError, match="float32"):
        logits(resident(folder, adapter))
    with pytest.raises(outcore.UsageError, match=r"an adapter of experts in bfloat16.*dtype float32"):
        outcore.load_model(folder, memory="1GB", adapter_path=str(adapter))


@pytest.fixture(scope="module")
def adapted(folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A quantized hybrid, an adapter of it, prompts, and mlx-lm's tokens and texts."""
    folder = folders(True, layers=3)
    adapter = save_adapter(folder, tmp_path_factory.mktemp("adapters") / "adapter")
    theirs, tokenizer = mlx_lm.load(str(folder), adapter_path=str(adapter))
    prompts = [tokenizer.encode(t) for t in ("def f(x):\n    return f(x)\n\ndef f(", "import os", "x = [1, 2, " * 3)]
    tokens = [[r.token for r in mlx_lm.stream_generate(theirs, tokenizer, p, max_tokens=4)] for p in prompts]
    return folder, adapter, prompts, tokens, [tokenizer.decode(text).strip() for text in tokens]


@pytest.mark.parametrize("more", [{"draft": "ngram"}, {"sequences": 3}], ids=["drafted", "alone and together"])
def test_texts_in_a_budget_without_room_for_all_experts(adapted: Any, more: dict[str, Any]) -> None:
    """Nothing is asked for but the budget."""
    folder, adapter, prompts, expected, whole = adapted
    options: dict[str, Any] = {"adapter_path": str(adapter), "context": 128, "govern": False} | more
    size = prepare(folder, memory="2GB", **{n: v for n, v in options.items() if n != "govern"}).profile.size
    budget = smallest_budget(size, experts=20)  # with all of a prompt in one reading
    model, ours = outcore.load(str(folder), memory=budget, **options)
    with model.outcore as session:
        assert session.plan.pools and session.plan.peak_bytes <= budget
        for prompt, tokens in zip([*prompts[:2], prompts[0]], [*expected[:2], expected[0]], strict=True):
            assert [r.token for r in outcore.stream_generate(model, ours, prompt, max_tokens=4)] == tokens
        if "sequences" in more:
            texts = outcore.batch_generate(model, ours, prompts, max_tokens=4).texts
            assert [t.strip() for t in texts] == whole
        assert session.metrics.experts.read > 0


def test_memory_is_planned_for_what_an_adapter_takes_on_the_way(folders: Callable[..., Path], tmp_path: Path) -> None:
    folder = folders(True)
    adapter = save_adapter(folder, tmp_path / "adapter", rank=128, layers=1)
    options: dict[str, Any] = {"context": 64, "prompt": 16, "govern": False, "adapter_path": str(adapter)}
    gc.collect()
    before = mx.get_active_memory()
    model = outcore.load_model(folder, memory="2GB", experts=60, **options)[0]
    with model.outcore as session:
        mx.reset_peak_memory()
        cache = make_prompt_cache(model)
        for token in IDS[:6]:
            mx.eval(model(mx.array([[token]]), cache=cache))
        assert session.plan.pools and mx.get_peak_memory() - before <= session.plan.peak_bytes


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of which each expert has another scale."""
    quantize = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
    folder = save(tmp_path_factory.mktemp("scaled") / "model", quantize)
    file = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    factors = mx.array([1 + e * 5 % 7 for e in range(EXPERTS)], mx.float32)
    weights = {name: a * factors if name.endswith("global_scale") else a for name, a in weights.items()}
    mx.save_safetensors(str(file), weights)
    return folder


@pytest.mark.parametrize("experts", [40, EXPERTS, 0])
def test_each_expert_is_computed_with_its_own_scale(
    scaled: Path, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX multiplies with them on a GPU only, so what does it here stands in for it."""
    product = mx.gather_qmm

    def multiplied(*args: Any, rhs_indices: mx.array, global_scale: mx.array | None = None, **kwargs: Any) -> mx.array:
        out = product(*args, rhs_indices=rhs_indices, **kwargs)
        return out if global_scale is None else out * global_scale[rhs_indices][..., None, None]

    monkeypatch.setattr(mx, "gather_qmm", multiplied)
    if experts:
        assert_equal(scaled, None, experts)
        return
    model = outcore.load_model(scaled, memory="1GB", resident=0, experts=0, context=128, govern=False)[0]
    with model.outcore as session:
        assert session.plan.streams and not session.plan.pools
        assert np.array_equal(logits(model), logits(resident(scaled, None)))
