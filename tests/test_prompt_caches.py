"""What a caller's prompt cache holds: what mlx-lm leaves there, however little memory there is, and after whatever
went wrong."""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

import outcore
import zoo
from outcore import BudgetError, PromptError, ReadError
from outcore.decode import text_drafts
from outcore.decode.batch import answers as batch_answers
from outcore.decode.batch_decoder import BatchDecoder, _Row
from outcore.decode.request import Request
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.disk import reader as reader_module
from outcore.machine.exclusive import Exclusive, held
from outcore.machine.interrupts import check
from outcore.modules.cache_check import impossible
from outcore.modules.cache_rollback import by_offset
from outcore_compat.mlx_lm import apply_patch
from stand_ins import Oracle, TokensOnly

WAYS: dict[str, dict[str, Any]] = {
    "resident": {"memory": "1GB"},
    "one": {"memory": "1GB", "resident": 1},
    "none": {"memory": "1GB", "resident": 0},
}
TYPES = ["llama", "qwen3_5", "gemma3_text", "mamba2", "falcon_h1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of two layers, one of each kind that a type has."""
    base = tmp_path_factory.mktemp("zoo")

    @functools.cache
    def folder(name: str) -> Path:
        config = copy.deepcopy(zoo.CONFIGS[name])
        text = config.get("text_config", config)
        text["num_hidden_layers"] = 2
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(zoo.CONFIGS, name, config)
            return zoo.save_checkpoint(name, base / name)

    return folder


@functools.cache
def theirs_of(folder: Path) -> Any:
    return mlx_lm.utils.load_model(folder)[0]


def load(folder: Path, way: str, **options: Any) -> nn.Module:
    given: dict[str, Any] = {"context": 64, "prompt": 16, "govern": False, "draft": "none"}
    return outcore.load_model(folder, **(given | WAYS[way] | options))[0]


def tokens(responses: Iterator[Any]) -> list[int]:
    return [r.token for r in responses]


def ours(model: nn.Module, prompt: list[int], n: int, cache: list[Any], **kwargs: Any) -> Iterator[Any]:
    return outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=n, prompt_cache=cache, **kwargs)


def same_caches(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether two caches hold the same bits; behind the offset of a key-value cache there may be anything."""

    def state(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return [state(c) for c in cache.caches]
        return (*cache.keys_and_values(), cache.offset) if by_offset(cache) else cache.state

    states = [tree_flatten([state(c) for c in cache]) for cache in (ours, theirs)]
    return [p for p, _ in states[0]] == [p for p, _ in states[1]] and all(
        mx.array_equal(a, b).item() if isinstance(a, mx.array) else a == b
        for (_, a), (_, b) in zip(*states, strict=True)
    )


PROMPT = [3 + i % 50 for i in range(9)]


MET = [*((name, "none") for name in TYPES), ("qwen3_5", "resident")]
"""Every type streamed; a hybrid one in memory, too."""


@pytest.mark.parametrize(("name", "way", "draft"), [(*met, n % 2 == 1) for n, met in enumerate(MET)])
def test_a_cache_holds_what_mlx_lm_leaves_there(
    name: str, way: str, draft: bool, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = theirs_of(folders(name))
    whole = tokens(mlx_lm.stream_generate(theirs, TokensOnly(), PROMPT, max_tokens=8))
    monkeypatch.setattr(Drafting, "source", lambda *_: Oracle([*PROMPT, *whole], 3))
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(5, fixed=True))
    model = load(folders(name), way, draft="ngram" if draft else "none")
    with model.outcore as session:
        assert bool(session.plan.streams) == (way != "resident")
        for n, left in ((1, False), (5, False), (1, True), (5, True)):
            caches = make_prompt_cache(model), make_prompt_cache(theirs)
            answers = []
            for each, generate in ((0, outcore.stream_generate), (1, mlx_lm.stream_generate)):
                limit = 8 if left else n
                responses = generate(
                    (model, theirs)[each], TokensOnly(), PROMPT, max_tokens=limit, prompt_cache=caches[each]
                )
                answers.append([next(responses).token for _ in range(n)])
                # mlx-lm's last response comes after its loop; a caller that has heard enough closes it.
                if left:
                    responses.close()
                else:
                    assert list(responses) == []
            assert answers[0] == answers[1]
            assert session.in_cache == len(PROMPT) + n
            assert same_caches(*caches), (n, left)
        assert (session.metrics.accepted > 0) == draft


@pytest.mark.parametrize("way", ["resident", "none"])
def test_a_stop_token_is_in_the_cache_as_in_mlx_lms(way: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = theirs_of(folders("qwen3_5"))
    whole = tokens(mlx_lm.stream_generate(theirs, TokensOnly(), PROMPT, max_tokens=9))
    monkeypatch.setattr(TokensOnly, "eos_token_ids", {whole[4]})
    model = load(folders("qwen3_5"), way)
    caches = make_prompt_cache(model), make_prompt_cache(theirs)
    with model.outcore:
        text = outcore.generate(model, TokensOnly(), PROMPT, max_tokens=9, prompt_cache=caches[0])
    assert text == mlx_lm.generate(theirs, TokensOnly(), PROMPT, max_tokens=9, prompt_cache=caches[1])
    assert same_caches(*caches)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "falcon_h1"])
def test_a_prompt_that_fails_leaves_the_cache_as_it_was(name: str, folders: Any) -> None:
    model = load(folders(name), "none")
    with model.outcore as session:
        before, cache = make_prompt_cache(model), make_prompt_cache(model)
        said = tokens(ours(model, PROMPT, 3, cache))
        assert said == tokens(ours(model, PROMPT, 3, before))

        def fail(done: int, total: int) -> None:
            if done == total:
                raise ZeroDivisionError

        for broken in (
            {"prompt_progress_callback": fail},
            {"sampler": lambda _: 1 / 0},
            {"logits_processors": [lambda *_: 1 / 0]},
        ):
            with pytest.raises(ZeroDivisionError):
                list(ours(model, PROMPT, 4, cache, prefill_step_size=4, **broken))
            assert session.in_cache == 0
            assert same_caches(cache, before)
        after = [tokens(ours(model, PROMPT[:5], 3, c)) for c in (cache, before)]
        assert after[0] == after[1] and same_caches(cache, before)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_a_read_that_fails_leaves_the_cache_as_it_was(name: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = reader_module.read_chunk
    model = load(folders(name), "none", slots=2)
    with model.outcore:
        before, cache = make_prompt_cache(model), make_prompt_cache(model)
        assert tokens(ours(model, PROMPT, 3, cache)) == tokens(ours(model, PROMPT, 3, before))
        for fails_at in range(2, 9, 2):
            count = [0]

            def broken(*args: Any, count: list[int] = count, fails_at: int = fails_at) -> int:
                count[0] += 1
                if count[0] >= fails_at:
                    raise OSError(5, "Input/output error")
                return usual(*args)

            monkeypatch.setattr(reader_module, "read_chunk", broken)
            with pytest.raises(ReadError, match=r"model\.safetensors"):
                list(ours(model, PROMPT, 8, cache, prefill_step_size=4))
            monkeypatch.setattr(reader_module, "read_chunk", usual)
            # Reading ahead may have got as far as the first tokens of the answer.
            if model.outcore.in_cache == 0:
                assert same_caches(cache, before)
                continue
            break
        else:
            after = [tokens(ours(model, PROMPT[:5], 3, c)) for c in (cache, before)]
            assert after[0] == after[1]


def test_what_was_not_handed_out_is_taken_back(folders: Any) -> None:
    """An interrupt that comes while the first token is computed, and that of the second."""
    model = load(folders("qwen3_5"), "one")
    with model.outcore as session:
        for n in (0, 1, 3):
            cache, before = make_prompt_cache(model), make_prompt_cache(model)
            responses = ours(model, PROMPT, 6, cache)
            said = [next(responses).token for _ in range(n)]
            came = signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            assert session.streaming is not None
            # Held until the step is over: the last unit of a sweep has been handed over by then.
            raising = functools.partial(signal.raise_signal, signal.SIGALRM)
            session.streaming.before_pass.append(raising)
            try:
                with pytest.raises(ZeroDivisionError):
                    next(responses)
            finally:
                session.streaming.before_pass.remove(raising)
                signal.signal(signal.SIGALRM, came)
            held_now = session.in_cache
            assert held_now == (0 if n == 0 else len(PROMPT) + n - 1)
            again = tokens(ours(model, [*PROMPT, *said][held_now:], 6 - n, cache))
            assert [*said, *again] == tokens(ours(model, PROMPT, 6, before))


def test_signals_are_held_and_handled_where_they_are_asked_for() -> None:
    came: list[str] = []
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, lambda *_: came.append("handled"))
    try:
        with held:
            with held:
                signal.raise_signal(signal.SIGALRM)
            assert came == []
            check()
            assert came == ["handled"]
            signal.raise_signal(signal.SIGALRM)
            assert came == ["handled"]
        assert came == ["handled"] * 2
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), held:
            signal.raise_signal(signal.SIGALRM)
        with pytest.raises(ZeroDivisionError), held:
            signal.raise_signal(signal.SIGALRM)
            check()
            came.append("never")
        assert "never" not in came
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_model_that_is_closed_meanwhile_leaves_the_cache_whole(folders: Any) -> None:
    model = load(folders("qwen3_5"), "none")
    cache = make_prompt_cache(model)
    responses = ours(model, PROMPT, 6, cache)
    said = [next(responses).token for _ in range(3)]
    model.outcore.close()
    with pytest.raises(outcore.ClosedError):
        next(responses)
    assert model.outcore.in_cache == len(PROMPT) + 2
    twin = load(folders("qwen3_5"), "one")
    with twin.outcore:
        whole = tokens(ours(twin, PROMPT, 8, make_prompt_cache(twin)))
        assert tokens(ours(twin, said[-1:], 5, cache)) == whole[3:]


def test_a_text_that_fails_before_it_begins_put_nothing_into_the_cache(folders: Any) -> None:
    class Refusing(TokensOnly):
        def encode(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    model = load(folders("llama"), "none")
    with model.outcore as session:
        cache = make_prompt_cache(model)
        tokens(ours(model, PROMPT, 3, cache))
        assert session.in_cache == len(PROMPT) + 3
        with pytest.raises(KeyboardInterrupt):
            next(iter(outcore.stream_generate(model, Refusing(), "a text", prompt_cache=cache)))
        assert session.in_cache == 0


def test_an_interrupt_at_a_texts_first_instruction_leaves_no_count_of_the_text_before(folders: Any) -> None:
    model = load(folders("llama"), "none")
    with model.outcore as session:
        tokens(ours(model, PROMPT, 3, make_prompt_cache(model)))
        assert session.in_cache
        text = ours(model, PROMPT, 3, make_prompt_cache(model))
        with pytest.raises(KeyboardInterrupt):
            text.throw(KeyboardInterrupt)  # before its first instruction
        assert session.in_cache == 0


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_an_interrupt_before_a_step_takes_back_nothing_that_was_handed_out(
    draft: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = (load(folders("qwen3_5"), "none", draft=draft) for _ in range(2))
    with model.outcore as session, twin.outcore:
        whole = tokens(ours(twin, PROMPT, 8, make_prompt_cache(twin)))
        for read in (1, 3):
            cache = make_prompt_cache(model)
            responses = ours(model, PROMPT, 8, cache)
            said = [next(responses).token for _ in range(read)]
            with monkeypatch.context() as patched:
                # As a signal would, between two instructions before the step is made.
                failing = iter([ZeroDivisionError()])

                def enter(self: Any, real: Any = Exclusive.__enter__, failing: Any = failing) -> Any:
                    for error in failing:
                        raise error
                    return real(self)

                patched.setattr(Exclusive, "__enter__", enter)
                with pytest.raises(ZeroDivisionError):
                    next(responses)
            held_now = session.in_cache
            assert held_now >= len(PROMPT) + read - 1
            left = [*PROMPT, *said][held_now:] or [whole[read]]
            goes_on = whole[read:] if held_now < len(PROMPT) + read else whole[read + 1 :]
            assert tokens(ours(model, left, len(goes_on), cache)) == goes_on


def test_what_went_wrong_behind_the_last_token_is_heard_where_the_text_is_closed(folders: Any) -> None:
    """The cache is given the last token then; who reads up to the last response and closes would not know of it."""
    model = load(folders("llama"), "none")
    kind = llama.Model
    passes = failing = 0

    def call(self: nn.Module, *args: Any, real: Any = kind.__call__, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == failing:
            raise ZeroDivisionError
        return real(self, *args, **kwargs)

    with model.outcore as session, pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "__call__", call)
        said = tokens(ours(model, PROMPT, 3, make_prompt_cache(model)))
        failing, passes = passes, 0
        responses = ours(model, PROMPT, 3, make_prompt_cache(model))
        assert [next(responses).token for _ in range(3)] == said and session.in_cache == len(PROMPT) + 2
        with pytest.raises(ZeroDivisionError):
            responses.close()  # type: ignore[attr-defined]


# Threads


def test_two_threads_take_turns(folders: Any) -> None:
    prompts = [[3 + (7 * i + j) % 50 for j in range(5 + i)] for i in range(3)]
    for way in ("none", "resident"):
        model = load(folders("qwen3_5"), way)
        with model.outcore:
            expected = [tokens(outcore.stream_generate(model, TokensOnly(), p, max_tokens=4)) for p in prompts]
            found: dict[int, list[int]] = {}
            errors: list[BaseException] = []

            def run(i: int, model: nn.Module = model, found: Any = found, errors: Any = errors) -> None:
                try:
                    found[i] = tokens(outcore.stream_generate(model, TokensOnly(), prompts[i], max_tokens=4))
                except BaseException as e:
                    errors.append(e)

            threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(60)
            assert errors == [] and [found[i] for i in range(3)] == expected


def test_a_text_that_is_left_lying_keeps_no_other_thread_for_ever(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders("llama"), "none")
    with model.outcore as session:
        monkeypatch.setattr(session.exclusive, "_patience_s", 0.2)
        left = outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=8)
        first = next(left).token
        errors: list[BaseException] = []

        def other() -> None:
            try:
                list(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=2))
            except BaseException as e:
                errors.append(e)

        def go_on() -> None:
            with contextlib.suppress(StopIteration):
                try:
                    next(left)
                except outcore.BusyError as e:
                    errors.append(e)

        for what, message in ((other, "left a text unfinished"), (go_on, "go on with it there")):
            t = threading.Thread(target=what)
            t.start()
            t.join(30)
            assert len(errors) == 1 and message in str(errors.pop())
        # The same thread may have several.
        assert tokens(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=1)) == [first]


def in_another_thread(work: Callable[[], Any]) -> Any:
    """What it returns there; its error is raised here."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.mark.parametrize(
    ("way", "draft", "cached", "how"),
    [
        ("none", "none", True, "outcore"), ("none", "ngram", True, "stop"), ("none", "ngram", False, "patched"),
        ("resident", "none", True, "patched"), ("resident", "none", False, "stop"),
    ],
)  # fmt: skip
def test_a_text_that_was_read_to_its_finish_reason_blocks_no_other(
    way: str, draft: str, cached: bool, how: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = theirs_of(folders("qwen3_5"))
    model = load(folders("qwen3_5"), way, draft=draft)
    with model.outcore as session, apply_patch() if how == "patched" else contextlib.nullcontext():
        monkeypatch.setattr(session.exclusive, "_patience_s", 0.2)
        whole = tokens(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=6))
        write = mlx_lm.stream_generate if how == "patched" else outcore.stream_generate
        tokenizer, most = TokensOnly(), 3
        if how == "stop":
            tokenizer.eos_token_ids, most = frozenset(whole[2:3]), 20
        cache, reference = make_prompt_cache(model), make_prompt_cache(theirs)
        given = {"prompt_cache": cache} if cached else {}
        text = write(model, tokenizer, PROMPT, max_tokens=most, **given)
        said = []
        while not said or said[-1].finish_reason is None:
            said.append(next(text))
        read = [r.token for r in said]
        assert read == whole[: len(read)]
        # Nobody asks for more, and the generator is not closed.
        assert in_another_thread(lambda: tokens(write(model, TokensOnly(), PROMPT, max_tokens=6))) == whole
        if cached:
            # What mlx-lm leaves in a cache is there with the last response.
            tokens(mlx_lm.stream_generate(theirs, tokenizer, PROMPT, max_tokens=most, prompt_cache=reference))
            goes_on = mlx_lm.stream_generate(theirs, TokensOnly(), [7, 8], max_tokens=4, prompt_cache=reference)
            assert tokens(write(model, TokensOnly(), [7, 8], max_tokens=4, prompt_cache=cache)) == tokens(goes_on)
        assert next(text, None) is None


def test_what_fails_behind_the_last_token_is_raised_behind_it_and_the_model_is_free(folders: Any) -> None:
    """The pass that brings a prompt cache up to the last token fails."""
    model, twin = load(folders("llama"), "none"), load(folders("llama"), "none")
    with model.outcore as session, twin.outcore:
        whole = tokens(ours(twin, PROMPT, 6, make_prompt_cache(twin)))
        cache, passes = make_prompt_cache(model), 0

        def failing() -> None:
            nonlocal passes
            passes += 1
            if passes == 4:  # of the prompt, two tokens, and the last one into the cache
                raise ZeroDivisionError

        assert session.streaming is not None
        session.streaming.before_pass.append(failing)
        text = ours(model, PROMPT, 3, cache)
        assert [next(text).token for _ in range(3)] == whole[:3]
        session.streaming.before_pass.remove(failing)
        assert in_another_thread(lambda: tokens(ours(model, PROMPT, 6, make_prompt_cache(model)))) == whole
        with pytest.raises(ZeroDivisionError):
            next(text)
        assert tokens(ours(model, whole[2:3], 3, cache)) == whole[3:]


def test_a_model_may_be_closed_by_another_thread(folders: Any) -> None:
    model = load(folders("llama"), "none")
    responses = outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=64)
    next(responses)
    t = threading.Thread(target=model.outcore.close)
    t.start()
    t.join(30)
    assert not t.is_alive()
    with pytest.raises(outcore.ClosedError):
        list(responses)


# What an answer may not depend on


def test_windows_that_cannot_be_quantized_are_refused(folders: Any) -> None:
    for way in ("none", "resident"):
        model = load(folders("gemma3_text"), way)
        with model.outcore, pytest.raises(outcore.UsageError, match="kv_bits"):
            list(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=2, kv_bits=8, quantized_kv_start=0))


@pytest.mark.parametrize("way", ["none", "resident"])
def test_attention_that_takes_no_quantized_caches_is_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA's."""
    wide = zoo.CONFIGS["deepseek_v3"] | {"qk_rope_head_dim": 32, "kv_lora_rank": 32}
    monkeypatch.setitem(zoo.CONFIGS, "deepseek_v3", wide)
    model = load(zoo.save_checkpoint("deepseek_v3", tmp_path / "model"), way)
    with model.outcore:
        expected = tokens(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=4))
        for start in (0, len(PROMPT) + 2):
            how = {"max_tokens": 8, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
            with pytest.raises(outcore.UsageError, match="kv_bits"):
                list(outcore.stream_generate(model, TokensOnly(), PROMPT, **how))
        assert tokens(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=4)) == expected


# What is refused leaves things as they were


def test_batches_and_texts_of_two_threads_take_turns(folders: Any) -> None:
    prompts = [[3 + (7 * i + j) % 50 for j in range(5 + i)] for i in range(3)]
    model = load(folders("qwen3"), "none", sequences=3, draft="auto")
    with model.outcore:
        alone = [tokens(outcore.stream_generate(model, TokensOnly(), p, max_tokens=8)) for p in prompts]
        found: dict[str, Any] = {}

        def batch() -> None:
            answers = batch_answers(model, TokensOnly(), [Request(i, p, 8) for i, p in enumerate(prompts)])
            found["batch"] = {a.request.uid: list(a.tokens) for a in answers}

        def text() -> None:
            found["text"] = tokens(outcore.stream_generate(model, TokensOnly(), prompts[0], max_tokens=8))

        threads = [threading.Thread(target=t) for t in (batch, text, batch)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert found["text"] == alone[0]
        assert found["batch"] == dict(enumerate(alone))


@pytest.mark.parametrize("way", ["resident", "none"])
def test_tokens_that_no_embedding_has_are_refused(way: str, folders: Any) -> None:
    model = load(folders("llama"), way)
    with model.outcore as session:
        assert session.vocabulary is not None
        for wrong in (session.vocabulary, 10**6, -1):
            with pytest.raises(PromptError, match=f"has token {wrong}; this model's are 0 to"):
                list(outcore.stream_generate(model, TokensOnly(), [5, wrong, 7], max_tokens=2))
        with pytest.raises(outcore.UsageError, match="contains the same cache twice"):
            list(ours(model, PROMPT, 2, make_prompt_cache(model)[:1] * len(make_prompt_cache(model))))
        with pytest.raises(outcore.UsageError, match="not a list"):
            list(ours(model, PROMPT, 2, iter(make_prompt_cache(model))))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["resident", "one"])
def test_keys_and_values_are_quantized_from_where_mlx_lm_does_by_default(way: str, folders: Any) -> None:
    theirs = theirs_of(folders("qwen3"))
    caches = make_prompt_cache(theirs), make_prompt_cache(theirs)
    settings = {"max_tokens": 5, "kv_bits": 4, "kv_group_size": 32}
    expected = tokens(mlx_lm.stream_generate(theirs, TokensOnly(), PROMPT, prompt_cache=caches[0], **settings))
    model = load(folders("qwen3"), way)
    with model.outcore:
        found = outcore.stream_generate(model, TokensOnly(), PROMPT, prompt_cache=caches[1], **settings)
        assert tokens(found) == expected and same_caches(*caches)


def test_what_is_refused_leaves_cache_and_count(folders: Any) -> None:
    model = load(folders("qwen3_5"), "none", memory="8MB")
    with model.outcore as session:
        cache = make_prompt_cache(model)
        tokens(ours(model, PROMPT, 4, cache))
        twin = make_prompt_cache(model)
        tokens(ours(model, PROMPT, 4, twin))
        for refused in ([], [5] * 100_000):
            with pytest.raises((PromptError, BudgetError)):
                list(ours(model, refused, 4, cache))
            assert session.in_cache == 0 and same_caches(cache, twin)


def test_caches_that_are_nested_otherwise_are_refused(folders: Any) -> None:
    model = load(folders("llama"), "none")
    with model.outcore, pytest.raises(outcore.UsageError, match="nested differently"):
        tokens(ours(model, PROMPT, 2, [CacheList(*make_prompt_cache(model))]))


def test_caches_whose_values_have_no_width_are_whole() -> None:
    """Sparse attention of mlx-vlm's types keeps keys alone: a conversation's second text was refused."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.zeros((1, 1, 3, 0)))
    assert impossible(cache) is None
    cache.values = None
    assert impossible(cache) is not None


def test_a_row_is_taken_out_of_a_list_with_an_empty_cache() -> None:
    rows = [CacheList(KVCache(), KVCache()) for _ in range(2)]
    for n, row in enumerate(rows):
        row[0].update_and_fetch(mx.full((1, 1, n + 1, 4), n + 1), mx.ones((1, 1, n + 1, 4)))
    shared = CacheList.merge(rows)
    made = SimpleNamespace(make_cache=lambda: [CacheList(KVCache(), KVCache())])
    decoder = BatchDecoder(cast(Any, made), cast(Any, SimpleNamespace(transport=None, streaming=None)))
    decoder._caches = [shared]
    decoder._rows = [_Row(Request(n, [1], 2), 1, None) for n in range(2)]
    ((taken,), held) = decoder.take_out(1)
    assert held == 0 and taken[0].offset == 2 and mx.array_equal(taken[0].keys, mx.full((1, 1, 2, 4), 2)).item()
    assert taken[1].keys is None
