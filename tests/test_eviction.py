"""Texts that pass ``max_kv_size``: what stays when halves go is what mlx-lm says after the shorter text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step as mlx_lms
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli.main import main
from outcore.decode.eviction import SINKS, halved
from outcore.decode.sampling import make_sampler
from outcore.errors import PromptError, UsageError
from stand_ins import TokensOnly

MOST = 48
PROMPT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(30)]

Tokens = list[tuple[int, bytes]]
Opened = Callable[..., AbstractContextManager[tuple[Any, Any]]]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full attention, a hybrid, and sliding windows."""
    return zoo.save_checkpoint(request.param, tmp_path_factory.mktemp("evicted") / "model")


@pytest.fixture(params=["qwen3", "qwen3_5"])
def by_token(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Those whose bits do not depend on the chunks that a text is computed in: what a window's tokens see does."""
    return zoo.save_checkpoint(request.param, tmp_path / "model")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A model and a tokenizer without an end: random weights choose any token."""
    tokenizer = load_tokenizer(zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("tokenizer") / "model"))
    tokenizer._eos_token_ids = set()

    @contextmanager
    def one(folder: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
        chosen = {"memory": "2GB", "resident": 0, "slots": 2, "context": 64, "draft": "none"} | options
        model, _ = outcore.load_model(folder, **chosen)
        with model.outcore:
            yield model, tokenizer

    return one


def said(model: Any, tokenizer: Any, prompt: list[int], tokens: int, **options: Any) -> Tokens:
    options = {"max_kv_size": MOST, "kv_eviction": "halve"} | options
    responses = outcore.stream_generate(model, tokenizer, prompt, tokens, **options)
    return [(r.token, np.array(r.logprobs).tobytes()) for r in responses]


def mlx_lm_halving(folder: Path, prompt: list[int], tokens: int) -> tuple[Tokens, list[int]]:
    """What mlx-lm says, each time with the shorter text as a new prompt; and the text at the end."""
    model, _ = mlx_lm.utils.load_model(folder)
    found, text = Tokens(), list(prompt)
    while len(text) > MOST:
        text = halved(text, MOST)
    while len(found) < tokens:
        room = min(MOST - len(text) + 1, tokens - len(found))
        for token, logprobs in mlx_lms(mx.array(text), model, max_tokens=room):
            found.append((int(token), np.array(logprobs).tobytes()))
        text += [token for token, _ in found[-room:]]
        if len(found) < tokens:
            text = halved(text, MOST)
    return found, text


def test_half_of_a_text_is_its_first_tokens_and_its_last() -> None:
    assert halved(range(49), 48) == [0, 1, 2, 3, *range(29, 49)]
    assert len(halved(range(500), 17)) == 8 and halved(range(20), 48) == list(range(20))


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 4], ids=["fits", "is-longer"])
def test_every_token_is_mlx_lms_after_the_shorter_text(folder: Path, prompt: list[int], opened: Opened) -> None:
    expected, text = mlx_lm_halving(folder, prompt, 70)
    with opened(folder) as (model, tokenizer):
        assert said(model, tokenizer, prompt, 70) == expected
        assert model.outcore.text == text and model.outcore.plan.context < 100
    with opened(folder, resident=None) as (model, tokenizer):
        assert model.outcore.streaming is None
        assert said(model, tokenizer, prompt, 70) == expected


def test_with_drafts_and_a_seed(folder: Path, opened: Opened) -> None:
    def text(draft: str) -> list[int]:
        with opened(folder, draft=draft) as (model, tokenizer):
            mx.random.seed(3)
            sampler = make_sampler(0.8, coupled=True)
            return [token for token, _ in said(model, tokenizer, PROMPT, 90, sampler=sampler)]

    assert text("none") == text("ngram")


def test_with_keys_and_values_on_disk_and_quantized(folder: Path, opened: Opened) -> None:
    options: dict[str, Any] = {"max_kv_size": 600}
    if "gemma" not in (folder / "config.json").read_text():
        options |= {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 280}

    def text(where: str) -> tuple[Tokens, bool]:
        with opened(folder, kv_disk=where, context=620) as (model, tokenizer):
            found = said(model, tokenizer, PROMPT * 19, 50, **options)
            return found, model.outcore.plan.kv_slot > 0

    (a, _), (b, there) = text("off"), text("on")
    assert there and a == b


def test_whoever_goes_on_has_the_shorter_text_in_his_caches(by_token: Path, opened: Opened) -> None:
    expected, text = mlx_lm_halving(by_token, PROMPT, 40)
    with opened(by_token) as (model, tokenizer):
        cache = make_prompt_cache(model)
        assert said(model, tokenizer, PROMPT, 40, prompt_cache=cache, leave_last=True) == expected
        session = model.outcore
        assert session.text == text and len(text) - 1 <= session.in_cache <= len(text)
        history, rest = text[: session.in_cache], text[session.in_cache :]
        following, last = mlx_lm_halving(by_token, [*text, 5, 6], 30)
        assert said(model, tokenizer, [*rest, 5, 6], 30, prompt_cache=cache, history=history) == following
        assert session.text == last or len(text) + 32 <= MOST


def test_a_text_that_breaks_off_says_what_its_caches_hold(by_token: Path, opened: Opened) -> None:
    class Broken(Exception):
        pass

    def breaking(at: int) -> Callable[[mx.array], mx.array]:
        left = [at]

        def sampler(logprobs: mx.array) -> mx.array:
            left[0] -= 1
            if left[0] < 0:
                raise Broken
            return mx.argmax(logprobs, axis=-1)

        return sampler

    with opened(by_token) as (model, tokenizer):
        # In the first half's answer, at the first token after it went, and a few later.
        for at in (3, MOST - len(PROMPT) + 1, MOST - len(PROMPT) + 4):
            cache, made = make_prompt_cache(model), list[int]()
            with pytest.raises(Broken):
                for r in outcore.stream_generate(
                    model, tokenizer, PROMPT, 40, max_kv_size=MOST, kv_eviction="halve", prompt_cache=cache,
                    sampler=breaking(at),
                ):  # fmt: skip
                    made.append(r.token)
            session = model.outcore
            text = session.text if session.text is not None else [*PROMPT, *made]
            assert len(made) == at and text[-3:] == made[-3:]
            history, rest = text[: session.in_cache], text[session.in_cache :]
            expected, _ = mlx_lm_halving(by_token, [*text, 5], 8)
            found = said(model, tokenizer, [*rest, 5], 8, prompt_cache=cache, history=history)
            assert found == expected


def test_a_text_ends_where_nothing_may_go(folder: Path, opened: Opened) -> None:
    model, _ = mlx_lm.utils.load_model(folder)
    expected = [int(t) for t, _ in mlx_lms(mx.array(PROMPT), model, max_tokens=MOST - len(PROMPT) + 1)]
    with opened(folder) as (model, tokenizer):
        for tokens in (100, -1):
            found = list(
                outcore.stream_generate(model, tokenizer, PROMPT, tokens, max_kv_size=MOST, kv_eviction="none")
            )
            assert [r.token for r in found] == expected and found[-1].finish_reason == "length"
        with pytest.raises(PromptError, match="120 prompt tokens pass max_kv_size 48"):
            said(model, tokenizer, PROMPT * 4, 5, kv_eviction="none")


def test_what_cannot_be_meant_is_refused(folder: Path, opened: Opened) -> None:
    with opened(folder) as (model, tokenizer):
        with pytest.raises(UsageError, match="kv_eviction='third'"):
            said(model, tokenizer, PROMPT, 5, kv_eviction="third")
        with pytest.raises(UsageError, match="max_kv_size"):
            said(model, tokenizer, PROMPT, 5, max_kv_size=2 * SINKS)
        cache = make_prompt_cache(model)
        said(model, tokenizer, PROMPT, 5, prompt_cache=cache)
        with pytest.raises(UsageError, match="not known what they are"):
            said(model, tokenizer, PROMPT, 5, prompt_cache=cache)
        with pytest.raises(UsageError, match="embeddings"):
            said(model, tokenizer, PROMPT, 5, input_embeddings=mx.zeros((4, 8)))


def test_a_window_takes_the_memory_of_its_tokens_alone(tmp_path: Path, opened: Opened) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    theirs, _ = mlx_lm.utils.load_model(folder)
    expected = [int(t) for t, _ in mlx_lms(mx.array(PROMPT * 10), theirs, max_tokens=250, max_kv_size=32)]
    options = {"max_kv_size": 32, "kv_eviction": "window", "prefill_step_size": 2048}
    for more in ({}, {"resident": None}):
        with opened(folder, **more) as (model, tokenizer):
            assert [t for t, _ in said(model, tokenizer, PROMPT * 10, 250, **options)] == expected
            given = {"prompt_cache": make_prompt_cache(model, 32), "prefill_step_size": 64}
            said(model, tokenizer, PROMPT, 60, kv_eviction=None, max_kv_size=None, **given)
            assert model.outcore.plan.context <= 512, "not of the 550 tokens that there were"


def test_who_bounds_caches_that_cannot_be_bounded_is_told_and_needs_no_more_memory(short_model: Path) -> None:
    """Such a model's caches are its own; what a prompt's chunks take is as without."""
    texts = []
    for bound in ({}, {"max_kv_size": 32}):
        memory = outcore.plan_model(str(short_model), context=140, prompt=100).smallest_budget_bytes
        model, _ = outcore.load_model(short_model, memory=memory, context=140, prompt=100, draft="none", govern=False)
        with model.outcore as session:
            made = outcore.stream_generate(model, TokensOnly(), [3 + i % 50 for i in range(100)], max_tokens=6, **bound)
            texts.append([r.token for r in made])
            assert any("max_kv_size bounds nothing" in note for note in session.notes) == bool(bound)
    assert texts[0] == texts[1]


def test_generate_tells_what_went_and_what_was_not_quantized(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, at its end: of 5 tokens and 40 of the answer 32 fit, and halves of 16 stay."""

    def notes(*flags: str) -> list[str]:
        line = ["generate", str(served), "--memory", "1GB", "-p", "def f(x):", "--ignore-chat-template", "-m", "40"]
        assert main([*line, "--json", *flags]) == 0
        out = capsys.readouterr().out
        record = json.loads(out)
        text = record["prompt_tokens"] + record["generation_tokens"]
        return [note.replace(str(text), "ALL") for note in record["notes"]]

    usual = notes("--max-kv-size", "200", "--kv-eviction", "halve")
    (note,) = set(notes("--max-kv-size", "32", "--kv-eviction", "halve")) - set(usual)
    went, stay = (int(n) for n in re.findall(r"(\d+) older tokens went, (\d+) stay", note)[0])
    assert stay <= 33 and went % 17 == 0 < went, note
    (note,) = set(notes("--kv-bits", "8")) - set(usual)
    assert note == "--kv-bits 8 begins at token 5000 (--quantized-kv-start): nothing of these ALL was quantized"
    assert notes("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "20") == usual
