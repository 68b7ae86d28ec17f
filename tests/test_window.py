"""Texts whose caches ``max_kv_size`` bounds."""

from __future__ import annotations

import json
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
    expected = [int(t) for t, _ in mlx_lms(mx.array(PROMPT * 10), theirs, max_tokens=250, max_kv_size=32)]
    chosen: dict[str, Any] = {"memory": "2GB", "slots": 2, "context": 64, "draft": "none"}
    for resident in (0, None):
        model, _ = outcore.load_model(folder, resident=resident, **chosen)
        with model.outcore:
            assert said(model, PROMPT * 10, 250, max_kv_size=32, prefill_step_size=2048) == expected
            said(model, PROMPT, 60, prompt_cache=make_prompt_cache(model, 32), prefill_step_size=64)
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


def test_generate_tells_what_was_not_quantized(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*flags: str) -> list[str]:
        line = ["generate", str(served), "--memory", "1GB", "-p", "def f(x):", "--ignore-chat-template", "-m", "40"]
        assert main([*line, "--json", *flags]) == 0
        record = json.loads(capsys.readouterr().out)
        text = record["prompt_tokens"] + record["generation_tokens"]
        return [note.replace(str(text), "ALL") for note in record["notes"]]

    usual = notes()
    (note,) = set(notes("--kv-bits", "8")) - set(usual)
    assert note == "--kv-bits 8 begins at token 5000 (--quantized-kv-start): none of the ALL tokens was quantized"
    assert notes("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "20") == usual
