"""Finding the layers of any model, swapping their classes, and tracing its forward pass without weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

import outcore
import zoo
from outcore import UsageError
from outcore.decode.loader import load_model
from outcore.modules.hooks import absent, arrays_in, put, swap, unswap
from outcore.modules.layers import PIECE, find_layers, is_matrix
from outcore.modules.trace import trace_pass


@functools.cache
def built(model_type: str) -> nn.Module:
    """One model of the type for all tests that leave it as it is."""
    return zoo.build(model_type, seed=None)


class Block(nn.Module):
    def __init__(self, dims: int = 8) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dims)
        self.proj = nn.Linear(dims, dims)

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return x + self.proj(self.norm(x))


class Tiny(nn.Module):
    """A model of blocks under any names, whose caches do nothing."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        for name, part in parts.items():
            setattr(self, name, part)

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def run(self, x: mx.array) -> mx.array:
        raise NotImplementedError

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.run(self.embed(ids))


def blocks(n: int = 3) -> list[Block]:
    return [Block() for _ in range(n)]


def paths(model: nn.Module) -> list[str]:
    return [layer.path for layer in find_layers(model)]


# Finding


@pytest.mark.parametrize("name", ["layers", "h", "blocks", "decoder_stack"])
def test_a_list_of_modules_is_found_under_any_name(name: str) -> None:
    assert paths(Tiny(**{name: blocks()})) == [f"{name}.0", f"{name}.1", f"{name}.2"]


def test_lists_are_found_however_deep_they_lie() -> None:
    inner = Tiny(h=blocks(2))
    inner.embed = nn.Identity()
    assert paths(Tiny(language_model=Tiny(model=inner))) == ["language_model.model.h.0", "language_model.model.h.1"]
    assert paths(Tiny(parts={"text": Tiny(layers=blocks(2))})) == ["parts.text.layers.0", "parts.text.layers.1"]
    # A list of one is a wrapper, not a layer list: what matters lies inside.
    assert paths(Tiny(towers=[Tiny(layers=blocks(2))])) == ["towers.0.layers.0", "towers.0.layers.1"]


def test_every_list_of_a_model_is_found_and_none_inside_a_layer() -> None:
    outer = blocks(2)
    for block in outer:
        block.experts = blocks(4)
    found = find_layers(Tiny(encoder=outer, decoder=tuple(blocks(2))))
    assert [layer.path for layer in found] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert {p.path for p in found[0].parameters} == {"proj.weight", *(f"experts.{i}.proj.weight" for i in range(4))}


def test_lists_of_mlxs_own_modules_are_no_layers() -> None:
    assert paths(Tiny(norms=[nn.Linear(8, 8) for _ in range(4)], layers=blocks(2))) == ["layers.0", "layers.1"]
    assert paths(Tiny(mlp=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))) == []


def test_a_module_that_occurs_twice_is_one_layer() -> None:
    a, b = blocks(2)
    assert paths(Tiny(layers=[a, b, a, b])) == ["layers.0", "layers.1"]
    assert paths(Tiny(layers=[a, b], again=[b, a], model=Tiny(layers=[a, b]))) == ["layers.0", "layers.1"]


def test_vectors_and_private_parameters_stay_out() -> None:
    model = Tiny(layers=blocks(2))
    model.layers[0].gate = nn.Linear(8, 1)
    model.layers[0].table = mx.zeros((2, 3, 4))
    model.layers[0]._kept = mx.zeros((5, 5))
    first = find_layers(model)[0]
    assert {p.path: p.array.ndim for p in first.parameters} == {"proj.weight": 2, "table": 3}
    assert first.nbytes == 8 * 8 * 4 + 2 * 3 * 4 * 4


@pytest.mark.parametrize("model_type", zoo.CONFIGS)
def test_the_layers_of_every_architecture_are_found_with_most_of_its_weights(model_type: str) -> None:
    model = built(model_type)
    found = find_layers(model)
    assert len(found) >= 3
    parameters = dict(tree_flatten(model.parameters()))
    streamed = {f"{layer.path}.{p.path}": p.array for layer in found for p in layer.parameters}
    assert all(parameters[path] is a for path, a in streamed.items())
    matrices = {path for path, a in parameters.items() if is_matrix(a)}
    assert set(streamed) <= matrices
    repeated = [path for path in matrices - set(streamed) if ".layers." in path]
    assert not repeated, "matrices of layers that would stay resident"


# Swapping classes


class Guarded(Block):
    """A class that allows no attributes from outside."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_outcore"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("cls", [Block, Guarded])
def test_a_swapped_module_is_called_through_and_comes_back_as_it_was(cls: type[Block]) -> None:
    module = cls()
    x = mx.arange(8.0)
    before, expected = (dict(module), dict(module.__dict__)), module(x)
    calls = []

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs) * 2

    swap(module, "Streamed", call)
    assert isinstance(module, cls) and type(module) is not cls
    assert type(module).__name__ == f"Streamed{cls.__name__}"
    assert type(module).__module__ == cls.__module__
    assert mx.array_equal(module(x, cache=None), expected * 2)
    assert calls == [((x,), {"cache": None})]
    assert [k for k, _ in tree_flatten(module.parameters())] == [k for k, _ in tree_flatten(cls().parameters())]
    unswap(module)
    assert type(module) is cls
    assert (dict(module), dict(module.__dict__)) == before
    assert mx.array_equal(module(x), expected)
    unswap(module)
    assert type(module) is cls


def test_parameters_are_put_past_a_class_that_guards_its_attributes() -> None:
    layer = find_layers(Tiny(layers=[Guarded(), Guarded()]))[0]
    wanted = [mx.ones((8, 8))]
    put(layer.parameters, wanted)
    assert layer.module.proj.weight is wanted[0]
    with pytest.raises(ValueError):
        put(layer.parameters, [])


def test_absent_weights_hold_nothing_and_any_use_of_them_fails() -> None:
    layer = find_layers(Tiny(layers=blocks(2)))[0]
    stand_ins = absent([mx.zeros((8, 8), dtype=mx.bfloat16)])
    assert [(a.size, a.dtype) for a in stand_ins] == [(0, mx.bfloat16)]
    put(layer.parameters, stand_ins)
    with pytest.raises(ValueError):
        layer.module(mx.arange(8.0))


# Rehearsing


def image(value: Any, seen: dict[int, Any]) -> Any:
    """What a model is made of: classes, and every item and attribute; arrays and plain objects by identity."""
    if isinstance(value, int | float | str | bytes | type | None):
        return value
    if isinstance(value, mx.array) or id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        inside = [(k, image(v, seen)) for k, v in [*value.items(), *value.__dict__.items()]]
        return type(value), id(value), inside
    if isinstance(value, dict):
        return [(str(k), image(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [image(v, seen) for v in value]
    return id(value), [(k, image(v, seen)) for k, v in vars(value).items()] if hasattr(value, "__dict__") else None


@pytest.mark.parametrize("model_type", zoo.CONFIGS)
def test_every_layer_of_every_architecture_is_called_in_turn_and_left_as_it_was(model_type: str) -> None:
    """But for the one that reaches into its layers."""
    model = built(model_type)
    keep: dict[int, Any] = {}
    before, layers = image(model, keep), find_layers(model)
    traced = trace_pass(model, layers)
    assert image(model, {}) == before
    if model_type == "iquestloopcoder":
        assert traced.failure
    elif model_type in zoo.RUNNABLE:
        assert traced.failure is None
        assert traced.evaluates == (model_type == "dbrx")
        assert traced.order == list(range(len(layers))) * (2 if model_type == "nanbeige" else 1)


def test_products_that_a_model_keeps_of_its_weights_are_not_those_of_the_trace() -> None:
    """kimi_k3 and others multiply some weights once and keep the product."""
    model = zoo.build("kimi_k3")
    tokens = mx.array([[3, 17, 99]])
    expected = zoo.build("kimi_k3")(tokens)
    trace_pass(model, find_layers(model))
    assert mx.array_equal(model(tokens), expected)


def test_a_trace_that_fails_leaves_the_model_as_it_was_too() -> None:
    for model_type in ("iquestloopcoder", "dbrx"):
        model = zoo.build(model_type)
        before = zoo.build(model_type)(mx.array([[3, 17]]))
        trace_pass(model, find_layers(model))
        assert mx.array_equal(model(mx.array([[3, 17]])), before)


def large_llama() -> nn.Module:
    """3.2 GB of lazy weights."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=2048, num_hidden_layers=12, intermediate_size=8192, num_attention_heads=16,
            num_key_value_heads=8, rms_norm_eps=1e-5, vocab_size=32_000,
        )
    )  # fmt: skip


def test_a_trace_evaluates_nothing_of_a_model_however_large() -> None:
    model = large_llama()
    layers = find_layers(model)
    assert sum(layer.nbytes for layer in layers) > 2.5e9
    mx.eval()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    traced = trace_pass(model, layers)
    assert traced.order == list(range(12))
    assert mx.get_peak_memory() - before < 100_000
    assert mx.get_active_memory() - before < 100_000
    # Keys and values of 2,049 tokens, in steps of 256: 2 x 12 layers x 8 heads x 128 x 4 bytes each.
    assert traced.cache_bytes(2048) == 2 * 12 * 8 * 128 * 4 * 2304


def test_a_model_that_evaluates_inside_its_forward_pass_is_found_out() -> None:
    model = zoo.build("dbrx")
    traced = trace_pass(model, find_layers(model))
    assert traced.evaluates
    assert traced.failure is None
    assert traced.order == [0, 1, 2, 3]


class Evaluating(Tiny):
    def run(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e9:
                break
        return x


def test_evaluation_between_layers_is_found_out() -> None:
    model = Evaluating(layers=blocks())
    assert trace_pass(model, find_layers(model)).evaluates


class Reaching(Tiny):
    """Multiplies by a layer's matrix itself."""

    def run(self, x: mx.array) -> mx.array:
        return self.layers[1](self.layers[0](x)) @ self.layers[0].proj.weight


class Norming(Tiny):
    """Reads a neighbour's norm, as muse_spark does."""

    def run(self, x: mx.array) -> mx.array:
        return self.layers[1](self.layers[0](x)) * self.layers[0].norm.weight


class Odd(Tiny):
    """Calls its layers in an order of its own, one of them twice and one never."""

    def run(self, x: mx.array) -> mx.array:
        for i in (2, 0, 2, 3):
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize("model_type", ["iquestloopcoder", None])
def test_a_model_that_reaches_into_layers_from_outside_is_found_out(model_type: str | None) -> None:
    model = zoo.build(model_type) if model_type else Reaching(layers=blocks(2))
    traced = trace_pass(model, find_layers(model))
    assert traced.failure is not None
    assert trace_pass(model, []).failure is None  # with nothing streamed it runs


def test_a_neighbours_norm_may_be_read() -> None:
    model = Norming(layers=blocks(2))
    traced = trace_pass(model, find_layers(model))
    assert (traced.failure, traced.order) == (None, [0, 1])


def test_the_order_is_the_one_in_which_layers_are_called() -> None:
    odd = Odd(layers=blocks(4))
    assert trace_pass(odd, find_layers(odd)).order == [2, 0, 2, 3]
    twice = zoo.build("nanbeige")
    assert trace_pass(twice, find_layers(twice)).order == [0, 1, 2, 3, 0, 1, 2, 3]


def test_arrays_are_found_in_whatever_a_layer_is_given_or_returns() -> None:
    a, b, c, d, e = (mx.array(i) for i in range(5))
    cache = KVCache()
    cache.keys, cache.values = a, b
    found = arrays_in((cache, {"x": [c, None, "text", 3]}, mx.add), [d, (e,)], nn.Linear(2, 2))
    assert {id(x) for x in found} == {id(x) for x in (a, b, c, d, e)}


@pytest.mark.parametrize("model_type", ["gemma3_text", "baichuan_m1", "recurrent_gemma", "qwen3_5"])
def test_sliding_windows_hold_a_chunk_more_and_that_is_counted(model_type: str) -> None:
    model = zoo.build(model_type)
    traced = trace_pass(model, find_layers(model))
    assert (traced.window_bytes > 0) == (model_type != "qwen3_5")
    cache = make_prompt_cache(model)
    for chunk in (64, 64, 64, 64, 43, 1):
        mx.eval(model(mx.zeros((1, chunk), dtype=mx.int32), cache=cache), [c.state for c in cache])
        held = sum(a.nbytes for a in arrays_in(cache))
        assert held <= traced.cache_bytes(300) + 64 * traced.window_bytes


def test_a_streamed_models_weights_are_not_saved_without_those_on_disk(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=32, govern=False)
    with model.outcore:
        for save in (
            lambda: mlx_lm.utils.save_model(tmp_path / "saved", model),
            lambda: model.save_weights(str(tmp_path / "saved.safetensors")),
        ):
            with pytest.raises(UsageError, match="most of its weights are on disk"):
                save()
    assert not list(tmp_path.rglob("saved*/*.safetensors")) and not (tmp_path / "saved.safetensors").exists()
    whole, _ = outcore.load_model(folder, memory="1GB", context=32)
    with whole.outcore:
        mlx_lm.utils.save_model(tmp_path / "whole", whole)
    saved = mx.load(str(tmp_path / "whole" / "model.safetensors"))
    original = mx.load(str(folder / "model.safetensors"))
    assert saved.keys() == original.keys() and all(mx.array_equal(saved[k], original[k]).item() for k in saved)


def test_the_last_units_slot_is_free_while_the_head_is_computed(tmp_path: Path) -> None:
    """Of a token; of a prompt not all that follows is wanted."""
    model, _ = load_model(zoo.save_checkpoint("llama", tmp_path / "m"), memory="20MB", resident=0, slots=2)
    ring = model.outcore.streaming.ring
    cache = make_prompt_cache(model)
    prompt = model(mx.array([[1, 2, 3]]), cache=cache)
    assert len(ring.held) == 1
    mx.eval(prompt)
    logits = model(mx.array([[4]]), cache=cache)
    assert not ring.held and len(ring.ahead) == 2, "all of them are being read into again"
    mx.eval(logits)
    model.outcore.close()


def test_a_parts_weights_are_in_the_model_during_its_calls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other code of the layer makes of them would not be evaluated before their slot is reused."""
    folder, seen = zoo.save_checkpoint("llama", tmp_path / "m"), list[int]()
    smallest = outcore.plan_model(str(folder), context=32, prefill_step_size=8).smallest_budget_bytes
    model, _ = load_model(folder, memory=smallest, context=32, prompt=8)
    own = llama.MLP.__call__

    def watched(self: Any, x: mx.array) -> mx.array:
        out = own(self, x)
        seen.append(self.down_proj.weight.size)
        return out

    with model.outcore as session:
        assert any(u.modules for u in session.streaming.layers.units), "layers in parts"
        monkeypatch.setattr(llama.MLP, "__call__", watched)
        mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
    assert seen and not any(seen)


def test_what_a_parts_cache_keeps_for_later_is_computed_while_its_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek V4's keys that are not compressed yet: no output of the pass depends on them."""
    own = llama.Attention.__call__

    def keeping(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            cache.later = self.k_proj(x)
        return own(self, x, mask, cache)

    monkeypatch.setattr(llama.Attention, "__call__", keeping)
    monkeypatch.setattr(llama.Attention, PIECE, True, raising=False)
    folder, kept = zoo.save_checkpoint("llama", tmp_path / "m"), list[list[mx.array]]()
    smallest = outcore.plan_model(str(folder), context=32, prefill_step_size=8).smallest_budget_bytes
    for memory in (smallest, "1GB"):
        model, _ = load_model(folder, memory=memory, context=32, prompt=8)
        with model.outcore as session:
            assert memory != smallest or any(u.modules for u in session.streaming.layers.units), "layers in parts"
            cache = make_prompt_cache(model)
            for tokens in ([1, 2, 3], [4]):
                mx.eval(model(mx.array([tokens]), cache=cache))
            kept.append([each.later for each in cache])
            mx.eval(kept)
    assert all(mx.array_equal(a, b).item() for a, b in zip(*kept, strict=True))
