"""Texts whose caches ``max_kv_size`` bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.generate import generate_step as mlx_lms
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.cli.main import main
from stand_ins import TokensOnly

PROMPT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(30)]


def said(model: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, tokens, **options)]


def test_a_window_takes_the_memory_of_its_tokens_alone(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    theirs, _ = mlx_lm.utils.load_model(folder)
    prompt = PROMPT * 8
    expected = [int(t) for t, _ in mlx_lms(mx.array(prompt), theirs, max_tokens=24, max_kv_size=16)]
    chosen: dict[str, Any] = {"memory": "2GB", "slots": 2, "context": 32, "draft": "none", "govern": False}
    for resident in (0, None):
        model, _ = outcore.load_model(folder, resident=resident, **chosen)
        with model.outcore as session:
            assert (session.streaming is None) == (resident is None)
            assert said(model, prompt, 24, max_kv_size=16, prefill_step_size=2048) == expected
            said(model, prompt, 2, prompt_cache=make_prompt_cache(model, 16), prefill_step_size=64)
            assert session.plan.context == 256, "room for the prompt, not for the 264 tokens that there were"


def test_caches_that_cannot_be_bounded_are_noted_and_take_no_more_memory(quick_models: Callable[[int], Path]) -> None:
    """Such a model's caches are its own; what a prompt's chunks take is as without."""
    folder, texts = quick_models(4), []
    options: dict[str, Any] = {"context": 60, "prompt": 40, "draft": "none"}
    memory = outcore.plan_model(str(folder), **options).smallest_budget_bytes
    for bound in ({}, {"max_kv_size": 16}):
        model, _ = outcore.load_model(folder, memory=memory, govern=False, **options)
        with model.outcore as session:
            made = outcore.stream_generate(model, TokensOnly(), [3 + i % 50 for i in range(40)], max_tokens=4, **bound)
            texts.append([r.token for r in made])
            assert any("max_kv_size bounds nothing" in note for note in session.notes) == bool(bound)
    assert texts[0] == texts[1]


def test_generate_notes_what_was_not_quantized(
    quick_models: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def notes(*flags: str) -> list[str]:
        line = ["generate", str(quick_models(2)), "--memory", "1GB", "-p", "def f(x):", "--ignore-chat-template"]
        assert main([*line, "-m", "6", "--draft", "none", "--json", *flags]) == 0
        record = json.loads(capsys.readouterr().out)
        text = record["prompt_tokens"] + record["generation_tokens"]
        return [note.replace(str(text), "ALL") for note in record["notes"]]

    usual = notes()
    (note,) = set(notes("--kv-bits", "8")) - set(usual)
    assert note == "--kv-bits 8 begins at token 5000 (--quantized-kv-start): none of the ALL tokens was quantized"
    assert notes("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "4") == usual
