"""Many sequences a sweep: the tokens that each has alone, one sweep a token, and the budget kept."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
from mlx_lm.sample_utils import make_logits_processors

import outcore
import zoo
from outcore import BudgetError, PromptError, UsageError
from outcore.decode.batch import Progress, answers
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.sampling import own_sampler
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.planner import make_plan
from outcore.plan.workload import Workload
from stand_ins import TokensOnly
from test_plan import model as sized

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [20], [30 + i for i in range(14)], [50, 51, 52], [60 + i for i in range(6)]]
LENGTHS = [4, 9, 6, 3, 8]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return mlx_lm.utils.load_tokenizer(demo_model)


@pytest.fixture(scope="module")
def short(quick_models: Any) -> Path:
    """Three layers, of which the second has attention."""
    return Path(quick_models(3))


def alone(model: Any, tokenizer: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[tuple[int, float]]:
    """The plain loop's tokens, and by how much each was likelier than the next."""
    found = []
    for r in outcore.stream_generate(model, tokenizer, list(prompt), max_tokens=tokens, **options):
        best = mx.sort(r.logprobs)[-2:].tolist()
        found.append((r.token, best[1] - best[0]))  # type: ignore[index, operator]
    return found


def assert_same(got: Sequence[int], expected: Sequence[tuple[int, float]]) -> None:
    """Equal, or they part where two tokens are equally likely up to rounding: kernels for several rows add up in
    another order."""
    for token, (wanted, lead) in zip(got, expected, strict=True):
        if token != wanted:
            assert lead < 1e-4
            return


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe", "gpt_oss"])
def test_each_sequence_gets_the_tokens_that_it_gets_alone(model_type: str, tmp_path: Path, tokenizer: Any) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    options: dict[str, Any] = {"context": 32, "dtype": "float32", "cpu_streams": 1, "prefill_step_size": 4}
    model, _ = outcore.load_model(folder, memory="1GB", resident=1, sequences=3, **options)
    with model.outcore as session:
        expected = [alone(model, tokenizer, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
        before = session.metrics.sweeps
        requests = [Request(i, p, n) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
        progress = Progress()
        for answer in answers(model, tokenizer, requests, progress=progress, prefill_step=4):
            assert_same(answer.tokens, expected[answer.request.uid])
        # Three at once, whoever is longest first: 20 and 9 and 14 and 10, then 4 and 6 fill what is left.
        assert session.metrics.sweeps - before == progress.sweeps <= 13
        assert progress.generation_tokens == sum(len(e) for e in expected)
        assert progress.prompt_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "dbrx", "llama4"])
def test_sequences_that_cannot_share_run_one_by_one(model_type: str, tmp_path: Path, tokenizer: Any) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    model, _ = outcore.load_model(folder, memory="1GB", resident=1, sequences=4, context=32)
    with model.outcore as session:
        assert session.size.sequences == 1 and "one after the other" in session.notes[-1]
        expected = [[t for t, _ in alone(model, tokenizer, p, 4)] for p in PROMPTS[:3]]
        got = outcore.batch_generate(model, tokenizer, PROMPTS[:3], max_tokens=4, return_token_ids=True)
        assert got.token_ids == expected


def test_a_resident_model_makes_mlx_lms_tokens(short: Path, tokenizer: Any) -> None:
    theirs = mlx_lm.batch_generate(
        mlx_lm.load(str(short))[0], tokenizer, PROMPTS, max_tokens=LENGTHS, return_token_ids=True
    )
    model, _ = outcore.load_model(short, memory="300MB", context=64, prompt=16)
    with model.outcore as session:
        ours = outcore.batch_generate(model, tokenizer, PROMPTS, max_tokens=LENGTHS, return_token_ids=True)
        assert session.streaming is None and session.size.sequences > 1
        assert ours.token_ids == theirs.token_ids and ours.texts == theirs.texts


def test_a_model_loaded_for_one_sequence_makes_room_for_several(short: Path, tokenizer: Any) -> None:
    # Given a model that is all in memory, and no room beside it.
    options: dict[str, Any] = {"context": 32, "prompt": 16, "govern": False, "draft": "none"}
    budget = prepare(short, memory="1GB", **options).plan.peak_bytes
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    model, _ = outcore.load_model(short, memory=budget, **options)
    with model.outcore as session:
        assert session.streaming is None
        expected = [[t for t, _ in alone(model, tokenizer, p, 4)] for p in PROMPTS]
        gc.collect()
        mx.reset_peak_memory()
        got = outcore.batch_generate(model, tokenizer, PROMPTS, max_tokens=4, return_token_ids=True)
        assert got.token_ids == expected
        assert mx.get_peak_memory() - others <= session.plan.budget_bytes
        assert session.size.sequences > 1 and session.plan.streams
        assert got.stats.generation_tokens == sum(map(len, expected)) and got.stats.prompt_tokens == 33
        assert session.plan.peak_bytes <= session.plan.budget_bytes


def test_prompts_that_are_longer_than_planned_are_read_in_parts(tmp_path: Path) -> None:
    folder, prompts = (
        zoo.save_checkpoint("llama", tmp_path / "m"),
        [[5 + i * 7 % 90 for i in range(n)] for n in (99, 9)],
    )
    options: dict[str, Any] = {"context": 128, "prompt": 16, "govern": False, "draft": "none"}
    memory = prepare(folder, memory=1, least=True, **options).planning.smallest
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = outcore.load_model(folder, memory=memory, **options)
    with model.outcore:
        batch = outcore.batch_generate(model, TokensOnly(), prompts, max_tokens=2, return_token_ids=True)
        assert mx.get_peak_memory() + mx.get_cache_memory() - before <= memory
        alone = [outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=2) for prompt in prompts]
        assert batch.token_ids == [[r.token for r in each] for each in alone]


def test_what_mlx_lms_function_takes_and_gives(short: Path, tokenizer: Any, capsys: Any) -> None:
    theirs, _ = mlx_lm.load(str(short))
    assert outcore.batch_generate(theirs, tokenizer, PROMPTS[:2], max_tokens=3).texts  # not loaded by us: mlx-lm's own
    model, _ = outcore.load_model(short, memory="60MB", resident=1, context=64, prompt=16, sequences=2)
    with model.outcore:
        text = "def read_lines(path):\n"
        first = outcore.batch_generate(
            model, tokenizer, [text, PROMPTS[0]], max_tokens=[6, 4], verbose=True,
            return_prompt_caches=True, return_token_ids=True, return_logprobs=True,
        )  # fmt: skip
        assert "2/2" in capsys.readouterr().out
        assert first.token_ids[0] == [t for t, _ in alone(model, tokenizer, tokenizer.encode(text), 6)]
        assert [len(p) for p in first.logprobs] == [6, 4] and max(first.logprobs[0]) <= 0
        # A cache holds all but the last token, so that one begins what follows.
        longer = [t for t, _ in alone(model, tokenizer, PROMPTS[0], 7)]
        follow = [first.token_ids[0][-1:], first.token_ids[1][-1:]]
        for _ in range(2):  # the caches given are left as they are
            second = outcore.batch_generate(
                model, tokenizer, follow, first.caches, max_tokens=3, return_token_ids=True,
                logits_processors=make_logits_processors({0: 0.0}),
            )  # fmt: skip
            assert second.token_ids[1] == longer[4:]
        with pytest.raises(PromptError, match="prompt 1 is empty"):
            outcore.batch_generate(model, tokenizer, [[1], []])
        with pytest.raises(UsageError, match="as many of each"):
            outcore.batch_generate(model, tokenizer, [[1], [2]], max_tokens=[3])
        with pytest.raises(UsageError, match="max_tokens"):
            outcore.batch_generate(model, tokenizer, [[1]], max_tokens=0)
        with pytest.raises(BudgetError):
            outcore.batch_generate(model, tokenizer, [[1]], max_tokens=4_000_000)
        assert outcore.batch_generate(model, tokenizer, []).texts == []


def test_what_a_sequence_draws_does_not_depend_on_others_in_its_passes(short: Path, tokenizer: Any) -> None:
    model, _ = outcore.load_model(short, memory="60MB", resident=1, context=64, prompt=16, sequences=4)

    def request(i: int) -> Request:
        sampler = own_sampler(0.9, top_p=0.95, min_p=0.01, top_k=50, seed=i)
        processors = tuple(make_logits_processors({7: -3.0}, repetition_penalty=1.3, presence_penalty=0.2))
        return Request(i, PROMPTS[i], 4, sampler, processors if i % 2 else ())

    with model.outcore:
        together = {a.request.uid: a.tokens for a in answers(model, tokenizer, [request(i) for i in range(4)])}
        apart = {i: next(answers(model, tokenizer, [request(i)])).tokens for i in range(4)}
    assert together == apart


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("shared", "sampler"), ("resident", "shape"), ("one by one", "processor"),
    ],
)  # fmt: skip
def test_a_sampler_that_raises_ends_its_own_sequence_alone(kind: str, where: str, short: Path, tokenizer: Any) -> None:
    resident = 3 if kind.endswith("resident") else 1
    many = 1 if kind.startswith("one") else 4
    model, _ = outcore.load_model(
        short, memory="200MB", resident=resident, context=64, prompt=16, sequences=many, cpu_streams=1,
        draft="none",
    )  # fmt: skip

    def request(i: int, fails_at: int | None) -> Request:
        calls = 0

        def sampler(logprobs: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if where != "processor" and calls - 1 == fails_at:
                if where == "shape":
                    return mx.zeros((3, 2), mx.int32)
                raise ZeroDivisionError("by me")
            return mx.argmax(logprobs, axis=-1)

        def processor(tokens: mx.array, logits: mx.array) -> mx.array:
            if where == "processor" and calls == fails_at:
                raise ZeroDivisionError("by me")
            return logits * 0.9

        return Request(i, PROMPTS[i], 4, sampler, (processor,) if i != 2 or where == "processor" else ())

    with model.outcore as session:
        assert (session.streaming is None) == kind.endswith("resident")
        whole = {a.request.uid: a.tokens for a in answers(model, tokenizer, [request(i, None) for i in range(4)])}
        # The last: for a token that nobody gets, which mlx-lm's loops compute.
        for uid, at, fails in ((2, 0, True), (1, 3, True), (1, 4, False)):
            failed: dict[int, Exception] = {}
            found = answers(
                model, tokenizer, [request(i, at if i == uid else None) for i in range(4)],
                failed=lambda r, e, failed=failed: failed.update({r.uid: e}),  # type: ignore[misc]
            )  # fmt: skip
            got = {a.request.uid: a.tokens for a in found}
            assert got == {i: t for i, t in whole.items() if i != uid or not fails}
            assert list(failed) == ([uid] if fails else [])
            assert all(type(e) is (ValueError if where == "shape" else ZeroDivisionError) for e in failed.values())
        # Without anybody to tell, as mlx-lm: it ends everything, and what follows is as before.
        with pytest.raises(ValueError if where == "shape" else ZeroDivisionError):
            list(answers(model, tokenizer, [request(i, 2 if i == 1 else None) for i in range(4)]))
        again = {a.request.uid: a.tokens for a in answers(model, tokenizer, [request(i, None) for i in range(4)])}
        assert again == whole


def test_a_sequence_that_finds_no_more_memory_makes_room_for_others(
    short: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = outcore.load_model(
        short, memory="200MB", resident=1, context=64, prompt=16, sequences=3, cpu_streams=1, draft="none"
    )
    requests = [Request(i, PROMPTS[i], n) for i, n in enumerate(LENGTHS)]
    with model.outcore as session:
        whole = {a.request.uid: a.tokens for a in answers(model, tokenizer, requests)}
        reserve = session.residency.reserve

        def no_room(tokens: int, *args: Any) -> int:
            if tokens > 18:  # of the third, with 14 of a prompt, in the middle of its answer
                raise BudgetError("no room")
            return reserve(tokens, *args)

        monkeypatch.setattr(session.residency, "reserve", no_room)
        failed: list[int] = []
        found = answers(model, tokenizer, requests, failed=lambda r, e: failed.append(r.uid))
        assert {a.request.uid: a.tokens for a in found} == {i: t for i, t in whole.items() if i != 2}
        assert failed == [2]
        with pytest.raises(BudgetError):
            list(answers(model, tokenizer, requests))


def test_a_seed_is_repeatable_and_no_seed_is_not() -> None:
    logprobs = mx.zeros((1, 1000)) - 6.9

    def draw(seed: int | None) -> list[int]:
        sample = own_sampler(1.0, seed=seed)
        assert sample is not None
        return [int(sample(logprobs).item()) for _ in range(4)]

    assert draw(5) == draw(5) != draw(6)
    assert draw(None) != draw(None)
    assert own_sampler(0.0) is None


PEAKS: list[tuple[str, dict[str, Any], int, int]] = [
    ("short", {"resident": 2, "head_resident": False}, 9, 4),
    ("short", {"resident": 2, "prefill_step_size": 8}, 17, 3),
    ("short", {}, 9, 4),
    # Caches that grow past their first 256 tokens while others join.
    ("gemma3_text", {"resident": 1}, 250, 14),
]


@pytest.mark.parametrize(("name", "options", "prompt", "answer"), PEAKS, ids=str)
def test_the_peak_of_several_sequences_keeps_to_the_plan(
    name: str, options: dict[str, Any], prompt: int, answer: int, short: Path, tmp_path: Path, tokenizer: Any
) -> None:
    folder = short if name == "short" else zoo.save_checkpoint(name, tmp_path / "model")
    options = options | {"context": prompt + answer, "prompt": prompt, "sequences": 4, "cpu_streams": 1}
    planned = prepare(folder, memory="2GB", **options).plan
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    # MLX takes what its limit allows, so that is what was planned.
    model, _ = outcore.load_model(folder, memory=planned.peak_bytes, govern=False, **options)
    with model.outcore as session:
        assert session.plan.peak_bytes == planned.peak_bytes and session.size.sequences == 4
        mx.reset_peak_memory()
        rng = random.Random(3)
        # Some end early, so that others join while caches are there to be merged with.
        requests = [
            Request(i, [3 + (7 * j + i) % 90 for j in range(prompt - rng.randrange(3))], answer - rng.randrange(3))
            for i in range(6)
        ]
        progress = Progress()
        assert len(list(answers(model, tokenizer, requests, progress=progress))) == 6
        assert mx.get_peak_memory() - others <= planned.peak_bytes
        if session.streaming is not None:
            assert progress.sweeps <= 2 * answer


# How many sequences: numbers in, numbers out


def growing(context: int = 300) -> ModelSize:
    # Ten layers of 100 MB; 20 kB a token of caches in each of two layers, 1 MB that does not grow.
    size = replace(sized(context=context, prompt=100), growing=((20_000, None),) * 2, fixed=MB)
    return replace(size, cache=2 * 20_000 * (context + 256) + MB, logits=6 * 4 * 1000)


MB = 1_000_000


def test_all_sequences_are_counted() -> None:
    one = growing()
    for n in (2, 8, 32):
        several = replace(one, sequences=n)
        # Each grows from any length by whole steps; the largest is there three times while others join.
        assert several.caches(0) == n * (MB + 2 * 20_000 * (300 + 256)) + 2 * n * 20_000 * (300 + 256)
        # Before and after a step, where nothing is streamed.
        assert several.caches(1) == several.caches(0) + n * MB
        assert replace(several, shared=400).caches(0) < several.caches(0)
        assert several.activations(16) > one.activations(16) + (n - 1) * 4 * 1000 * 2
    # Of one only buffers that grow are copied, one layer's at a time.
    assert replace(one, sequences=1).caches(1) == one.cache + 20_000 * (300 + 256)
    assert replace(one, sequences=4, shared=900).at_context(2000).room == 2000
    windows = replace(one, growing=((20_000, 64),), sequences=4)
    assert windows.caches(0) - 4 * (one.cache - 64 * 20_000) == 3 * 4 * 64 * 20_000


def planner_for(budget: int) -> Any:
    return lambda size: make_plan(size, budget)


def test_more_memory_answers_sooner_and_never_with_a_worse_choice() -> None:
    workload = Workload(((60, 240),) * 100)
    before = None
    for budget in (500 * MB, 800 * MB, 1_600 * MB, 3_000 * MB):
        size, plan = workload.choose(growing(), planner_for(budget))
        seconds = workload.passes(size) * plan.token_s
        assert plan.peak_bytes <= budget
        for n in (1, 2, 4, 8, 16, 32):
            try:
                other = make_plan(replace(size, sequences=n, shared=n * 300), budget)
            except BudgetError:
                continue
            assert seconds <= 1.02 * 100 * 240 / n * other.token_s
        assert before is None or seconds <= before
        before = seconds
    assert size.sequences == 32


def test_resident_layers_are_given_up_for_sequences_where_that_is_sooner() -> None:
    budget = 900 * MB
    alone = make_plan(growing(), budget)
    size, plan = Workload(((60, 240),) * 100).choose(growing(), planner_for(budget))
    assert size.sequences > 8 and len(plan.resident) < len(alone.resident)


def test_one_long_request_does_not_keep_the_short_ones_apart() -> None:
    context = 8000
    size, _ = Workload(((100, 100),) * 500 + ((100, 7900),)).choose(growing(context), planner_for(1_500 * MB))
    assert size.sequences > 8 and context <= size.room < size.sequences * context


def test_the_fewest_sequences_are_named_when_nothing_fits() -> None:
    with pytest.raises(BudgetError):
        Workload(((60, 240),) * 4).choose(growing(), planner_for(10 * MB))


def test_workload_knows_its_longest() -> None:
    workload = Workload(((3, 9), (10, 1)))
    assert (workload.context, workload.prompt) == (12, 10)
    assert [s.sequences for s in workload.sizes(growing())] == [1, 2]
    plan: Plan = make_plan(growing(), 3_000 * MB)
    assert plan.token_s > 0 and workload.passes(replace(growing(), sequences=2)) == 9


def test_texts_are_mlx_lms_with_their_leading_spaces(short: Path, tokenizer: Any) -> None:
    # Given prompts of which one is answered with a space at first, whatever the model would say.
    prompts = [tokenizer.encode(p) for p in ("for i in", "return x +", "import os\n\nclass A(", "x =")]
    first = tokenizer.encode(" x")[:1]
    assert tokenizer.decode(first).startswith(" ")
    more: dict[str, Any] = {"max_tokens": 3, "logits_processors": make_logits_processors({first[0]: 100.0})}
    theirs = mlx_lm.batch_generate(mlx_lm.load(str(short))[0], tokenizer, prompts, **more)
    assert all(text.startswith(" ") for text in theirs.texts)
    ways: list[dict[str, Any]] = [{}, {"resident": 0, "sequences": 4}]
    for options in ways:
        model, _ = outcore.load_model(short, context=32, prompt=16, **options)
        with model.outcore:
            assert outcore.batch_generate(model, tokenizer, prompts, **more).texts == theirs.texts
