"""What a model consists of is told as MLX tells it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import zoo
from outcore.modules.layers import modules, named_modules, named_parameters
from outcore_drafts.low_bit_copy import copied


class Odd(nn.Module):
    """Modules and arrays in whatever MLX looks into, and in what it does not."""

    def __init__(self) -> None:
        super().__init__()
        inner, shared = nn.Linear(2, 3), nn.LayerNorm(2)
        self.norm, self.again = shared, shared
        self.nested: Any = [
            [inner, {"of": nn.QuantizedLinear(64, 8)}],
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            "word",
        ]
        self.by_name = {"a": nn.RMSNorm(4), "arrays": [mx.zeros(2), {"_b": mx.ones(3)}], "n": 3}
        self.fixed = (nn.Linear(2, 2), mx.zeros(1))
        self._frequencies = mx.arange(4)
        self._hidden = nn.Linear(4, 4)
        self._table = {"c": mx.zeros(1)}
        self.none, self.empty, self.scale = None, [], mx.array(2.0)


def assert_told_alike(model: nn.Module) -> None:
    def same(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> None:
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))

    same(named_modules(model), model.named_modules())
    assert list(map(id, modules(model))) == list(map(id, model.modules()))
    same(named_parameters(model), tree_flatten(model.parameters()))


def test_a_copy_is_of_the_same_arrays_in_other_modules() -> None:
    odd = Odd()
    before = [(path, id(a)) for path, a in named_parameters(odd)]
    copy = copied(odd)
    assert [(path, id(a)) for path, a in named_parameters(copy)] == before
    assert [path for path, _ in named_modules(copy)] == [path for path, _ in named_modules(odd)]
    assert not {id(m) for m in modules(copy)} & {id(m) for m in modules(odd)}
    assert copy.norm is copy.again and type(copy.nested[0][0]) is nn.Linear and copy.nested[0][1]["of"].bits == 4
    copy.nested[0][0] = copy.by_name["a"] = nn.Linear(1, 1)
    copy.scale = mx.array(3.0)
    copy.nested[0][1]["of"].bits = 8
    assert [(path, id(a)) for path, a in named_parameters(odd)] == before and odd.nested[0][1]["of"].bits == 4
    assert_told_alike(copy)


def test_modules_and_arrays_in_lists_and_dictionaries() -> None:
    odd = Odd()
    assert_told_alike(odd)
    assert "nested.0.1.of.scales" in dict(named_parameters(odd))


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3n", "deepseek_v3", "jamba", "rwkv7", "falcon_h1", "gpt2"])
def test_models(model_type: str) -> None:
    model = zoo.build(model_type)
    assert_told_alike(model)
    layer = next(m for path, m in model.named_modules() if path.endswith(".0"))
    assert_told_alike(layer)
