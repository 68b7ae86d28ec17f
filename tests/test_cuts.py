"""Where models can be cut between ranks."""

from __future__ import annotations

import mlx.core as mx
import pytest

import zoo
from outcore.modules.layers import find_layers, find_tables
from outcore_cluster.cuts import BATCH, TOKENS, Cuts, find_cuts


def cuts(model_type: str) -> Cuts:
    model = zoo.build(model_type)
    layers = find_layers(model)
    return find_cuts(model, layers, find_tables(model, layers), lambda *_: None, evaluates=False)


GROUPS = {
    "llama": [(0,), (1,), (2,), (3,)],
    "afm7": [(0,), (1, 2, 3)],  # the last two read what the second keeps
    "gemma3n": [(0, 2), (1, 3)],  # the last two have the caches of the first two
    "gemma4": [(0,), (1,), (2, 4), (3, 5)],  # the last two are given others' keys and values
}


@pytest.mark.parametrize("model_type", GROUPS)
def test_layers_that_share_what_they_keep_are_one_group(model_type: str) -> None:
    found = cuts(model_type)
    assert found.refusal is None and list(found.groups) == GROUPS[model_type]


@pytest.mark.parametrize("model_type", ["deepseek_v41", "iquestloopcoder", "kimi_k3"])
def test_a_model_that_cannot_be_cut(model_type: str) -> None:
    assert cuts(model_type).refusal


def test_what_a_layer_puts_out_and_uses() -> None:
    found = cuts("llama")
    call = found.calls[2]
    assert call.uses == {(1, 0)} and found.results == {(3, 0)}
    (shape,) = call.leaves
    assert shape is not None and shape.dims[:2] == (BATCH, TOKENS) and shape.of(3, 7)[:2] == (3, 7)
    assert shape.dtype == mx.float32
    assert call.sized_by == (0, 0, 1) and call.advances[0].tokens
    assert cuts("rwkv7").calls[3].uses >= {(2, 0)}
    assert cuts("qwen3_next").calls[0].advances[0].entries == (0, 1)


def test_a_layer_alone_is_not_cut() -> None:
    """As of a model whose other layers an adapter of all their weights replaces: those are in no checkpoint."""
    model = zoo.build("llama")
    refusal = find_cuts(model, find_layers(model)[:1], [], lambda *_: None, evaluates=False).refusal
    assert refusal is not None and "fewer than two of its layers" in refusal and "adapter" in refusal


def test_a_model_is_as_it_was() -> None:
    """Neither weights nor classes are left changed, and the logits are those of before."""
    model = zoo.build("gemma4")
    ids = mx.array([[3, 4, 5]])
    before, classes = model(ids), [type(m) for m in model.modules()]
    layers = find_layers(model)
    find_cuts(model, layers, find_tables(model, layers), lambda *_: None, evaluates=False)
    assert mx.array_equal(model(ids), before) and [type(m) for m in model.modules()] == classes
