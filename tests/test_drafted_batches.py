"""Texts that share passes and are drafted each: every one has the tokens, and the bits, that it has alone without."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.generate import generate_step

import outcore
import zoo
from combined_runs import small_blocks
from outcore import BudgetError
from outcore.decode import sequence_room, text_drafts
from outcore.decode.batch_decoder import BatchDecoder
from outcore.decode.one_text import Computed
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative_decoder import SpeculativeDecoder
from outcore.plan.joint_plan import pays_for_several
from outcore.plan.machine_profile import Calibration
from test_continuous import AGAIN, ONE, PROMPTS, Written, write

MOST = 9
"""Tokens of the longest text."""

Reference = list[tuple[int, mx.array]]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, whatever they take here."""
    monkeypatch.setattr(sequence_room, "pays_for_several", lambda *_, **__: True)
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", functools.partial(DraftLengthPolicy, fixed=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Reference]]]:
    """A tiny model, and mlx-lm's own tokens and log-probabilities for ``PROMPTS`` and ``AGAIN``, all in memory."""

    @functools.cache
    def one(model_type: str) -> tuple[Path, list[Reference]]:
        folder = zoo.save_checkpoint(model_type, tmp_path_factory.mktemp("models") / model_type)
        return folder, plainly(folder, [*PROMPTS, AGAIN], MOST)

    return one


def plainly(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, step: int = 4) -> list[Reference]:
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    found = []
    for prompt in prompts:
        steps = generate_step(mx.array(list(prompt)), model, max_tokens=tokens, prefill_step_size=step)
        found.append([(int(token), logprobs) for token, logprobs in steps])
    return found


def smallest_budget(folder: Path, draft: str, **options: Any) -> int:
    """The least memory in which the planner finds room for one text with what drafts."""
    return prepare(folder, memory="1GB", draft=draft, **(ONE | {"context": 64} | options)).planning.smallest


class Interrupts:
    """One, when so many units have been computed."""

    def __init__(self, session: Any, left: int = 0) -> None:
        self.left = left
        session.streaming.after_unit.append(self._count)

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Noted(Scheduler):
    """Keeps the tokens of its steps, with their log-probabilities, and how they were made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: dict[int, list[Any]] = {}
        self.kinds: set[type] = set()
        self.drafts: dict[int, tuple[int, int]] = {}

    def step(self) -> Any:
        step = super().step()
        self.kinds.add(type(self._batch))
        for token in step.tokens:
            self.told.setdefault(token.uid, []).append(token)
        for uid, (drafted, right) in step.drafts.items():
            before = self.drafts.get(uid, (0, 0))
            self.drafts[uid] = before[0] + drafted, before[1] + right
        return step


def assert_bits(told: Sequence[Any], want: Sequence[tuple[int, mx.array]]) -> None:
    assert [t.token for t in told] == [token for token, _ in want][: len(told)]
    for t, (_, logprobs) in zip(told, want, strict=False):
        assert t.scores is not None and mx.array_equal(t.scores, logprobs)


@pytest.mark.parametrize(
    ("model_type", "draft"),
    [("llama", "ngram"), ("qwen3_5", "self:4"), ("gpt_oss", "self:4")],
)
def test_every_text_has_the_bits_that_it_has_alone(made: Any, model_type: str, draft: str) -> None:
    """Whenever it joins, and though another one leaves in the middle."""
    folder, expected = made(model_type)
    prompts, lengths = [*PROMPTS, AGAIN], [4, 6, 3, 8, 4, MOST]
    model, _ = outcore.load_model(folder, resident=1, context=64, draft=draft, memory="200MB", **ONE)
    with model.outcore as session:
        rng = random.Random(model_type)
        joining: dict[int, list[Request]] = {}
        for i, (prompt, tokens) in enumerate(zip(prompts, lengths, strict=True)):
            joining.setdefault(rng.randrange(6), []).append(Request(i, prompt, tokens, scores=True))
        engine = Noted(model, prefill_step=4)
        done = write(engine, joining, {rng.randrange(5, 8): [3]})
        assert not done.failed and not done.full
        for i, want in enumerate(expected):
            assert_bits(engine.told.get(i, []), want)
            assert i == 3 or len(done.tokens[i]) == lengths[i]
        assert 0 < len(done.tokens[3]) < lengths[3], "it left in the middle"
        assert SpeculativeDecoder in engine.kinds and BatchDecoder not in engine.kinds
        assert session.streaming is not None and session.metrics.drafted > 0
        told = sum(right for _, right in engine.drafts.values())
        assert told <= session.metrics.accepted, "the last pass of one alone is not counted in its drafts"
        if draft != "ngram":
            assert told > 0
            assert session.metrics.sweeps < sum(lengths), "each pass brings several tokens of several texts"
        engine.close()


def test_nothing_is_drafted_behind_an_end_or_beyond_what_was_asked_for(made: Any) -> None:
    folder, expected = made("llama")
    first = [token for token, _ in expected[0]]
    end = first[7]
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="self:8", memory="200MB", **ONE)
    with model.outcore:
        engine = Noted(model, prefill_step=4, ends=[end])
        fed: list[tuple[int, int]] = []
        engine.add(Request(0, PROMPTS[0], MOST))
        engine.add(Request(1, PROMPTS[2], 3))
        tokens: dict[int, list[int]] = {}
        while engine.running or engine.waiting:
            for token in engine.step().tokens:
                tokens.setdefault(token.uid, []).append(token.token)
            batch = engine._batch
            if isinstance(batch, SpeculativeDecoder):
                for text in batch._texts.values():
                    now = text.now or Computed(())
                    guesses = [g.token for g in now.guesses]
                    assert end not in guesses[:-1]
                    fed.append((text.answered, len(guesses)))
                    assert text.answered + len(guesses) - now.kept <= MOST
            over = [uid for uid, said in tokens.items() if said[-1] == end or len(said) >= (MOST, 3)[uid]]
            engine.remove(over)
        assert tokens[0] == first[: first.index(end) + 1] and len(tokens[1]) == 3
        assert any(guesses for _, guesses in fed)
        engine.close()


def test_a_text_that_leaves_goes_on_elsewhere_with_what_its_caches_hold(made: Any) -> None:
    """Taken out in the middle of what a forward pass brought."""
    folder, want = made("qwen3_5")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="self:8", memory="200MB", **ONE)
    with model.outcore:
        engine = Noted(model, prefill_step=4)
        for uid in (0, 1):
            engine.add(Request(uid, PROMPTS[uid], MOST, scores=True))
        for _ in range(6):
            engine.step()
        assert isinstance(engine._batch, SpeculativeDecoder)
        said = [t.token for t in engine.told[0]]
        cache, held = engine.take_out(0)
        assert held == [*PROMPTS[0], *said][: len(held)] and len(held) >= len(PROMPTS[0])
        rest = [*PROMPTS[0], *said][len(held) :]
        again = Noted(model, prefill_step=4)
        again.add(Request(0, rest, MOST - len(said), cache=cache, earlier=held, scores=True))
        while len(again.told.get(0, [])) < MOST - len(said):
            again.step()
        assert again.told[0] and len(said) > 1
        assert_bits([*engine.told[0], *again.told[0]], want[0])
        again.close()
        # The other one goes on as if nobody had been there.
        while len(engine.told[1]) < MOST:
            engine.step()
        assert_bits(engine.told[1], want[1])
        engine.close()


def test_a_read_that_fails_ends_running_texts_and_no_later_one(made: Any) -> None:
    folder, want = made("qwen3_5")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="self:8", memory="200MB", **ONE)
    with model.outcore as session:
        calls, fails = 0, -1

        def counted() -> None:
            nonlocal calls
            calls += 1
            if calls == fails:
                raise OSError("the disk")

        session.streaming.after_unit.insert(0, counted)

        def both(engine: Noted) -> Written:
            return write(engine, {0: [Request(uid, PROMPTS[uid], 5, scores=True) for uid in (0, 1)]})

        failed = 0
        for at in (3, 22):  # in the prompts, and where texts share passes
            calls, fails = 0, at
            engine = Noted(model, prefill_step=4)
            done = both(engine)
            assert (SpeculativeDecoder in engine.kinds) == (at > 3)
            failed += len(done.failed)
            for uid in (0, 1):
                assert_bits(engine.told.get(uid, []), want[uid])
            fails, engine.told = -1, {}
            assert not both(engine).failed
            for uid in (0, 1):
                assert_bits(engine.told[uid], want[uid])
            engine.close()
        assert failed >= 2


@pytest.mark.parametrize("drafted", [True, False])
def test_after_an_interrupt_in_a_pass_the_same_texts_go_on(
    made: Any, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their caches are computed again; those of texts without drafts had wrong tokens, or failed, too."""
    monkeypatch.setattr(sequence_room, "pays_for_several", lambda *_, **__: drafted)
    folder, want = made("qwen3_5")
    lengths = (5, 7)
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="self:4", memory="200MB", **ONE)
    with model.outcore as session:
        after = Interrupts(session)
        for at in (2, 17):
            engine, tokens = Noted(model, prefill_step=4), dict[int, list[int]]({0: [], 1: []})
            after.left = at
            for uid, most in enumerate(lengths):
                engine.add(Request(uid, PROMPTS[uid], most))
            interrupts = 0
            while engine.running or engine.waiting:
                try:
                    step = engine.step()
                except KeyboardInterrupt:
                    interrupts += 1
                    continue
                assert not step.failed
                for token in step.tokens:
                    tokens[token.uid].append(token.token)
                engine.remove([uid for uid, most in enumerate(lengths) if len(tokens[uid]) == most])
            assert interrupts == 1 and (SpeculativeDecoder if drafted else BatchDecoder) in engine.kinds
            wanted = [[token for token, _ in text[:most]] for text, most in zip(want, lengths, strict=False)]
            assert [tokens[uid] for uid in (0, 1)] == wanted
            engine.close()


def test_the_budget_holds_for_texts_with_what_drafts(quick_models: Callable[..., Path]) -> None:
    folder = quick_models(4)
    budget = int(1.5 * smallest_budget(folder, "self:4"))
    model, _ = outcore.load_model(folder, memory=budget, context=64, draft="self:4", **ONE)
    with model.outcore as session:
        assert session.streaming is not None
        engine = Noted(model, prefill_step=4)
        mx.reset_peak_memory()
        done = write(engine, {0: [Request(i, PROMPTS[i], 8) for i in range(2)], 3: [Request(2, PROMPTS[2], 6)]})
        assert not done.failed and SpeculativeDecoder in engine.kinds and session.metrics.accepted > 0
        assert mx.get_peak_memory() <= session.plan.peak_bytes <= budget
        engine.close()


def test_states_to_go_back_to_take_what_the_budget_leaves_together(quick_models: Callable[..., Path]) -> None:
    """However many texts there were when each of them began."""
    folder = quick_models(4)
    budget = int(2.2 * smallest_budget(folder, "ngram"))
    model, _ = outcore.load_model(folder, memory=budget, context=64, draft="ngram", **ONE)
    with model.outcore as session:
        engine = Noted(model, prefill_step=4)
        seen = set()
        for step in range(14):
            if step % 3 == 0 and step < 12:
                engine.add(Request(step, PROMPTS[0], 40))
            engine.step()
            if isinstance(engine._batch, SpeculativeDecoder):
                texts = [t.runner for t in engine._batch._texts.values() if t.runner.fed]
                room = session.plan.budget_bytes - session.plan.peak_bytes
                assert sum(t.snapshots for t in texts) <= room
                seen.add(len(texts))
        assert max(seen) >= 3
        engine.close()


@pytest.fixture
def blocks_of_64() -> Iterator[None]:
    with small_blocks(64):
        yield


@pytest.mark.usefixtures("blocks_of_64")
def test_there_is_room_for_what_is_kept_of_prompts_that_join(
    quick_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """States behind blocks, which are held until a prompt is computed; the room is given back behind it."""
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path))
    options = ONE | {"prefill_step_size": 16, "context": 128, "prompt": 70, "prefix_cache": "on"}
    model, _ = outcore.load_model(quick_models(2), resident=1, memory="200MB", draft="ngram", **options)
    with model.outcore as session:
        assert session.prefix is not None
        engine = Noted(model, prefill_step=16)
        engine.add(Request(0, [5, 6], 20))
        engine.step()
        without = session.size.kept
        for uid in (1, 2):
            engine.add(Request(uid, [7 + uid] * 70, 20))
        engine.step()
        assert isinstance(engine._batch, SpeculativeDecoder)
        states = session.size.states
        assert session.size.kept == without + 2 * states + 2 * 2 * states
        while left := len(engine._prefills):
            engine.step()
            assert session.size.kept == without + 2 * states + 2 * left * states
        while engine._batch.ready:
            engine.step()
        engine.step()
        assert isinstance(engine._batch, SpeculativeDecoder) and session.size.kept == without + 2 * states
        engine.close()


def test_one_that_is_left_alone_has_room_for_its_drafts_and_no_more_than_the_budget(
    quick_models: Callable[..., Path],
) -> None:
    """Layers came back while two short ones shared passes without drafts."""
    folder, options = quick_models(4), ONE | {"context": 512}
    smallest = smallest_budget(folder, "ngram", context=512)
    for share in (1.0, 1.4):
        model, _ = outcore.load_model(folder, memory=int(share * smallest), draft="ngram", **options)
        with model.outcore as session:
            engine = Noted(model, prefill_step=4)
            for uid in (0, 1):
                engine.add(Request(uid, PROMPTS[3], 30))
            for step in range(12):
                found = engine.step()
                assert found.tokens and not found.full
                assert session.plan.peak_bytes <= session.plan.budget_bytes
                if step == 5:
                    engine.remove([1])
            assert SpeculativeDecoder in engine.kinds
            engine.close()


def test_texts_without_room_for_drafts_share_passes_without(quick_models: Callable[..., Path]) -> None:
    folder = quick_models(3)
    budget = smallest_budget(folder, "self:4")
    model, _ = outcore.load_model(folder, memory=budget, context=64, draft="self:4", **ONE)
    with model.outcore as session:
        engine = Noted(model, prefill_step=4)
        done = write(engine, {0: [Request(i, PROMPTS[i % 5], 3) for i in range(8)]})
        assert not done.failed and len(done.tokens) == 8
        assert BatchDecoder in engine.kinds
        assert session.plan.peak_bytes <= budget
        engine.close()


def test_one_that_waits_for_room_costs_the_others_no_drafts(quick_models: Callable[..., Path]) -> None:
    """What drafts was given up for one that had no room without it either, and the others had none from then on."""
    folder = quick_models(3)
    budget = int(1.5 * smallest_budget(folder, "self:4"))
    model, _ = outcore.load_model(folder, memory=budget, context=64, draft="self:4", **ONE)
    with model.outcore as session:
        assert session.residency is not None
        engine = Noted(model, prefill_step=4)
        for uid in (0, 1):
            engine.add(Request(uid, PROMPTS[uid], 60))
        engine.step()
        assert isinstance(engine._batch, SpeculativeDecoder)
        engine.add(Request(2, [9] * 4000, 10))
        while engine._batch.ready:
            engine.step()
        engine.step()
        assert engine.running == 2 and not engine.waiting, "it never fits, so it is refused at once"
        assert isinstance(engine._batch, SpeculativeDecoder) and engine._room and engine._room.drafted
        with pytest.raises(BudgetError):
            session.residency.reserve(10**6, 10**6)
        assert session.residency.layers.draft is not None
        engine.close()


def test_drafts_pay_for_several_where_reading_takes_the_time(quick_models: Callable[..., Path]) -> None:
    folder = quick_models(4)
    model, _ = outcore.load_model(folder, memory=smallest_budget(folder, "ngram"), context=64, draft="ngram", **ONE)
    with model.outcore as session:
        size, plan = session.size, session.plan
        slow = Calibration(read_gbps=0.01, weight_gbps=10.0)
        fast = Calibration(read_gbps=10.0, weight_gbps=1.0)
        for blocks in (True, False):
            assert pays_for_several(size, plan, slow, 2, blocks, chance=0.9)
            assert not pays_for_several(size, plan, slow, 2, blocks, chance=0.01)
        assert not pays_for_several(size, plan, fast, 2, False, chance=0.9)
        assert not pays_for_several(size, plan, slow, size.drafted + 1, True, chance=0.9), "none has a guess"
        assert pays_for_several(size, plan, slow, 2, False, tokens=1.5)
        assert not pays_for_several(size, plan, slow, 2, False, tokens=1.0)


class Late:
    """What a session is held by, of which some exits are interrupted when all is done."""

    def __init__(self, inner: Any, at: int) -> None:
        self._inner, self._left, self._depth = inner, at, 0

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._depth += 1

    def __exit__(self, *how: Any) -> None:
        self._inner.__exit__(*how)
        self._depth -= 1
        if self._depth == 0:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("texts", [1, 2])
def test_a_step_that_was_made_when_a_signal_came_is_not_lost(made: Any, texts: int) -> None:
    folder, want = made("llama")
    most = 5
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="self:8", memory="200MB", **ONE)
    with model.outcore as session:
        inner = session.exclusive
        for at in (1, 4):
            for taken in (None, 0):
                engine, interrupted, steps = Noted(model, prefill_step=4), False, 0
                for uid in range(texts):
                    engine.add(Request(uid, PROMPTS[uid], most, scores=True))
                session.exclusive = Late(inner, at)
                while any(len(engine.told.get(uid, [])) < most for uid in range(texts)):
                    steps += 1
                    assert steps < 40
                    try:
                        engine.step()
                    except KeyboardInterrupt:
                        interrupted, session.exclusive = True, inner
                        if taken is not None:
                            said = [t.token for t in engine.told.get(taken, [])]
                            assert engine.take_out(taken) == ([], []), "its caches are further than what was told"
                            left = most - len(said)
                            engine.add(Request(taken, [*PROMPTS[taken], *said], left, scores=True))
                    engine.remove([uid for uid, said in engine.told.items() if len(said) >= most])
                session.exclusive = inner
                assert interrupted
                for uid in range(texts):
                    assert [t.token for t in engine.told[uid]] == [token for token, _ in want[uid][:most]]
                    if taken != uid:
                        assert_bits(engine.told[uid], want[uid])
                engine.close()


def test_one_that_never_fits_is_reported_though_the_others_were_interrupted(made: Any) -> None:
    """It waited no more, and nobody ever heard of it."""
    folder, _ = made("llama")
    model, _ = outcore.load_model(folder, resident=1, context=64, draft="ngram", memory="20MB", **ONE)
    with model.outcore as session:
        Interrupts(session, 1)
        engine = Scheduler(model, prefill_step=4)
        engine.add(Request(0, [5] * 100_000, 4))
        engine.add(Request(1, PROMPTS[0], 4))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        step = engine.step()
        assert [uid for uid, _ in step.failed] == [0] and not step.tokens and engine.waiting == 1
        assert [token.uid for token in engine.step().tokens] == [1]
        engine.close()


@pytest.mark.parametrize("drafted", [True, False])
def test_texts_with_keys_and_values_on_disk_follow_each_other(
    made: Any, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side the second had the first one's, so wrong tokens, and without drafts both failed."""
    monkeypatch.setattr(sequence_room, "pays_for_several", lambda *_, **__: drafted)
    folder, _ = made("llama")
    prompts = [[3 + (7 * i + i // 13) % 60 for i in range(at, at + 100)] for at in (0, 7)]
    want = plainly(folder, prompts, 5, step=20)
    options = ONE | {"context": 200, "prompt": 100, "kv_disk": "on", "prefill_step_size": 20}
    model, _ = outcore.load_model(folder, resident=1, draft="ngram", memory="200MB", **options)
    with model.outcore as session:
        assert session.plan.kv_slot
        for later in (0, 3):
            engine = Noted(model, prefill_step=20)
            requests = [Request(uid, prompt, 5, scores=True) for uid, prompt in enumerate(prompts)]
            done = write(engine, {0: requests[:1], 3: requests[1:]} if later else {0: requests})
            assert not done.failed and not done.full and done.most == 1
            for uid in (0, 1):
                assert_bits(engine.told[uid], want[uid])
                assert len(engine.told[uid]) == 5
            engine.close()
