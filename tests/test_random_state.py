"""Nothing of ours touches the caller's random state: a seed gives the same text on the first run and on every other."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import outcore
import zoo
from outcore.decode import text_drafts
from outcore.decode.loader import load_model
from outcore.decode.preparation import prepare
from outcore.decode.sampling import make_sampler, own_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.machine.random_state import random_state_kept
from outcore_calibrate.layer_times import rig
from outcore_packs.full_copy import pack_model
from stand_ins import Oracle
from test_pack import original


def state() -> tuple[Any, ...]:
    key: Any = mx.random.state
    return key[0].tolist(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()


def adapter(model: Path, folder: Path) -> Path:
    loaded = mlx_lm.utils.load_model(model)[0]
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    linear_to_lora_layers(loaded, 4, parameters)
    folder.mkdir()
    weights = {k: v for k, v in tree_flatten(loaded.parameters()) if ".lora_" in k}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": '
        '{"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}}'
    )
    return folder


def resident(folder: Path, more: Path) -> None:
    load_model(folder, memory="1GB", draft="none")[0].outcore.close()


def overlay(folder: Path, more: Path) -> None:
    model, _ = load_model(folder, resident=0, memory="1GB", draft="none")
    assert model.outcore.plan.streams
    model.outcore.close()


def own_draft(folder: Path, more: Path) -> None:
    load_model(folder, resident=1, memory="1GB", draft="self:4")[0].outcore.close()


def other_draft(folder: Path, more: Path) -> None:
    load_model(folder, resident=1, memory="1GB", draft=str(folder))[0].outcore.close()


def packing(folder: Path, more: Path) -> None:
    pack_model(folder, more / "out")


def planning(folder: Path, more: Path) -> None:
    prepare(folder, memory="1GB")


def adapting(folder: Path, more: Path) -> None:
    load_model(folder, memory="1GB", adapter_path=str(adapter(folder, more / "adapter")))[0].outcore.close()


def rigging(folder: Path, more: Path) -> None:
    with rig(prepare(folder, memory="1GB").profile, 1) as made:
        made.head(2)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original(tmp_path_factory.mktemp("published") / "m")


@pytest.mark.parametrize(
    "work", [resident, overlay, own_draft, other_draft, packing, planning, rigging], ids=lambda f: f.__name__
)
def test_the_random_state_is_the_same_before_and_after(
    published: Path, tmp_path: Path, work: Callable[[Path, Path], None]
) -> None:
    mx.random.seed(2**40 + 5)
    mx.random.uniform()  # a state that no small seed gives
    before = state()
    work(published, tmp_path)
    assert state() == before


def test_an_adapter_draws_nothing_either(published: Path, tmp_path: Path) -> None:
    there = adapter(published, tmp_path / "adapter")
    before = state()
    load_model(published, memory="1GB", adapter_path=str(there))[0].outcore.close()
    assert state() == before


def test_what_is_drawn_after_a_failure_is_what_would_have_been_drawn(tmp_path: Path) -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), random_state_kept():
        mx.random.uniform()
        raise ZeroDivisionError
    assert state() == before


def test_each_thread_has_its_own(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    seen: list[Any] = []

    def load() -> None:
        mx.random.seed(3)
        seen.append(state())
        load_model(folder, memory="1GB")[0].outcore.close()
        seen.append(state())

    mx.random.seed(4)
    before = state()
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen[0] == seen[1] and state() == before


def test_a_seed_gives_one_text_before_and_after_loading_and_on_first_and_later_runs(
    quick_models: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(quick_models(2))  # which draws its weights

    def text(cache: str, before: bool) -> list[int]:
        monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / cache))
        if before:
            mx.random.seed(11)
        model, tokenizer = outcore.load(folder, memory="1GB", draft="none")
        if not before:
            mx.random.seed(11)
        with model.outcore:
            answer = outcore.stream_generate(
                model, tokenizer, "def f(x):", max_tokens=6, sampler=make_sampler(1.0, 1.0, 0.0, 1)
            )
            return [r.token for r in answer]

    first = text("a", True)
    assert first == text("a", True) == text("b", False)
    mx.random.seed(12)
    assert len(set(first)) > 3


@functools.cache
def theirs_of(folder: Path) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    return model, tokenizer


@functools.cache
def texts_of_mlx_lm(folder: Path, cached: bool, drawing: tuple[tuple[str, float], ...]) -> list[Any]:
    model, tokenizer = theirs_of(folder)
    sampler = mlx_lm.sample_utils.make_sampler(**dict(drawing))
    caches = (lambda: make_prompt_cache(model)) if cached else None
    return several_texts(mlx_lm.stream_generate, model, tokenizer, caches, sampler)


def key() -> Any:
    found: Any = mx.random.state
    return found[0].tolist()


def several_texts(stream_generate: Any, model: Any, tokenizer: Any, caches: Any, sampler: Any) -> list[Any]:
    """Tokens of texts that end in every way, one after the other under one seed, and the random state behind each."""
    mx.random.seed(7)
    found: list[Any] = []

    def write(tokens: int, upto: int | None = None) -> list[int]:
        given = {"prompt_cache": caches()} if caches else {}
        written = stream_generate(model, tokenizer, "def f(x):", max_tokens=tokens, sampler=sampler, **given)
        said = []
        for response in written:
            said.append(response.token)
            if len(said) == upto:
                break
        del written  # a generator that was broken off is closed here
        found.append((said, key()))
        return said

    ends = set(tokenizer.eos_token_ids)
    tokenizer.eos_token_ids = set()
    try:
        write(4)
        write(1)
        write(3)
        tokenizer.eos_token_ids = {found[0][0][3], found[2][0][2]}
        write(8)
        tokenizer.eos_token_ids = set()
        write(4, upto=1)
        write(4, upto=3)
        write(2)
    finally:
        tokenizer.eos_token_ids = ends
    return found


TOP_P, XTC = {"temp": 0.7, "top_p": 0.9}, {"temp": 1.0, "xtc_probability": 0.5}


@pytest.mark.parametrize(
    ("options", "cached", "drawing"),
    [
        ({"resident": 1, "prefix_cache": "on"}, False, TOP_P),
        ({"resident": 1, "draft": "ngram"}, True, XTC),
        ({"draft": "ngram"}, False, TOP_P),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else str(value),
)
def test_mlx_lms_own_sampler_draws_what_it_draws_there_text_after_text(
    quick_models: Callable[[int], Path],
    options: dict[str, Any],
    cached: bool,
    drawing: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = quick_models(2)
    sampler = mlx_lm.sample_utils.make_sampler(**drawing)
    expected = texts_of_mlx_lm(folder, cached, tuple(drawing.items()))
    assert len({tuple(said) for said, _ in expected}) > 3
    # What is drafted is right for the first text, but for every third token, and wrong for the others.
    known = [*theirs_of(folder)[1].encode("def f(x):"), *expected[0][0]]
    monkeypatch.setattr(Drafting, "source", lambda *_: Oracle(known, 3))
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(3, fixed=True))
    before = key()
    model, tokenizer = outcore.load(str(folder), memory="60MB", context=64, **{"draft": "none"} | options)
    assert key() == before
    with model.outcore as session:
        assert bool(session.plan.streams) == ("resident" in options)
        got = several_texts(
            outcore.stream_generate, model, tokenizer, (lambda: make_prompt_cache(model)) if cached else None, sampler
        )
        drafted = session.metrics.drafted
    assert (drafted > 0) == ("draft" in options)
    assert got == expected


@pytest.mark.parametrize("how", ["closed", "thrown in", "a pass fails"])
def test_a_text_that_breaks_off_leaves_the_random_state_where_mlx_lm_has_it_behind_its_last_token(
    quick_models: Callable[[int], Path], how: str
) -> None:
    sampler = mlx_lm.sample_utils.make_sampler(temp=1.0)
    theirs, tokenizer = theirs_of(quick_models(2))
    model, _ = outcore.load_model(quick_models(2), memory="60MB", context=64, resident=1, draft="none")
    with model.outcore as session:
        found = []
        for write, of in ((mlx_lm.stream_generate, theirs), (outcore.stream_generate, model)):
            mx.random.seed(5)
            cache = make_prompt_cache(of)
            text = write(of, tokenizer, [5, 6, 7], max_tokens=20, sampler=sampler, prompt_cache=cache)
            said = [next(text).token for _ in range(3)]
            if how == "a pass fails" and of is model:

                def failing() -> None:
                    raise ZeroDivisionError

                session.streaming.before_pass.append(failing)
                with pytest.raises(ZeroDivisionError):
                    next(text)
                session.streaming.before_pass.remove(failing)
            elif how == "thrown in":
                with pytest.raises(KeyboardInterrupt):
                    text.throw(KeyboardInterrupt)
            text.close()
            found.append((said, key()))
        assert found[0] == found[1]


def test_a_seed_decides_about_xtc_whatever_the_random_state_is() -> None:
    rows = mx.log(mx.softmax(mx.random.normal((1, 50), key=mx.random.key(3)) * 0.5, axis=-1))

    def drawn(state: int, **more: Any) -> list[int]:
        mx.random.seed(state)
        draw = own_sampler(1.0, seed=5, xtc_probability=0.5, xtc_threshold=0.0, **more)
        assert draw is not None
        return [int(draw(rows).item()) for _ in range(40)]

    once = drawn(1)
    assert once == drawn(2) and len(set(once)) > 2
    # With XTC in half of the draws, at least this share is of the least likely token, which is all that it leaves.
    least = int(mx.argmin(rows).item())
    assert once.count(least) >= 8
    assert drawn(1, xtc_special_tokens=list(range(50))).count(least) < 8
