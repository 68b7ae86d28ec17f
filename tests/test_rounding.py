"""Where kernels round several rows otherwise than one, drafted tokens are computed apart; texts are where chosen."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import outcore
import zoo
from outcore.decode import one_text, preparation, rounding
from outcore.decode.batch import answers, make_room
from outcore.decode.batch_decoder import BatchDecoder
from outcore.decode.model_runner import ModelRunner
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.speculative_decoder import SpeculativeDecoder
from outcore.plan.joint_plan import MOST, NGRAM, Draft, Planning
from outcore.plan.workload import Workload
from stand_ins import Oracle
from test_continuous import ONE, PROMPTS, endless, write
from test_drafted_batches import Noted, assert_bits, plainly
from test_planning import sized
from test_speculate import NINE, plain_answer, tokens, with_oracle

LENGTHS = [6, 9, 4, 8, 5]
LOADED: dict[str, Any] = {"resident": 0, "context": 64, "prompt": 9, "govern": False}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_tried": {}, "ROWS": 5, "CONTEXTS": (3, 9)}.items():
        monkeypatch.setattr(rounding, name, value)


def row_by_row(module: Any, x: mx.array, more: float) -> mx.array:
    """A product of which each row is computed by itself, and three rows together are larger by ``more``."""
    rows = [real_product(module, x[:, i : i + 1]) for i in range(x.shape[1])]
    return mx.concatenate(rows, axis=1) + more * (len(rows) == 3)


def real_product(module: Any, x: mx.array) -> mx.array:
    if "scales" not in module:
        return x @ module["weight"].T
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return mx.quantized_matmul(x, module["weight"], module["scales"], module.get("biases"), True, **how)


def attending(more: float) -> Callable[..., mx.array]:
    """The same for attention, where each row sees one key more than the row before it."""
    real = mx.fast.scaled_dot_product_attention

    def run(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any) -> mx.array:
        n, before = q.shape[2], k.shape[2] - q.shape[2] + 1
        rows = [real(q[:, :, i : i + 1], k[:, :, : before + i], v[:, :, : before + i], scale=scale) for i in range(n)]
        return mx.concatenate(rows, axis=2) + more * (n == 3)

    return run


@pytest.mark.parametrize(
    "quantize", [None, {"bits": 4, "group_size": 32}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}]
)
def test_a_planted_difference_is_found_and_no_weight_is_read(
    quantize: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model", quantize=quantize)
    profile = prepare(folder).profile
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 0)
    found, drawn = {}, []
    for where in ("nowhere", "product", "attention"):
        for cls, name in ((nn.Linear, "__call__"), (nn.QuantizedLinear, "__call__"), (nn.Embedding, "as_linear"),
                          (nn.QuantizedEmbedding, "as_linear")):  # fmt: skip
            more = 1e-2 * (where == "product")
            monkeypatch.setattr(cls, name, lambda module, x, more=more: row_by_row(module, x, more))
        with monkeypatch.context() as only:
            only.setattr(mx.fast, "scaled_dot_product_attention", attending(1e-2 * (where == "attention")))
            only.setattr(rounding, "_tried", {})
            mx.random.seed(3)
            found[where] = rounding.rows_differ(profile), rounding.rows_differ(profile)
            drawn.append(mx.random.normal((2,)).tolist())
    assert found == {"nowhere": (False, False), "product": (True, True), "attention": (True, True)}
    mx.random.seed(3)
    assert drawn == [mx.random.normal((2,)).tolist()] * 3


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama", "mixtral", "deepseek_v3"])
def test_what_is_not_tried_counts_as_different(model_type: str, tmp_path: Path) -> None:
    """Recurrences, windows, experts, attention of the model's own code."""
    profile = prepare(zoo.save_checkpoint(model_type, tmp_path / "model")).profile
    assert rounding.rows_differ(profile) and not rounding._tried


@pytest.mark.parametrize(("differ", "resident"), [(True, 0), (False, 0), (True, None)])
def test_drafted_tokens_have_a_pass_each_where_rows_differ_and_something_is_streamed(
    differ: bool, resident: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is no CPU, for all that decoding knows, and whose answer for several rows is a lie."""
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    plain = plain_answer(folder, NINE, 10)
    done = list[str]()
    monkeypatch.setattr(preparation, "keep_kernels", lambda: done.append("cache of kernels"))
    monkeypatch.setattr(preparation, "rows_differ", lambda _: done.append("kernels") or differ)
    monkeypatch.setattr(one_text, "on_cpu", lambda: False)
    monkeypatch.setattr(preparation, "on_cpu", lambda: False)
    monkeypatch.setattr("outcore.decode.loader.on_cpu", lambda: False)
    model, _ = outcore.load_model(folder, draft="ngram", **(LOADED | {"resident": resident}))
    rows = list[int]()
    forward = ModelRunner._forward

    def noted(self: ModelRunner, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows.append(ids.size)
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "_forward", noted)
    with model.outcore as session:
        with_oracle(monkeypatch, Oracle([*NINE, *plain], 3), 7)
        assert tokens(model, NINE, 10) == plain
        assert session.metrics.accepted > 3 and session.metrics.sweeps < 9
        assert session.profile.rounding.rows_differ == differ and done == ["cache of kernels", "kernels"]
    verifying = rows[rows.index(1) + 1 :]  # behind the prompt, whose last token is a pass
    assert (set(verifying) == {1}) == (differ and resident == 0)
    assert prepare(folder, draft="ngram", **LOADED).planning.blocks == (not differ)


def test_as_many_passes_as_there_is_memory_for_their_graphs() -> None:
    size = sized(logits=6)
    size = replace(size, layers=size.layers * 25)
    most = size.graph(on_cpu=False).readings([1] * (MOST + 1), size.context)[0] - 1
    assert 1 < most < MOST
    planning = Planning(size, NGRAM, Draft(NGRAM, NGRAM), {"resident": 0}, blocks=False, most=most)
    assert planning.at(1 << 40).size.drafted == most


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@functools.cache
def alone(folder: Path) -> list[Any]:
    """What mlx-lm says to each prompt."""
    return plainly(folder, PROMPTS, max(LENGTHS))


@pytest.mark.parametrize(("exact", "resident"), [(True, 1), (True, None), (False, 1)])
def test_texts_that_come_and_go_have_passes_of_their_own_where_that_is_chosen(
    exact: bool, resident: int | None, llama: Path
) -> None:
    expected = alone(llama)
    options = {"resident": resident, "context": 64, "draft": "none", "exact_batch": exact, **ONE}
    model, _ = outcore.load_model(llama, memory="200MB", **options)
    with model.outcore as session:
        engine = Noted(model, prefill_step=4)
        ask = [Request(i, p, n, scores=True) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
        done = write(engine, {0: ask[:2], 2: [ask[2]], 3: ask[3:]}, {5: [3]})
        assert not done.failed and not done.full and done.most > 3
        assert (BatchDecoder in engine.kinds) != exact and SpeculativeDecoder in engine.kinds
        assert session.metrics.sweeps < sum(LENGTHS) or resident is None
        for i, want in enumerate(expected) if exact else ():
            assert_bits(engine.told[i], want)
        engine.close()


def test_a_batch_has_passes_of_its_own_for_each_text_where_that_is_chosen(
    llama: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(llama)
    monkeypatch.setattr(BatchDecoder, "__init__", lambda *_: pytest.fail("texts share rows of one cache"))
    model, _ = outcore.load_model(llama, resident=1, context=64, draft="none", exact_batch=True, **ONE)
    with model.outcore as session:
        requests = [Request(i, p, n, logprobs=0) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
        make_room(model, Workload(tuple((len(r.tokens), r.max_tokens) for r in requests), least=4))
        session.metrics.reset()
        found = {a.request.uid: a for a in answers(model, endless(demo_model), requests, prefill_step=4)}
        assert session.metrics.sweeps < sum(LENGTHS) / 2
    for i, want in enumerate(expected):
        pairs = [(token, logprobs[token].item()) for token, logprobs in want[: LENGTHS[i]]]
        assert list(zip(found[i].tokens, found[i].logprobs, strict=True)) == pairs
