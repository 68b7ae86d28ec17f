"""Sequences that come and go: each gets the tokens that it gets alone, whoever shares its sweeps and when."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.sample_utils import make_logits_processors

import outcore
import zoo
from outcore import BudgetError
from outcore.decode import text_drafts
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.sampling import own_sampler
from outcore.decode.scheduler import Scheduler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative_decoder import SpeculativeDecoder
from outcore.modules.hooks import arrays_in
from outcore.plan.cache_size import SHARED_STEP
from test_batch import assert_same

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [20], [30 + i for i in range(14)], [50, 51, 52], [60 + i for i in range(6)]]
LENGTHS = [9, 14, 6, 12, 8]
# Text that repeats itself, so that drafts are made and kept.
AGAIN = [7, 8, 9, 10, 11, 12] * 4
ONE: dict[str, Any] = {"dtype": "float32", "cpu_streams": 1, "prefill_step_size": 4, "govern": False}


@dataclass
class Written:
    """What came of sequences."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    most: int = 0
    steps: int = 0


def write(
    engine: Scheduler, joining: Mapping[int, Sequence[Request]], leaving: Mapping[int, Sequence[int]] | None = None
) -> Written:
    """Run sequences that join before these steps, and leave after these, until all have their tokens."""
    done = Written()
    limits: dict[int, int] = {}
    step = 0
    while step <= max(joining) or engine.running or engine.waiting:
        for request in joining.get(step, ()):
            engine.add(request)
            limits[request.uid] = request.max_tokens
        found = engine.step()
        done.most = max(done.most, engine.running)
        done.steps += engine.running > 0
        for token in found.tokens:
            done.tokens.setdefault(token.uid, []).append(token.token)
        done.failed |= dict(found.failed)
        done.full += found.full
        engine.remove([uid for uid, tokens in done.tokens.items() if len(tokens) >= limits[uid]])
        engine.remove((leaving or {}).get(step, ()))
        step += 1
        assert step < 1000
    return done


@functools.cache
def endless(folder: Path) -> Any:
    """A tokenizer of which no token ends a text."""
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    tokenizer._eos_token_ids = set()
    return tokenizer


def alone(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[tuple[int, float]]:
    """The plain loop's tokens, and by how much each was likelier than the next."""
    found = []
    tokenizer = endless(options.pop("folder"))
    for r in outcore.stream_generate(model, tokenizer, list(prompt), max_tokens=tokens, **options):
        best = mx.sort(r.logprobs)[-2:].tolist()
        found.append((r.token, best[1] - best[0]))  # type: ignore[index, operator]
    return found


@pytest.mark.parametrize(("model_type", "resident"), [("llama", None), ("qwen3_5", 1), ("gemma3_text", 1)])
def test_joining_and_leaving_change_no_answer(
    model_type: str, resident: int | None, tmp_path: Path, demo_model: Path
) -> None:
    # Given the answers that each has alone.
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=resident, context=32, draft="ngram", **ONE)
    prompts, lengths = [*PROMPTS, AGAIN], [9, 6, 3, 8, 4, 12]
    with model.outcore as session:
        assert (session.streaming is None) == (resident is None)
        expected = [alone(model, p, n, folder=demo_model) for p, n in zip(prompts, lengths, strict=True)]
        # When they come one after the other, and one leaves in the middle of its answer.
        ask = [Request(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        engine = Scheduler(model, prefill_step=4)
        done = write(engine, {0: [ask[5]], 3: [ask[0], ask[1]], 4: [ask[3]], 5: [ask[2]], 7: [ask[4]]}, {8: [3]})
        # Then each has those answers, as far as it stayed.
        assert not done.failed and not done.full and done.most > 3
        for i, want in enumerate(expected):
            got = done.tokens[i]
            assert_same(got, want[: len(got)])
            assert len(got) < len(want) if i == 3 else len(got) == len(want), i
        engine.close()


def test_one_that_stays_alone_keeps_its_drafts_and_gets_them_back(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How much is drafted does not depend on how long things take here.
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", functools.partial(DraftLengthPolicy, fixed=True))
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="ngram", **ONE)
    with model.outcore as session:
        plain = alone(model, AGAIN, 24, folder=demo_model)
        session.metrics.reset()
        alone(model, AGAIN, 24, folder=demo_model, leave_last=True)
        sweeps, accepted = session.metrics.sweeps, session.metrics.accepted
        engine = Scheduler(model, prefill_step=4)
        session.metrics.reset()
        done = write(engine, {0: [Request(0, AGAIN, 24)]})
        assert_same(done.tokens[0], plain)
        assert (session.metrics.sweeps, session.metrics.accepted) == (sweeps, accepted) and sweeps < 20
        session.metrics.reset()
        # Another one comes and goes: shared sweeps have no drafts, those before and after do.
        done = write(engine, {0: [Request(0, AGAIN, 24)], 3: [Request(1, [5, 6], 2)]})
        assert_same(done.tokens[0], plain)
        assert done.most == 2 and isinstance(engine._batch, SpeculativeDecoder) and session.metrics.accepted > 2
        engine.close()


def test_a_draft_gives_way_to_more_sequences(tmp_path: Path, demo_model: Path) -> None:
    """High bits of a quantized model, which its layers share; afterwards plans are those of a model without a draft."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model", quantize={"bits": 4, "group_size": 32})
    options = {"context": 64, "prompt": 16, **{k: v for k, v in ONE.items() if k != "govern"}}
    budget = prepare(folder, memory="1GB", draft="self:2", **options).planning.smallest
    model, _ = outcore.load_model(folder, memory=budget, draft="self:2", govern=False, **options)
    with model.outcore as session:
        expected = [alone(model, p, 4, folder=demo_model) for p in PROMPTS[:3]]
        assert session.residency.layers.draft is not None
        engine = Scheduler(model, prefill_step=4)
        many = [Request(2 + i, PROMPTS[2], 4) for i in range(5)]
        done = write(engine, {0: [Request(0, PROMPTS[0], 4)], 2: many})
        assert session.residency.layers.draft is None and done.most > 2 and not done.failed
        for uid, got in done.tokens.items():
            assert_same(got, expected[min(uid, 2)])
        assert session.plan.peak_bytes <= budget
        done = write(engine, {0: [Request(1, PROMPTS[1], 4)]})
        assert_same(done.tokens[1], expected[1])
        without = prepare(folder, memory=budget, draft="none", **options).profile.size
        assert session.size.sequences == 1 and session.size.at_context(64).cache == without.cache
        engine.close()


@pytest.mark.parametrize("resident", [None, 1])
def test_seeds_and_penalties_do_not_depend_on_company(tmp_path: Path, resident: int | None) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=resident, context=64, draft="ngram", **ONE)

    def request(uid: int) -> Request:
        penalties = make_logits_processors(None, repetition_penalty=1.3, repetition_context_size=8)
        return Request(uid, PROMPTS[uid], 5, own_sampler(0.9, top_p=0.95, seed=uid), tuple(penalties) * (uid % 2))

    with model.outcore:
        engine = Scheduler(model, prefill_step=4)
        expected = {i: write(engine, {0: [request(i)]}).tokens[i] for i in range(4)}
        assert len({tuple(tokens) for tokens in expected.values()}) == 4
        for joining in ({0: [0], 2: [1], 3: [2, 3]}, {0: [3, 2], 2: [0], 4: [1]}):
            assert write(engine, {at: [request(i) for i in who] for at, who in joining.items()}).tokens == expected
        engine.close()


@pytest.fixture(scope="module")
def recurrent(quick_models: Callable[..., Path]) -> Path:
    """Mostly recurrent: caches that leave room for several sequences."""
    return quick_models(4, 4)


def test_memory_is_taken_as_sequences_come_and_given_back(recurrent: Path) -> None:
    # Given a budget that leaves some of a model's layers resident, where it has one sequence.
    planned = prepare(recurrent, memory="1GB", context=64, draft="none", **ONE)
    budget = int(0.3 * planned.planning.smallest + 0.7 * planned.plan.peak_bytes)
    assert planned.planning.smallest < 0.6 * budget, "a reservation for 32 sequences of 2,048 tokens took far more"
    model, _ = outcore.load_model(recurrent, memory=budget, context=64, draft="none", **ONE)
    with model.outcore as session:
        before = session.plan
        assert before.streams and len(before.resident) > 2
        # When others come for a while.
        engine = Scheduler(model, prefill_step=4)
        done = write(engine, {0: [Request(0, PROMPTS[0], 12)], 4: [Request(i, PROMPTS[2], 3) for i in range(1, 10)]})
        # Then all are answered within the budget, and layers that gave way to them come back.
        assert len(session.plan.resident) < len(before.resident)
        assert len(done.tokens) == 10 and not done.failed and not done.full
        assert done.most > 1
        assert session.plan.peak_bytes <= session.plan.budget_bytes
        write(engine, {0: [Request(0, PROMPTS[0], 2)]})
        assert len(session.plan.resident) >= len(before.resident) - 1 > 0, "what was in the way is back"
        engine.close()


@pytest.mark.parametrize("resident", [1, None])
def test_sequences_caches_grow_by_what_was_planned(tmp_path: Path, resident: int | None) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    options = ONE | {"prefill_step_size": 1024, "memory": "64MB"}
    model, _ = outcore.load_model(folder, resident=resident, context=64, draft="none", **options)
    with model.outcore as session:
        engine = Scheduler(model, prefill_step=1024)
        for i in range(8):
            engine.add(Request(i, [5 + i] * 20, 40))
        gc.collect()
        others, seen = mx.get_active_memory(), 0
        mx.reset_peak_memory()
        for step in range(39):
            assert len(engine.step().tokens) == 8
            full = engine._batch._caches[1]  # the first layer sees four tokens
            held = sum(a.nbytes for a in arrays_in(engine._batch._caches))
            assert full.keys.shape[2] <= 20 + step + SHARED_STEP
            assert held <= session.plan.cache_bytes
            seen = max(seen, full.keys.shape[2])
        assert 20 + 40 <= seen < 20 + 40 + SHARED_STEP
        assert mx.get_peak_memory() - others <= session.plan.peak_bytes
        engine.close()


def test_sequences_without_room_wait_and_the_newest_gives_way(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="none", **(ONE | {"prefill_step_size": 64}))
    with model.outcore as session:
        engine = Scheduler(model, prefill_step=64)
        expected = {i: write(engine, {0: [Request(i, [5 + i] * 20, 8)]}).tokens[i] for i in (0, 1)}
        peaks = []
        original = session.residency.accommodate

        def accommodate(size: Any, **_: Any) -> None:
            if size.sequences * size.context > 2 * 128:
                raise BudgetError("no room")
            original(size)
            peaks.append(session.plan.peak_bytes)

        session.residency.accommodate = accommodate
        requests = [Request(i, [5 + i] * 20, 8) for i in range(5)]
        # Two of 110 tokens grow past 128 together.
        long = [Request(10 + i, [9 + i] * 110, 24) for i in range(2)]
        done = write(engine, {0: requests, 6: long})
        assert not done.failed and not done.full and sorted(done.tokens) == [0, 1, 2, 3, 4, 10, 11]
        assert all(len(done.tokens[10 + i]) == 24 for i in range(2)), "computed again after the other one had ended"
        assert done.tokens[0] == expected[0] and done.tokens[1] == expected[1]
        assert max(peaks) <= session.plan.budget_bytes
        engine.close()


def test_the_chunks_that_were_asked_for_are_planned_for_several_too(recurrent: Path) -> None:
    options = ONE | {"prefill_step_size": 16, "context": 64, "prompt": 33}
    smallest = prepare(recurrent, memory="1GB", draft="none", **options).planning.smallest
    running = []
    for share in (1.2, 1.6):
        model, _ = outcore.load_model(recurrent, memory=int(share * smallest), draft="none", **options)
        with model.outcore as session:
            engine = Scheduler(model, prefill_step=16)
            for i in range(3):
                engine.add(Request(i, [5 + i] * 33, 3))
            engine.step()
            assert session.plan.prefill_step == 16, "shorter ones were planned where there was no room for these"
            running.append(engine.running)
            engine.close()
    assert running[0] < running[1]


def test_layers_without_attention_have_empty_caches_in_company(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("nemotron-nas", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="none", **ONE)
    with model.outcore:
        engine = Scheduler(model, prefill_step=4)
        expected = write(engine, {0: [Request(0, PROMPTS[0], 9)]}).tokens[0]
        done = write(engine, {0: [Request(0, PROMPTS[0], 9), Request(1, PROMPTS[1], 3)]})
        assert not done.failed and done.tokens[0] == expected
        engine.close()


def test_a_text_that_fills_all_memory_ends_and_one_that_never_fits_fails(tmp_path: Path) -> None:
    # Given room for a text that is somewhat longer than was planned for.
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    budget = prepare(folder, memory="1GB", context=16, draft="none", **ONE).planning.smallest
    model, _ = outcore.load_model(folder, memory=budget, context=16, draft="none", **ONE)
    with model.outcore as session:
        assert session.streaming is not None
        engine = Scheduler(model)
        done = write(engine, {0: [Request(0, [5] * 8, 10**6), Request(1, list(range(5, 3000)), 4)]})
        assert isinstance(done.failed[1], BudgetError)
        assert not done.failed.get(0) and done.full == [0] and 16 < len(done.tokens[0]) < 150
        assert session.plan.peak_bytes <= session.plan.budget_bytes
        assert len(write(engine, {0: [Request(2, [5] * 8, 3)]}).tokens[2]) == 3
        engine.close()


def test_a_model_that_is_all_in_memory_is_not_streamed_for_company(recurrent: Path) -> None:
    # Given room for some sequences beside all of the model.
    options = ONE | {"context": 64, "draft": "none"}
    budget = prepare(recurrent, memory="1GB", sequences=4, **options).plan.peak_bytes
    model, _ = outcore.load_model(recurrent, memory=budget, **options)
    with model.outcore as session:
        assert session.streaming is None
        # When more come than that.
        engine = Scheduler(model)
        done = write(engine, {0: [Request(i, [5 + i] * 5, 3) for i in range(12)]})
        # Then some wait, and the model stays where it is.
        assert all(len(tokens) == 3 for tokens in done.tokens.values()) and len(done.tokens) == 12
        assert session.streaming is None and session.plan.peak_bytes <= session.plan.budget_bytes
        assert 1 < done.most < 12
        engine.close()


def test_what_a_request_brings_harms_no_other(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="ngram", **ONE)

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size > len(PROMPTS[1]) + 2:
            raise ValueError("mine")
        return logits

    with model.outcore:
        engine = Scheduler(model, prefill_step=4)
        expected = write(engine, {0: [Request(0, PROMPTS[0], 9)]}).tokens[0]
        for at in (0, 2):
            done = write(engine, {0: [Request(0, PROMPTS[0], 9)], at: [Request(1, PROMPTS[1], 9, None, (broken,))]})
            if at:
                assert done.tokens[0] == expected
            assert str(done.failed[1]) == "mine" and len(done.tokens[1]) == 3
        engine.close()


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_sampler_that_counts_is_called_once_for_each_token_when_others_join(draft: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft=draft, **ONE)
    said = list(range(10, 22))
    with model.outcore:
        script = iter([*said, 0])
        engine = Scheduler(model, prefill_step=4)
        request = Request(0, PROMPTS[0], len(said), lambda _: mx.array([next(script)]))
        done = write(engine, {0: [request], 3: [Request(1, PROMPTS[1], 3)]})
        assert done.most == 2 and done.tokens[0] == said and not done.failed
        engine.close()


def test_a_pass_that_fails_takes_those_under_way_alone(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="ngram", **ONE)
    with model.outcore as session:
        engine = Scheduler(model, prefill_step=4)
        expected = write(engine, {0: [Request(0, PROMPTS[0], 9)]}).tokens[0]
        fails = iter([False, False, True])

        def broken() -> None:
            if next(fails, False):
                raise OSError("the disk")

        session.streaming.before_pass.insert(0, broken)
        two = [Request(0, PROMPTS[0], 9), Request(1, PROMPTS[1], 9)]
        done = write(engine, {0: two, 4: [Request(2, PROMPTS[0], 9)]})
        assert {uid: str(e) for uid, e in done.failed.items()} == {0: "the disk", 1: "the disk"}
        assert done.tokens[2] == expected
        engine.close()


def test_the_likeliest_tokens_come_with_a_token_that_asks_for_them(tmp_path: Path, demo_model: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="none", **ONE)
    tokenizer = mlx_lm.utils.load_tokenizer(demo_model)
    tokenizer._eos_token_ids = set()
    with model.outcore:
        expected = [r.logprobs for r in outcore.stream_generate(model, tokenizer, PROMPTS[0], max_tokens=4)]
        engine = Scheduler(model)
        for others in ([], [Request(1, PROMPTS[1], 4)]):
            engine.add(Request(0, PROMPTS[0], 4, logprobs=3))
            for request in others:
                engine.add(request)
            for want in expected:
                token = next(t for t in engine.step().tokens if t.uid == 0)
                values = want.tolist()
                best = sorted(range(len(values)), key=lambda i: -values[i])[:3]  # type: ignore[arg-type, index]
                assert [i for i, _ in token.top] == best and token.token == best[0]
                assert token.logprob == pytest.approx(values[best[0]], abs=1e-4)  # type: ignore[index]
                assert token.top[1][1] == pytest.approx(values[best[1]], abs=1e-4)  # type: ignore[index]
            engine.remove([0, 1])
        engine.close()


def test_a_head_that_is_streamed_stays_so_in_company(recurrent: Path) -> None:
    options = ONE | {"context": 64, "draft": "none"}
    budget = int(1.1 * prepare(recurrent, memory="1GB", **options).planning.smallest)
    model, _ = outcore.load_model(recurrent, memory=budget, **options)
    with model.outcore as session:
        assert session.plan.head_streamed
        engine = Scheduler(model)
        done = write(engine, {0: [Request(0, [5, 6], 3), Request(1, [5, 6], 3)]})
        assert session.plan.head_streamed and not done.failed and done.tokens[0] == done.tokens[1]
        engine.close()


@pytest.mark.parametrize(("model_type", "resident"), [("llama", None), ("qwen3_5", 1)])
def test_a_prompt_that_is_computed_in_parts_is_as_alone_and_can_leave_or_be_taken_out(
    model_type: str, resident: int | None, tmp_path: Path, demo_model: Path
) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    model, _ = outcore.load_model(folder, resident=resident, context=64, draft="ngram", **ONE)
    long = [3 + i * 7 % 50 for i in range(24)]
    with model.outcore:
        expected = {
            uid: alone(model, prompt, tokens, folder=demo_model)
            for uid, prompt, tokens in ((0, AGAIN, 24), (1, long, 4), (3, PROMPTS[1], 4))
        }
        engine = Scheduler(model, prefill_step=4)
        engine.add(Request(0, AGAIN, 24))
        said: dict[int, list[int]] = {0: [], 1: [], 3: [], 4: []}
        parts: list[int] = []

        def step(until: Callable[[], bool]) -> None:
            for _ in range(300):
                found = engine.step()
                assert not found.failed and not found.full
                parts.extend(found.prompts)
                for token in found.tokens:
                    said[token.uid].append(token.token)
                    if len(said[token.uid]) == (24 if token.uid == 0 else 4):
                        engine.remove([token.uid])
                if until():
                    return
            raise AssertionError("it never comes to that")

        step(lambda: len(said[0]) >= 3)
        for request in (Request(1, long, 4), Request(2, long, 4), Request(3, PROMPTS[1], 4)):
            engine.add(request)
        step(lambda: True)
        engine.remove([2])
        step(lambda: len(said[3]) == 4)
        assert 0 < len(said[0]) < 24
        step(lambda: len(said[1]) == 4)
        assert 1 in parts and 2 not in parts[1:]
        engine.close()
        # One that is taken out goes on from what was computed of it.
        engine = Scheduler(model, prefill_step=4)
        said[0] = []
        engine.add(Request(0, AGAIN, 24))
        step(lambda: len(said[0]) >= 3)
        engine.add(Request(4, long, 4))
        step(lambda: True)
        cache, held = engine.take_out(4)
        assert held == long[: len(held)] and len(held) % 4 == 0 < len(held) < len(long)
        engine.add(Request(4, long[len(held) :], 4, cache=cache, earlier=held))
        step(lambda: len(said[4]) == 4)
        for uid in (0, 1, 3, 4):
            assert_same(said[uid], expected[1 if uid == 4 else uid][: len(said[uid])])
        engine.close()
