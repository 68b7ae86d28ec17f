"""The token loop: mlx-lm's own tokens, one sweep a token, and mlx-lm's functions over a streamed model."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import psutil
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.perplexity import eval_ppl
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import outcore
import zoo
from outcore import ClosedError, PromptError, UsageError
from outcore.decode.passes import chunks
from outcore.decode.preparation import prepare
from outcore.plan import planner
from outcore.plan.model_size import ModelSize
from stand_ins import TokensOnly

PROMPT = "def f(x):\n    "


@pytest.fixture(scope="module")
def served(quick_models: Callable[[int], Path]) -> Path:
    """Four layers, two of them recurrent."""
    return quick_models(4)


@pytest.fixture(scope="module")
def resident(served: Path) -> tuple[nn.Module, Any]:
    model, tokenizer = mlx_lm.load(str(served))
    return model, tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    # Tiny random models' texts may end anywhere; only their tokens count.
    found = mlx_lm.utils.load_tokenizer(demo_model)
    found.eos_token_ids = set()
    return found


@pytest.fixture(scope="module")
def streamed(served: Path) -> Iterator[tuple[nn.Module, Any]]:
    """The tests of what memory holds stand before those that share this one."""
    model, tokenizer = outcore.load(str(served), memory="60MB", resident=1, context=400, draft="none", govern=False)
    yield model, tokenizer
    model.outcore.close()


def ids(responses: Iterator[Any]) -> list[int]:
    return [r.token for r in responses]


@pytest.mark.parametrize("prompt_tokens", [5, 60])
def test_the_budget_holds_while_generating(served: Path, prompt_tokens: int) -> None:
    weights = (served / "model.safetensors").stat().st_size
    options: dict[str, Any] = {"context": prompt_tokens + 8, "prompt": prompt_tokens}
    least = prepare(served, memory=1, least=True, **options).planning.smallest
    gc.collect()
    others = mx.get_active_memory()  # other tests' models
    mx.clear_cache()
    mx.reset_peak_memory()
    model, tokenizer = outcore.load(str(served), memory=least + 100_000, **options)
    with model.outcore as session:
        assert session.plan.streamed and session.plan.peak_bytes <= least + 100_000
        prompt = [7 + i % 90 for i in range(prompt_tokens)]
        assert len(ids(outcore.stream_generate(model, tokenizer, prompt, max_tokens=4))) == 4
        assert mx.get_peak_memory() + mx.get_cache_memory() - others <= least + 100_000
    assert mx.get_peak_memory() - others < weights


@pytest.mark.parametrize(
    "options",
    [
        {"resident": 3},
        {"resident": 4, "head_resident": False},
        {"parts": True, "resident": 0},
    ],
    ids=str,
)
def test_a_prompt_of_many_chunks_keeps_to_the_plan(
    served: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks so short that a version of a layer's cache for each of them would be more than there is to spare.
    options = options | {"context": 84, "prompt": 80, "prefill_step_size": 4, "cpu_streams": 1, "draft": "none"}
    if options.pop("parts", False):
        unit_sizes = planner.unit_sizes
        monkeypatch.setattr(planner, "unit_sizes", lambda *args: unit_sizes(*args)[-1:])
    planned = prepare(served, memory="60MB", **options).plan
    gc.collect()
    others = mx.get_active_memory()
    # MLX takes what its limit allows, so that is what was planned.
    model, tokenizer = outcore.load(str(served), memory=planned.peak_bytes, govern=False, **options)
    with model.outcore as session:
        assert session.plan.peak_bytes == planned.peak_bytes and session.plan.streams
        assert session.streaming is not None
        graph = replace(session.size.graph(True), most=2**40)  # all chunks in one sweep
        monkeypatch.setattr(ModelSize, "graph", lambda *_: graph)
        mx.reset_peak_memory()
        prompt = [7 + i % 90 for i in range(80)]
        assert len(ids(outcore.stream_generate(model, tokenizer, prompt, max_tokens=2))) == 2
        assert mx.get_peak_memory() - others <= planned.peak_bytes
        assert session.metrics.sweeps == 2


def test_a_model_that_is_dropped_frees_memory_threads_and_files(served: Path) -> None:
    gc.collect()
    before, files = mx.get_active_memory(), psutil.Process().num_fds()
    for rebound in (False, True):
        model, tokenizer = outcore.load(str(served), memory="15MB", draft="none", resident=0, context=64, prompt=16)
        list(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=2))
        assert psutil.Process().num_fds() > files
        if rebound:
            ring = weakref.ref(model.outcore.streaming.ring)
            model.outcore.residency.layers.shrink(10**12)
            gc.collect()
            assert ring() is None
        there = weakref.ref(model)
        del model  # the fixture that every test uses sees to it that no thread is left
        gc.collect()
        assert there() is None
        assert mx.get_active_memory() - before < 100_000
        assert psutil.Process().num_fds() == files


def files_open(folder: Path) -> list[str]:
    """Of a folder; other files of the process may be closed whenever garbage of other tests is collected."""
    return [f.path for f in psutil.Process().open_files() if Path(f.path).is_relative_to(folder.resolve())]


def test_a_model_that_is_closed_frees_its_slots_and_files_and_says_so(served: Path) -> None:
    model, tokenizer = outcore.load(str(served), memory="60MB", resident=0, context=64, prompt=16, draft="none")
    list(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=2))
    before, plan = mx.get_active_memory(), model.outcore.plan
    assert files_open(served)
    model.outcore.close()
    assert before - mx.get_active_memory() >= plan.slots * plan.slot_bytes
    assert not files_open(served)
    model.outcore.close()
    with pytest.raises(ClosedError):
        list(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=3))


def test_greedy_tokens_and_text_equal_mlx_lms(resident: Any, streamed: Any) -> None:
    theirs = list(mlx_lm.stream_generate(*resident, PROMPT, max_tokens=8))
    ours = list(outcore.stream_generate(*streamed, PROMPT, max_tokens=8))
    assert ids(iter(ours)) == ids(iter(theirs))
    assert [r.text for r in ours] == [r.text for r in theirs]
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]
    assert [r.prompt_tokens for r in ours] == [r.prompt_tokens for r in theirs]
    assert [r.generation_tokens for r in ours] == [r.generation_tokens for r in theirs]
    assert all(mx.array_equal(a.logprobs, b.logprobs).item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("prompt_tokens", [1, 2, 17])
def test_one_pass_for_the_prompt_and_one_a_token(
    streamed: Any, prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = streamed
    monkeypatch.setattr(model.outcore, "drafting", None)
    metrics = model.outcore.metrics
    prompt = [5 + i % 50 for i in range(prompt_tokens)]
    seen, sweeps, units, misses = [], metrics.sweeps, metrics.units, metrics.misses
    for _ in outcore.stream_generate(model, tokenizer, prompt, max_tokens=4, prefill_step_size=7):
        seen.append(metrics.sweeps - sweeps)
    # The prompt's sweep gives the first token, and nothing is computed after the last.
    assert seen == [1, 2, 3, 4]
    assert metrics.units - units == 4 * len(model.outcore.plan.streamed) > 0
    assert metrics.misses == misses


@pytest.mark.parametrize("step", [1, 5, 2048])
def test_prompt_chunks_equal_mlx_lms_with_the_same_step(resident: Any, streamed: Any, step: int) -> None:
    prompt = [7 + i % 90 for i in range(13)]
    theirs = ids(mlx_lm.stream_generate(*resident, prompt, max_tokens=4, prefill_step_size=step))
    assert ids(outcore.stream_generate(*streamed, prompt, max_tokens=4, prefill_step_size=step)) == theirs


def test_chunks_are_mlx_lms() -> None:
    cut = [(s.start, s.stop) for s in chunks(10, 4)]
    assert cut == [(0, 4), (4, 8), (8, 9), (9, 10)]
    assert [(s.start, s.stop) for s in chunks(1, 4)] == [(0, 1)]


def test_sampling_with_a_seed_equals_mlx_lms(resident: Any, streamed: Any) -> None:
    def run(pair: Any, stream_generate: Any) -> list[int]:
        mx.random.seed(11)
        return ids(stream_generate(*pair, PROMPT, max_tokens=6, sampler=make_sampler(0.8, 0.95, top_k=40)))

    assert run(streamed, outcore.stream_generate) == run(resident, mlx_lm.stream_generate)


def test_logits_processors_see_the_same_tokens(resident: Any, streamed: Any) -> None:
    def run(pair: Any, stream_generate: Any) -> tuple[list[int], list[list[int]]]:
        seen: list[list[int]] = []

        def spy(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())  # type: ignore[arg-type]
            return logits

        processors = [*make_logits_processors({5: 2.0}, repetition_penalty=1.3), spy]
        return ids(stream_generate(*pair, PROMPT, max_tokens=6, logits_processors=processors)), seen

    ours, ours_seen = run(streamed, outcore.stream_generate)
    theirs, theirs_seen = run(resident, mlx_lm.stream_generate)
    assert ours == theirs
    # mlx-lm looks a step ahead, so its processors see one step more.
    assert ours_seen == theirs_seen[: len(ours_seen)]


def test_quantized_cache_equals_mlx_lms(resident: Any, streamed: Any) -> None:
    options = {"max_tokens": 5, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4, "prefill_step_size": 6}
    theirs = ids(mlx_lm.stream_generate(*resident, PROMPT * 2, **options))
    assert ids(outcore.stream_generate(*streamed, PROMPT * 2, **options)) == theirs


def test_a_prompt_cache_goes_on_where_it_was(resident: Any, streamed: Any) -> None:
    def run(pair: Any, stream_generate: Any) -> list[int]:
        cache = make_prompt_cache(pair[0])
        first = ids(stream_generate(*pair, PROMPT, max_tokens=5, prompt_cache=cache))
        # What was generated last is in mlx-lm's cache and not in ours, so both go on from fresh text.
        return first

    assert run(streamed, outcore.stream_generate) == run(resident, mlx_lm.stream_generate)


def test_mlx_lms_own_loop_runs_the_streamed_model(resident: Any, streamed: Any) -> None:
    theirs = ids(mlx_lm.stream_generate(*resident, PROMPT, max_tokens=8))
    assert ids(mlx_lm.stream_generate(*streamed, PROMPT, max_tokens=8)) == theirs


def test_mlx_lms_perplexity_equals_the_resident_models(resident: Any, streamed: Any) -> None:
    text = Path(outcore.__file__).read_text()
    tokens = resident[1].encode(text)[: 4 * 9]
    data = mx.array(tokens).reshape(4, 9)
    before = streamed[0].outcore.metrics.sweeps
    assert eval_ppl(streamed[0], data, batch_size=4) == eval_ppl(resident[0], data, batch_size=4)
    assert streamed[0].outcore.metrics.sweeps == before + 1, "one sweep serves the whole batch"


def test_mlx_lms_batch_generator_runs_the_streamed_model(resident: Any, streamed: Any) -> None:
    def run(model: nn.Module) -> dict[int, list[int]]:
        batch = BatchGenerator(model, max_tokens=4)
        out: dict[int, list[int]] = {uid: [] for uid in batch.insert([[5, 6, 7], [9, 8, 7, 6, 5], [40]])}
        while responses := batch.next_generated():
            for r in responses:
                out[r.uid].append(r.token)
        batch.close()
        return out

    assert list(run(streamed[0]).values()) == list(run(resident[0]).values())


def test_everything_resident_is_plain_mlx_lm(served: Path, resident: Any) -> None:
    model, tokenizer = outcore.load(str(served), memory="1GB", cpu_streams=1)
    assert model.outcore.streaming is None
    assert type(model) is type(resident[0])
    assert {type(m) for m in model.modules()} == {type(m) for m in resident[0].modules()}
    assert ids(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=6)) == ids(
        mlx_lm.stream_generate(*resident, PROMPT, max_tokens=6)
    )


def test_stopping_early_leaves_the_model_usable(streamed: Any) -> None:
    model, tokenizer = streamed
    whole = ids(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=6))
    run = outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=6)
    assert [next(run).token for _ in range(2)] == whole[:2]
    run.close()  # type: ignore[attr-defined]
    assert ids(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=6)) == whole


def test_an_exception_inside_a_pass_leaves_the_model_usable(streamed: Any) -> None:
    model, tokenizer = streamed
    whole = ids(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=4))
    for unit in (1, 3, 5):
        calls = 0

        def interrupt(unit: int = unit) -> None:
            nonlocal calls
            calls += 1
            if calls == unit:
                raise KeyboardInterrupt

        model.outcore.streaming.after_unit.append(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                list(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=4))
        finally:
            model.outcore.streaming.after_unit.remove(interrupt)
        assert ids(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=4)) == whole


@pytest.mark.parametrize("model_type", ["dbrx", "gemma3n", "nanbeige", "kimi_k3"])
def test_unusual_models_make_mlx_lms_tokens(model_type: str, tmp_path: Path, tokenizer: Any) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    theirs, _ = mlx_lm.utils.load_model(folder)
    ours, _ = outcore.load_model(folder, memory="1GB", resident=1, context=64, draft="none", govern=False)
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    with ours.outcore as session:
        assert session.plan.streamed
        expected = ids(mlx_lm.stream_generate(theirs, tokenizer, prompt, max_tokens=4, prefill_step_size=4))
        got = ids(outcore.stream_generate(ours, tokenizer, prompt, max_tokens=4, prefill_step_size=4))
        assert got == expected


def test_prompts_that_cannot_be_had_are_refused(streamed: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        list(outcore.stream_generate(*streamed, [], max_tokens=3))
    with pytest.raises(PromptError, match="context=1000400"):
        list(outcore.stream_generate(*streamed, [5] * 400, max_tokens=1_000_000))
    with pytest.raises(UsageError, match="max_tokens"):
        list(outcore.stream_generate(*streamed, [5], max_tokens=0))


def test_no_limit_on_tokens_means_the_planned_context(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = streamed
    monkeypatch.setattr(model.outcore, "plan", replace(model.outcore.plan, context=12))
    got = list(outcore.stream_generate(model, tokenizer, PROMPT, max_tokens=-1))
    assert got[-1].finish_reason == "stop" or got[-1].prompt_tokens + got[-1].generation_tokens == 12


@pytest.mark.parametrize("how", ["cache", "draft"])
def test_no_limit_on_tokens_of_a_model_in_memory_means_none(how: str, served: Path) -> None:
    """As with mlx-lm's own loop, which does not go on with a cache that is looked at, or with drafts."""
    model, _ = outcore.load(str(served), memory="200MB", draft="ngram" if how == "draft" else "none", context=10)
    with model.outcore as session:
        assert not session.plan.streams
        given = {"prompt_cache": make_prompt_cache(model)} if how == "cache" else {}
        text = outcore.stream_generate(model, TokensOnly(), [5, 6, 7], max_tokens=-1, **given)
        assert len(list(itertools.islice(text, 12))) == 12


def test_what_mlx_lm_answers_beyond_a_models_length_is_answered_with_a_note(tmp_path: Path, tokenizer: Any) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    prompt = [5 + i % 50 for i in range(40)]
    for more, noted in (({}, True), ({"rope_scaling": scaling}, False)):
        (folder / "config.json").write_text(json.dumps(config | more))
        theirs = ids(mlx_lm.stream_generate(mlx_lm.utils.load_model(folder)[0], tokenizer, prompt, max_tokens=3))
        model, _ = outcore.load_model(folder, memory="1GB", resident=1, context=64, draft="none")
        with model.outcore as session:
            assert session.max_context == (64 if more else 32)
            assert ids(outcore.stream_generate(model, tokenizer, prompt, max_tokens=3)) == theirs
            got = outcore.batch_generate(model, tokenizer, [prompt], max_tokens=3, return_token_ids=True)
            assert got.token_ids == [theirs]
            assert any("40 tokens; this model was made for 32" in note for note in session.notes) == noted


def test_a_model_without_further_positions_refuses_and_ends_there(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = 24
    monkeypatch.setitem(zoo.CONFIGS, "gpt2", zoo.CONFIGS["gpt2"] | {"n_positions": positions, "n_ctx": positions})
    folder = zoo.save_checkpoint("gpt2", tmp_path / "model")
    model, _ = outcore.load_model(folder, memory="1GB", resident=1, context=positions, draft="none")
    with model.outcore:
        prompt = [5 + i % 50 for i in range(positions - 2)]
        for most in (10, -1):
            # The last of the three is not computed.
            assert len(ids(outcore.stream_generate(model, tokenizer, prompt, max_tokens=most))) == 3
        for call in (lambda p: list(outcore.stream_generate(model, tokenizer, p)),
                     lambda p: outcore.batch_generate(model, tokenizer, [p])):  # fmt: skip
            with pytest.raises(PromptError, match=f"this model's context is {positions}"):
                call([5] * (positions + 1))
