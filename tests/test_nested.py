"""Models of whose layers only the low bits are read: the high ones are in memory, as a draft."""

from __future__ import annotations

import functools
import gc
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx_lm.generate import generate_step

import outcore
import zoo
from adapters import DORA, LORA, save_adapter
from outcore.decode.preparation import prepare
from outcore.engine import binding, engine
from outcore.modules.split_linear import split_rows
from outcore_drafts import nested_layers
from outcore_drafts.nested_layers import LOW, NestedLinear, coarsen, nest, nested_modules
from outcore_packs.stored_planes import BITS, high_plane, joined, joining_source, low_plane
from stand_ins import TokensOnly

IDS = [3 + (7919 * i) % 50 for i in range(21)]


def quantized_linear(bits: int, dtype: mx.Dtype = mx.float32, bias: bool = False) -> nn.QuantizedLinear:
    linear = nn.Linear(256, 320, bias=bias)
    linear.weight = mx.random.normal((320, 256), key=mx.random.key(bits)).astype(dtype)
    if bias:
        linear.bias = mx.random.normal((320,), key=mx.random.key(1)).astype(dtype)
    return linear.to_quantized(64, bits)


CUTS = [(b, h) for b in BITS for h in BITS if h < b]


@pytest.mark.parametrize(("n", "bits", "high"), [(n, *cut) for n, cut in enumerate(CUTS)])
def test_products_are_the_same_bits(n: int, bits: int, high: int) -> None:
    dtype, streams = ((mx.float32, 2), (mx.bfloat16, 1))[n % 2]
    module, x = quantized_linear(bits, dtype, bias=True), mx.random.normal((3, 256)).astype(dtype)
    expected, words, scales = module(x), module.weight, module.scales
    product = mx.quantized_matmul(x, words, scales, module.biases, group_size=64, bits=bits)
    coarse = high_plane(words, scales, module.biases, bits, high)
    model = nn.Module()
    model.only = module
    nest(module, high)
    assert sorted(module) == ["bias", "biases", "low"] and module["low"].shape == (320, 256 * (bits - high) // 32)
    assert mx.isnan(module(x)).all().item()  # of numbers that are none, as long as the high bits are not there
    draft = quantized_linear(bits, dtype)
    coarsen(draft, high)
    model.draft = draft
    guess = mx.quantized_matmul(x, *coarse, group_size=64, bits=high)
    assert mx.array_equal(draft(x), guess).item()
    module.share(draft)
    low = module[LOW]
    split_rows(model, streams, smallest=1)
    assert ("_outcore_rows" in module.__dict__) == (streams > 1)
    assert mx.array_equal(module(x), expected).item()
    for settled in (False, True, False):
        assert module.settled == settled and draft.bits == (bits if settled else high)
        again = module.whole()
        assert mx.array_equal(again[0], words).item() and mx.array_equal(again[1], scales).item()
        assert mx.array_equal(module(x), expected).item()
        assert mx.array_equal(draft(x), product if settled else guess).item()
        if settled:
            module.unsettle()
            module[LOW] = low
        else:
            module.settle()


def test_the_kernel_for_gpus_joins_as_the_processor_does(tmp_path: Path) -> None:
    """Its source is C: compiled here with a loop around it, in the place of a device's threads."""
    source, calls, given, wanted = "#include <cstdio>\ntypedef const unsigned *Words;\n", "", b"", []
    for n, (bits, high) in enumerate(CUTS):
        words, scales, biases = mx.quantize(mx.random.normal((4, 512), key=mx.random.key(high)), 64, bits)
        planes = [high_plane(words, scales, biases, bits, high)[0], low_plane(words, bits, high)]
        assert mx.array_equal(joined(planes[0], planes[1], bits, high), words).item()
        source += f"""
        static void thread{n}(unsigned at, Words high, Words low, unsigned *out, Words count) {{
          {joining_source(bits, high)}
        }}
        static unsigned high{n}[{planes[0].size}], low{n}[{planes[1].size}], words{n}[{words.size}];
        """
        calls += f"""
        if (fread(high{n}, 4, {planes[0].size}, stdin) != {planes[0].size}) return 1;
        if (fread(low{n}, 4, {planes[1].size}, stdin) != {planes[1].size}) return 1;
        for (unsigned at = 0; at < 64 + 9; at++) thread{n}(at, high{n}, low{n}, words{n}, &count);
        fwrite(words{n}, 4, {words.size}, stdout);
        """
        given += b"".join(bytes(memoryview(p)) for p in planes)
        wanted.append(bytes(memoryview(words)))
    (tmp_path / "join.cpp").write_text(f"{source}int main() {{ const unsigned count = 64; {calls} }}")
    subprocess.run(["g++", "-O0", "-o", tmp_path / "join", tmp_path / "join.cpp"], check=True)
    made = subprocess.run([tmp_path / "join"], input=given, capture_output=True, check=True).stdout
    for cut, want in zip(CUTS, wanted, strict=True):
        assert made[: len(want)] == want, cut
        made = made[len(want) :]
    assert not made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("nested"), quantize={"bits": 4, "group_size": 32})


@functools.cache
def expected(folder: Path, count: int = 6) -> list[tuple[int, mx.array]]:
    steps = generate_step(mx.array(IDS), mlx_lm.utils.load_model(folder)[0], max_tokens=count, prefill_step_size=16)
    return [(int(token), logprobs) for token, logprobs in steps]


def same(model: Any, wanted: list[tuple[int, mx.array]]) -> bool:
    found = list(outcore.stream_generate(model, TokensOnly(), IDS, max_tokens=len(wanted), prefill_step_size=16))
    tokens = [r.token for r in found] == [token for token, _ in wanted]
    return tokens and all(mx.array_equal(r.logprobs, w).item() for r, (_, w) in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("model_type", "bits", "high"),
    [("qwen3_5", 8, 3), ("gemma3_text", 4, 2)],
)
def test_answers_are_the_same_bits(model_type: str, bits: int, high: int, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize={"bits": bits, "group_size": 32})
    wanted = expected(folder)
    options: dict[str, Any] = {"memory": "1GB", "resident": 2, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft=f"self:{high}", govern=False, **options)
    with model.outcore as session:
        assert any(nested_modules(model)) and session.plan.streamed
        assert same(model, wanted) and session.metrics.drafted
        assert session.residency.layers.shed(2) == 2 and not session.plan.resident
        assert same(model, wanted)


def test_layers_come_and_go_while_it_runs(folder: Path) -> None:
    wanted = expected(folder, 4)
    options: dict[str, Any] = {"memory": "1GB", "resident": 3, "context": 64, "prefill_step_size": 16, "govern": False}
    model, _ = outcore.load_model(folder, draft="self:2", **options)
    with model.outcore as session:
        modules = [m for _, m in nested_modules(model)]

        def whole() -> int:
            """Modules of which draft and model have all bits; those of layers that stay."""
            assert all(m.settled == (m.coarse.bits == 4) and m[LOW].size == 0 for m in modules)
            return sum(m.settled for m in modules)

        assert whole() == 3 * 7 and same(model, wanted)
        assert session.residency.layers.shed(2) == 2 and whole() == 7 and same(model, wanted)
        assert session.residency.layers.regrow(2) == 2 and same(model, wanted)
        session.residency.layers.note_arrivals()  # nobody governs, so that a busy machine takes no layers
        assert len(session.plan.resident) == 3 and whole() == 3 * 7


def test_layers_go_without_taking_much_memory() -> None:
    """They go where it is short."""
    linear = nn.Linear(2048, 2048, bias=False)
    module, coarse = linear.to_quantized(64, 6), linear.to_quantized(64, 6)
    words = mx.array(module.weight)
    nest(module, 5)
    coarsen(coarse, 5)
    high = mx.array(coarse.weight)
    module.share(coarse)
    module.settle()
    del linear
    assert mx.array_equal(coarse.weight, words).item()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    module.unsettle()
    assert mx.get_peak_memory() - before < 4 * words.nbytes  # 24 times, all at once
    assert mx.array_equal(coarse.weight, high).item()


def test_layers_that_come_back_together_are_not_in_memory_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 1024}
    monkeypatch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | large)
    folder = zoo.save_checkpoint("qwen3", tmp_path / "large", quantize={"bits": 6, "group_size": 64})
    options: dict[str, Any] = {"memory": "1GB", "resident": 4, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft="self:5", govern=False, **options)

    def peak() -> int:
        mx.reset_peak_memory()
        list(outcore.stream_generate(model, TokensOnly(), IDS[:8], max_tokens=4, num_draft_tokens=1))
        return mx.get_peak_memory()

    with model.outcore as session:
        peak()
        assert session.residency.layers.shed(4) == 4
        without = peak()
        assert session.residency.layers.regrow(4) == 4
        high = sum(m.coarse.weight.nbytes for _, m in nested_modules(model)) * 4 / 5
        low = high / 5
        most = 0
        for _ in range(10):  # how many passes an answer takes is not known
            most = max(most, peak())
            session.residency.layers.note_arrivals()
            if session.plan.resident:
                break
        assert len(session.plan.resident) == 4 and most - without < low + high / 2


def test_a_failure_in_the_middle_changes_nothing(folder: Path) -> None:
    wanted = expected(folder)
    options: dict[str, Any] = {"memory": "1GB", "resident": 0, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft="self:3", govern=False, **options)

    class Stop(Exception): ...

    with model.outcore as session:
        calls = iter(range(10**6))

        def stop() -> None:
            if next(calls) == 6:
                raise Stop

        session.streaming.after_unit.append(stop)
        with pytest.raises(Stop):
            same(model, wanted)
        assert same(model, wanted)


def test_what_cannot_be_cut_is_drafted_for_by_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No affine codes with more bits than the draft's: 4 of 4, mxfp4, none at all; and experts; and float16, where
    scales that are cast and then divided may be others than those that are cast. No model is opened anew to see it."""
    monkeypatch.delattr(nested_layers, "open_again")
    cases: list[tuple[str, dict[str, Any] | None, int, str | None]] = [
        ("qwen3", {"bits": 4, "group_size": 32}, 4, None),
        ("qwen3", {"bits": 4, "group_size": 32, "mode": "mxfp4"}, 2, None),
        ("qwen3", None, 3, None),
        ("qwen3_moe", {"bits": 4, "group_size": 32}, 2, None),
        ("qwen3", {"bits": 4, "group_size": 32}, 2, "float16"),
    ]
    for n, (model_type, quantize, bits, dtype) in enumerate(cases):
        folder = zoo.save_checkpoint(model_type, tmp_path / str(n), quantize=quantize)
        prepared = prepare(folder, memory="1GB", resident=0, context=320, draft=f"self:{bits}", dtype=dtype)
        assert not any(nested_modules(prepared.profile.lazy.model)) and prepared.profile.lazy.reshape is None


@pytest.mark.parametrize("kind", [LORA, DORA])
def test_an_adapted_model_drafts_for_itself(folder: Path, tmp_path: Path, kind: str) -> None:
    """DoRA looks at the weights of what it wraps, so codes of it cannot be cut."""
    adapter = str(save_adapter(folder, tmp_path / "adapter", kind, keys=["mlp.up_proj"], layers=2))
    theirs = mlx_lm.utils.load_adapters(mlx_lm.utils.load_model(folder)[0], adapter).eval()
    steps = generate_step(mx.array(IDS), theirs, max_tokens=6, prefill_step_size=16)
    wanted = [(int(token), logprobs) for token, logprobs in steps]
    options: dict[str, Any] = {"memory": "1GB", "resident": 0, "context": 64, "govern": False}
    model, _ = outcore.load_model(folder, draft="self:2", adapter_path=adapter, **options)
    with model.outcore as session:
        assert session.plan.streamed and same(model, wanted) and session.metrics.drafted


def test_memory_is_counted_once(folder: Path) -> None:
    options: dict[str, Any] = {"memory": "1GB", "resident": 0, "context": 64}
    nested, plain = (prepare(folder, draft=d, **options) for d in ("self:2", "none"))
    size = nested.profile.size
    whole = plain.profile.size.non_layer + sum(each.resident for each in plain.profile.size.layers)
    held = size.non_layer + sum(each.resident for each in size.layers)
    assert held == whole
    # Also where it is computed in another dtype than it lies in.
    options["dtype"] = "bfloat16"
    nested, plain = (prepare(folder, draft=d, **options) for d in ("self:2", "none"))
    sizes = [p.profile.size for p in (nested, plain)]
    held, whole = (size.non_layer + sum(each.resident for each in size.layers) for size in sizes)
    assert held == whole
    layer = replace(size.layers[0])
    assert layer.joined == sum(
        m.joined_bytes for m in nested.profile.layers[0].module.modules() if isinstance(m, NestedLinear)
    )
    assert nested.profile.size.layers[0].kind == plain.profile.size.layers[0].kind


@pytest.mark.parametrize("draft", ["self:2", "model"])
def test_a_draft_is_given_up_before_the_text(draft: str, folder: Path, tmp_path: Path) -> None:
    """In the middle of an answer, whose memory goes to others: the text goes on, on the same tokens."""
    wanted = expected(folder, 9)
    if draft == "model":
        draft = str(zoo.save_checkpoint("qwen3", tmp_path / "other", seed=1))
    options: dict[str, Any] = {"memory": "1GB", "resident": 1, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft=draft, govern=False, **options)
    with model.outcore as session:
        residency, found = session.residency, []
        weights = residency.layers.draft.draft.weights
        assert weights > 0 == residency.layers.shrink(1)  # layers that are whole go first
        for n, r in enumerate(outcore.stream_generate(model, TokensOnly(), IDS, max_tokens=9, prefill_step_size=16)):
            found.append(r)
            if n == 2:
                assert residency.layers.shed(1) == 1 and residency.layers.movable()[0] == weights
            if n == 4:
                before = mx.get_active_memory()
                assert residency.layers.shrink(weights) > 0
                gc.collect()
                assert before - mx.get_active_memory() > weights / 4
                assert session.drafting.name == "ngram" and residency.layers.draft is None
                assert "self" not in repr(session.plan)
        assert [r.token for r in found] == [token for token, _ in wanted]
        assert all(mx.array_equal(r.logprobs, w).item() for r, (_, w) in zip(found, wanted, strict=True))
        assert session.plan.peak_bytes <= session.plan.budget_bytes
        # What was shed comes back, and goes again.
        short = expected(folder, 4)
        assert residency.layers.regrow(1) == 1 and same(model, short)
        residency.layers.note_arrivals()
        assert len(session.plan.resident) == 1
        assert residency.layers.shed(1) == 1 and same(model, short)


@pytest.mark.parametrize("gone", [False, True])
def test_a_draft_with_files_of_another_model_is_not_given_up(
    gone: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """High bits would be read from them that are not the model's."""
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    wanted = expected(folder, 4)
    options: dict[str, Any] = {"memory": "1GB", "resident": 0, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft="self:2", govern=False, **options)
    with model.outcore as session:
        file = next((tmp_path / "cache").glob("draft-*/layer_0001.safetensors"))
        if gone:
            file.unlink()
        else:
            with file.open("r+b") as f:
                f.seek(4096)
                f.write(bytes(4096))
        assert session.residency.layers.give_up_draft() == 0 and session.residency.layers.draft is None
        assert session.drafting.name == "self:2" and same(model, wanted)


@pytest.mark.parametrize(
    ("where", "error"),
    [("FileReader", OSError(5, "Input/output error")), ("Ring", KeyboardInterrupt()), ("forget", KeyboardInterrupt()),
     ("make_resident", OSError(5, "Input/output error"))],
)  # fmt: skip
def test_what_breaks_off_giving_up_changes_no_answer(
    where: str, error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(folder, 4)
    options: dict[str, Any] = {"memory": "1GB", "resident": 0, "context": 64, "prefill_step_size": 16}
    model, _ = outcore.load_model(folder, draft="self:2", govern=False, **options)

    def broken(*_: Any, **__: Any) -> None:
        raise error

    with model.outcore as session:
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(binding if where == "FileReader" else engine, where, broken)
            session.residency.layers.give_up_draft()
        assert session.drafting.name == "ngram" and same(model, wanted)
        assert session.residency.layers.regrow(1) == 1 and same(model, wanted)
