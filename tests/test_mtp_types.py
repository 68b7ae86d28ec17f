"""Heads of further types, from originals' tensors: what they put out, and texts that are those of plain decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mtp_heads
import mtp_originals
import mtp_reference
import outcore
import zoo
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.lazy_model import open_lazily
from outcore.errors import UnsupportedModelError
from outcore_drafts.mtp.head import MtpHead, SharedParts, has_mtp, kv_bytes, open_mtp

Tensors = mtp_originals.Tensors

LAST = f"model.layers.{mtp_originals.layers_of('glm_moe_dsa')}."

TOKENS = 11
"""More than windows and indexers of the tiny models let through."""


def opened(model_type: str, tmp_path: Path) -> MtpHead:
    """The head of an original beside a converted model's."""
    lazy = open_lazily(open_checkpoint(zoo.save_checkpoint(model_type, tmp_path / "model")))
    made = open_mtp(lazy, mtp_heads.save_head(model_type, tmp_path / "original"))
    assert made is not None
    return made


def inputs() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    return random.normal(size=(TOKENS, mtp_originals.HIDDEN)), 2 * random.normal(size=(TOKENS, mtp_originals.HIDDEN))


def in_parts(head: MtpHead, embedded: Any, states: Any, cuts: list[int]) -> Any:
    """What a head puts out for tokens that come in parts, each of the first of which is guessed once in vain."""
    cache = head.make_cache()
    out = []
    for first, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        if first:
            wrong = mx.array(np.ones((1, 2, mtp_originals.HIDDEN)), mx.float32)
            mx.eval(head(wrong, -wrong, cache))
            cache.trim(2)
        here = (mx.array(a[None, first:end], mx.float32) for a in (embedded, states))
        out.append(np.array(head(*here, cache)[0]))
    return np.concatenate(out)


@pytest.mark.parametrize("cuts", [[], [7], list(range(1, TOKENS))])
@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_a_head_puts_out_what_its_original_s_tensors_say(model_type: str, cuts: list[int], tmp_path: Path) -> None:
    """At once, in two parts and token by token, with guesses that were taken back between."""
    embedded, states = inputs()
    tensors = mtp_originals.original(model_type)
    want = mtp_reference.states_of(model_type, tensors, embedded, states)
    got = in_parts(opened(model_type, tmp_path), embedded, states, cuts)
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_the_comparison_sees_a_wrong_order_and_each_norm(model_type: str) -> None:
    """Without which it would be worth nothing: the plain computation with one thing wrong is far off."""
    embedded, states = inputs()
    tensors = mtp_originals.original(model_type)
    want = mtp_reference.states_of(model_type, tensors, embedded, states)
    wrong = [mtp_reference.states_of(model_type, tensors, embedded, states, swapped=True)]
    norms = [name for name in tensors if "norm" in name]
    assert len(norms) >= 5
    for name in norms:
        without = {**tensors, name: np.full_like(tensors[name], name.endswith(".weight"))}
        wrong.append(mtp_reference.states_of(model_type, without, embedded, states))
    for name, out in zip(["order", *norms], wrong, strict=True):
        assert np.abs(out - want).max() > 0.01, name


@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_what_a_token_takes_of_a_head_s_cache_is_predicted(model_type: str, tmp_path: Path) -> None:
    head = opened(model_type, tmp_path)
    cache = head.make_cache()
    zeros = mx.zeros((1, 256, mtp_originals.HIDDEN))
    mx.eval(head(zeros, zeros, cache))
    assert cache.nbytes == 256 * kv_bytes(head, mtp_originals.HIDDEN, mx.float32)


@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_a_head_is_given_states_behind_the_last_norm_and_shares_the_model_s_tables(model_type: str) -> None:
    model: Any = zoo.build(model_type)
    ids = mx.arange(3, 3 + TOKENS)
    want, weights = model(ids[None]), dict(tree_flatten(model.parameters()))
    shared = SharedParts(model)
    with shared.tap.listening() as heard:
        model(ids[None])
    assert len(heard) == 1 and mx.array_equal(shared.logits(heard[0]), want).item()
    table = next(a for path, a in weights.items() if "embed" in path and a.shape == (128, mtp_originals.HIDDEN))
    assert mx.array_equal(shared.embedded(ids)[0], table[ids]).item()


def changed(model_type: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Other settings of the type's tiny model."""
    monkeypatch.setitem(zoo.CONFIGS, model_type, {**copy.deepcopy(zoo.CONFIGS[model_type]), **settings})


def save(tensors: Tensors, folder: Path) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "head.safetensors"), {name: mx.array(a) for name, a in tensors.items()})
    return folder


def test_matrices_may_be_stored_in_eight_bits(tmp_path: Path) -> None:
    """As the originals of DeepSeek have them, with a scale for each block."""
    stored: dict[str, Any] = mtp_originals.original("glm_moe_dsa")
    seen = dict(stored)
    for name in ("self_attn.o_proj", *(f"self_attn.{n}" for n in ("q_proj", "kv_b_proj"))):
        if (weight := f"{LAST}{name}.weight") in stored:
            codes = mx.to_fp8(mx.array(stored[weight]) * 4)
            scales = mx.full([-(-size // 128) for size in codes.shape], 0.25)
            stored[weight], stored[f"{weight}_scale_inv"] = np.array(codes), np.array(scales)
            seen[weight] = np.array(mx.from_fp8(codes, mx.float32)) / 4
    assert any(name.endswith("_scale_inv") for name in stored)
    lazy = open_lazily(open_checkpoint(zoo.save_checkpoint("glm_moe_dsa", tmp_path / "model")))
    made = open_mtp(lazy, save(stored, tmp_path / "original"))
    assert made is not None
    embedded, states = inputs()
    want = mtp_reference.states_of("glm_moe_dsa", seen, embedded, states)
    np.testing.assert_allclose(in_parts(made, embedded, states, [7]), want, atol=5e-3)


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    assert any(old in name for name in tensors)
    return {name.replace(old, new): a for name, a in tensors.items()}


def as_qwens(tensors: Tensors) -> Tensors:
    return renamed(renamed(tensors, LAST, "mtp."), "mtp.eh_proj", "mtp.fc")


REFUSED: list[tuple[str, str, Callable[[Tensors], Tensors], str]] = [
    ("qwen3_next", "glm_moe_dsa", lambda t: renamed(t, LAST, "mtp.0."), r"unknown layout \(mtp\.0\."),
    ("exaone_moe", "glm_moe_dsa", as_qwens, "named as Qwen's, unexpected in a model of type exaone_moe"),
    ("step3p5", "glm_moe_dsa", lambda t: t, "an output head of its own"),
    ("glm_moe_dsa", "glm_moe_dsa", lambda t: renamed(t, "q_a_proj", "q_b_proj_a"), "q_b_proj_a"),
    ("deepseek_v32", "deepseek_v32", lambda t: {n: a for n, a in t.items() if "hnorm" not in n}, "hidden_norm"),
]


@pytest.mark.parametrize(("model_type", "head_type", "change", "said"), REFUSED)
def test_what_cannot_be_made_is_refused_by_name(
    model_type: str, head_type: str, change: Callable[[Tensors], Tensors], said: str, tmp_path: Path
) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    source = save(change(mtp_originals.original(head_type)), tmp_path / "original")
    with pytest.raises(UnsupportedModelError, match=said) as refused:
        outcore.load_model(folder, draft=f"mtp:{source}")
    assert str(source) in str(refused.value)


def test_a_head_like_a_layer_that_drops_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's layout, beside a model whose last layer keeps a window only: guesses could not be taken back."""
    changed("exaone_moe", monkeypatch, layer_types=[*["full_attention"] * 3, "sliding_attention"])
    source = save(mtp_originals.original("deepseek_v32"), tmp_path / "original")
    with pytest.raises(UnsupportedModelError, match="RotatingKVCache"):
        outcore.load_model(zoo.save_checkpoint("exaone_moe", tmp_path / "model"), draft=f"mtp:{source}")


@pytest.mark.parametrize("model_type", [t for t in mtp_originals.TYPES if t in mtp_heads.IN_PLACE])
def test_a_head_beside_its_model_is_found(model_type: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    assert not has_mtp(open_lazily(open_checkpoint(folder)))
    mtp_heads.save_head(model_type, folder)
    assert has_mtp(open_lazily(open_checkpoint(folder)))
