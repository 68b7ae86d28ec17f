"""Prompts with images: equal to mlx-vlm's, streamed; features are computed once; texts without images beside them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outcore import BudgetError, PromptError, UsageError, load, stream_generate
from outcore.decode.media import VIRTUAL, plain
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.machine.allocator import peak_held, reset_peak
from outcore_vision.media import Image, Images

OPTIONS: dict[str, Any] = {"images": True, "context": 256, "draft": "none"}
TOKENS = 6


def image(content: bytes, places: int = 3) -> Image:
    return Image(content, np.array([1, *[9] * places, 2]), np.arange(1, 1 + places), {})


def test_tokens_of_an_image_are_made_of_its_content() -> None:
    first, same, other = image(b"a").virtual, image(b"a").virtual, image(b"b").virtual
    assert first == same and not set(first) & set(other)
    assert all(VIRTUAL <= token < 2**31 for token in first + other) and len(set(first)) == 3
    assert image(b"a", 12).virtual[:3] == first, "a place's token depends on the content and the place alone"


def test_where_tokens_are_looked_up_the_placeholder_stands_for_images() -> None:
    one, two = image(b"a"), image(b"b")
    text = [1, *one.virtual, 5, *two.virtual, 6]
    media = Images(9, text, [one, two])
    assert plain(media, text) == [1, 9, 9, 9, 5, 9, 9, 9, 6] and plain(None, [1, 2]) == [1, 2]
    with pytest.raises(PromptError, match="the tokens have other images"):
        Images(9, text, [two, one])
    with pytest.raises(PromptError, match="more images than were given"):
        Images(9, text, [one])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with a mixture of experts, three pictures, and what mlx-vlm writes of them."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_families

    folder = vision_families.save_model("qwen3_vl_moe", tmp_path_factory.mktemp("images") / "model")
    pictures = vision_families.pictures(2)
    prompt = vision_families.prompt_of("qwen3_vl_moe", 2)
    return folder, pictures, prompt, vision_families.theirs(folder, prompt, pictures, TOKENS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore_prefix import blocks

    monkeypatch.setenv("OUTCORE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(blocks, "LEAST_FREE", 0)


def answered(model: Any, tokenizer: Any, prompt: str, pictures: Any) -> list[Any]:
    return list(stream_generate(model, tokenizer, prompt, images=pictures, max_tokens=TOKENS))


def equal(got: list[Any], expected: Any) -> bool:
    tokens, scores, _ = expected
    same = [bool(mx.array_equal(a.logprobs, b).item()) for a, b in zip(got, scores, strict=True)]
    return [r.token for r in got] == tokens and all(same)


def test_streamed_text_equals_mlx_vlms_and_no_image_is_computed_twice(made: Any, home: None) -> None:
    from outcore_vision.tower import tower_of

    folder, pictures, prompt, expected = made
    options = OPTIONS | {"memory": "8GB", "resident": 1, "prefix_cache": "1GB"}
    model, tokenizer = load(folder, **options)
    with model.outcore as session:
        assert session.plan.streams
        kept = session.size.kept
        assert equal(answered(model, tokenizer, prompt, pictures), expected)
        assert tower_of(model).runs == 2 and session.size.kept == kept, "its room is given back"
        why = answered(model, tokenizer, prompt.replace("what", "why"), pictures)
        assert tower_of(model).runs == 2
        other = answered(model, tokenizer, prompt, pictures[::-1])
        assert not equal(other, expected) and tower_of(model).runs == 2
    model, tokenizer = load(folder, **options)
    with model.outcore as session:
        assert equal(answered(model, tokenizer, prompt, pictures), expected) and session.found
        again = answered(model, tokenizer, prompt.replace("what", "how"), pictures)
        assert tower_of(model).runs == 0 and again and why


def test_too_small_a_budget_is_refused_with_one_that_works(tmp_path: Path) -> None:
    """Of a thousand patches, all scores of attention together are many times the model."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_families

    folder = vision_families.save_model("qwen3_vl", tmp_path / "model", side=512)
    pictures, prompt = vision_families.pictures(1, 500), vision_families.prompt_of("qwen3_vl", 1)
    budget, peaks = 1_000_000, list[int]()
    for _ in range(8):
        try:
            model, tokenizer = load(folder, **OPTIONS | {"context": 320}, memory=budget, prefix_cache="off")
            with model.outcore:
                reset_peak()
                answered(model, tokenizer, prompt, pictures)
                peaks.append(peak_held())
            break
        except BudgetError as e:
            assert e.smallest is not None and e.smallest > budget
            budget = e.smallest
    assert peaks and 5_000_000 < peaks[0] <= budget


def test_texts_with_and_without_images_run_together(made: Any) -> None:
    folder, pictures, prompt, expected = made
    model, tokenizer = load(folder, **OPTIONS, memory="8GB", resident=1, prefix_cache="off")
    with model.outcore as session:
        text = list(tokenizer.encode("once upon a time"))
        alone = [r.token for r in stream_generate(model, tokenizer, text, max_tokens=TOKENS)]
        read: list[Any] = []
        reading = threading.Thread(target=lambda: read.append(session.media.prompt(prompt, pictures, ())))
        reading.start()
        reading.join()
        tokens, media = read[0]
        running, got = Scheduler(model), dict[int, list[int]]({0: [], 1: []})
        running.add(Request(0, text, TOKENS))
        running.add(Request(1, tokens, TOKENS, media=media))
        while running.running or running.waiting:
            step = running.step()
            assert not step.failed and not step.full
            for token in step.tokens:
                got[token.uid].append(token.token)
            running.remove([uid for uid, found in got.items() if len(found) == TOKENS])
        running.close()
    assert got == {0: alone, 1: expected[0]}


def test_images_that_do_not_fit_the_prompt_or_the_model_are_refused(made: Any) -> None:
    folder, pictures, prompt, _ = made
    model, tokenizer = load(folder, **OPTIONS, memory="8GB", prefix_cache="off")
    with model.outcore:
        with pytest.raises(PromptError, match="the prompt has 2 places for images"):
            answered(model, tokenizer, prompt, pictures[:1])
        with pytest.raises(PromptError, match="the prompt ends with an image"):
            answered(model, tokenizer, "<|image_pad|>", pictures[:1])
        for wrong in (pictures[0], "x.png", "", b"x", Path("x"), np.asarray(pictures[0])):
            with pytest.raises(PromptError, match="give a list"):
                answered(model, tokenizer, prompt, wrong)
        for wrong, why in (([None, 3], "not NoneType"), ([np.asarray(pictures[0])] * 2, "not ndarray")):
            with pytest.raises(PromptError, match=why):
                answered(model, tokenizer, prompt, wrong)
        assert answered(model, tokenizer, prompt, iter(pictures)) and answered(model, tokenizer, "x", ())
        with pytest.raises(UsageError, match="not with input_embeddings"):
            list(stream_generate(model, tokenizer, prompt, images=pictures, input_embeddings=mx.zeros((5, 64))))
        tokens, media = model.outcore.media.prompt(prompt, pictures, ())
        for wrong in (-1, 288, VIRTUAL - 1):
            with pytest.raises(PromptError, match=f"has token {wrong}; this model's are 0 to 287"):
                answered(model, tokenizer, [*tokens, wrong], media._images)
        model.outcore.media = None
        with pytest.raises(UsageError, match="this model reads text only"):
            answered(model, tokenizer, prompt, pictures)
