"""The prefix cache with whatever chunk of a prompt a small budget leaves: what one run kept, the next one finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import outcore
import zoo
from outcore.decode import prefix_cache as made
from outcore.options import LoadOptions
from outcore.serve import prompting
from outcore.serve.events import Begun, Event, GenerationRequest, TextPart
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from outcore_prefix import blocks as on_disk
from outcore_prefix import prefix_cache as prompts
from stand_ins import TokensOnly
from test_service import heard, text_of

TEXT = [(7 * i * i + 3 * i + 1) % 60 + 1 for i in range(85)]
BLOCK = 72


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 72 tokens, which the least chunk of 16 does not divide either; on a disk that always has room."""
    for module in (prompts, made, prompting):
        monkeypatch.setattr(module, "GRID", BLOCK)
    monkeypatch.setattr(prompts, "STATE_SHARE", 1e6)
    monkeypatch.setattr(on_disk, "LEAST_FREE", 0)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def saved(model_type: str) -> Path:
        return root / model_type if (root / model_type).exists() else zoo.save_checkpoint(model_type, root / model_type)

    return saved


LOAD: dict[str, Any] = {"context": 150, "prompt": 137, "govern": False, "draft": "none"}


def run(folder: Path, ids: list[int], **options: Any) -> tuple[list[int], list[Any], int, int]:
    """Tokens, their log-probabilities, tokens of the prompt that were found, and the chunk that was planned."""
    model, _ = outcore.load_model(folder, **LOAD, **options)
    with model.outcore as session:
        answer = list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=3))
        logprobs = [np.array(r.logprobs.astype(mx.float32)) for r in answer]
        return [r.token for r in answer], logprobs, session.metrics.prompt_found, session.plan.prefill_step


@pytest.mark.parametrize(("model_type", "memory"), [("llama", "60MB"), ("qwen3_5", None)])
def test_a_second_run_finds_what_the_first_one_kept(
    model_type: str, memory: str | None, folder_of: Callable[[str], Path]
) -> None:
    """With chunks of less than a block and more than one."""
    folder = folder_of(model_type)
    options: dict[str, Any] = {"memory": memory, "prefix_cache": "on"}
    if memory is None:
        options["memory"] = int(1.3 * outcore.plan_model(folder, memory="60MB", **LOAD).smallest_budget_bytes)
    cold = run(folder, TEXT, **options)
    assert BLOCK % cold[3] and (cold[3] > BLOCK) == (memory is not None), "a chunk that fits to blocks shows nothing"
    theirs = mlx_lm.stream_generate(mlx_lm.utils.load_model(folder)[0], TokensOnly(), TEXT, max_tokens=3)
    assert cold[0] == [r.token for r in theirs]
    for ids, found in ((TEXT, 85), ([*TEXT[:80], 9, 9], 72)):
        warm = run(folder, ids, **options)
        assert warm[2] == found
        alone = cold if ids is TEXT else run(folder, [*ids], **options | {"prefix_cache": "off"})
        assert warm[0] == alone[0]
        if ids is TEXT:
            assert all(np.array_equal(a, b) for a, b in zip(warm[1], cold[1], strict=True))


def test_a_server_finds_what_it_kept(quick_models: Callable[[int], Path]) -> None:
    ask = GenerationRequest(prompt="def add(a, b):\n    return a + b\n" * 8, max_tokens=2)
    load = LoadOptions(memory="20MB", **LOAD, prefix_cache="on")
    found = []
    for _ in range(2):
        service = ModelService(Shelf([str(quick_models(2))]), ServiceOptions(load))
        try:
            events = asyncio.run(heard(service, ask))
        finally:
            service.close()
        found += [(e.prompt_tokens, e.cached_tokens) for e in events if isinstance(e, Begun)]
    assert found[0][0] > BLOCK and [cached for _, cached in found] == [0, found[0][0]]


def test_a_server_keeps_prompts_that_are_computed_beside_others(quick_models: Callable[[int], Path]) -> None:
    stream, ask = (
        GenerationRequest(prompt="import os", max_tokens=40),
        GenerationRequest(prompt=tuple(TEXT), max_tokens=4),
    )
    load = LoadOptions(
        memory="400MB",
        context=150,
        draft="none",
        govern=False,
        prefix_cache="on",
        prefill_step_size=12,
        dtype="float32",
    )
    service = ModelService(Shelf([str(quick_models(2))]), ServiceOptions(load))

    async def beside() -> list[Event]:
        other, there = service.answer(stream), False
        async for event in other:
            if isinstance(event, TextPart) and not there:
                there = True
                task = asyncio.create_task(heard(service, ask))
        assert there and task.done(), "it was answered meanwhile"
        return await task

    def found(events: list[Event]) -> tuple[str, int]:
        return text_of(events), next(e.cached_tokens for e in events if isinstance(e, Begun))

    try:
        first = found(asyncio.run(beside()))
        again = found(asyncio.run(heard(service, ask)))
    finally:
        service.close()
    assert first[1] == 0 and again[0] == first[0] and again[1] >= BLOCK


@pytest.mark.parametrize(("step", "noted"), [(None, False), (8, False), (10, True), (128, True)])
def test_a_chunk_that_was_asked_for_and_ends_where_no_block_does_is_noted(
    step: int | None, noted: bool, folder_of: Callable[[str], Path]
) -> None:
    model, _ = outcore.load_model(folder_of("llama"), memory="60MB", prefix_cache="on", prefill_step_size=step)
    with model.outcore as session:
        assert any("prefix_cache" in note for note in session.notes) == noted


def test_where_memory_is_too_small_to_keep_a_prompt_it_is_answered_and_noted(
    quick_models: Callable[[int], Path],
) -> None:
    """By ``generate`` and by a server, which has the prefix cache on unless told otherwise."""
    load: dict[str, Any] = {"context": 90, "draft": "none", "govern": False, "resident": 0, "head_resident": False}
    load["memory"] = outcore.plan_model(str(quick_models(2)), **load).smallest_budget_bytes
    ids = tuple(TEXT)
    answers = []
    for prefix_cache in ("off", "on"):
        model, tokenizer = outcore.load(str(quick_models(2)), **load, prefix_cache=prefix_cache)
        with model.outcore as session:
            answers.append(outcore.generate(model, tokenizer, list(ids), max_tokens=4))
            assert any("is not stored" in note for note in session.notes) == (prefix_cache == "on")
        service = ModelService(
            Shelf([str(quick_models(2))]), ServiceOptions(LoadOptions(**load, prefix_cache=prefix_cache))
        )
        try:
            events = asyncio.run(heard(service, GenerationRequest(prompt=ids, max_tokens=4)))
        finally:
            service.close()
        answers.append(text_of(events))
    assert len(set(answers)) == 1


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_batches_say_that_they_keep_no_prompts(prefix_cache: str, quick_models: Callable[[int], Path]) -> None:
    model, tokenizer = outcore.load(str(quick_models(2)), memory="60MB", prefix_cache=prefix_cache, draft="none")
    with model.outcore as session:
        outcore.batch_generate(model, tokenizer, [TEXT[:9], TEXT[:5]], max_tokens=2)
        assert any("prefix cache" in note for note in session.notes) == (prefix_cache == "on")
