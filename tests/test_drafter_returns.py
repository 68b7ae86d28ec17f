"""A drafter that was given up comes back with a later text, within the budget, and drafts the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import drafter_files
import outcore
import zoo
from outcore.decode import text_drafts
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.decode.speculative.acceptance import AcceptanceStats
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.proposers import Guess
from outcore_drafters import given_up
from outcore_drafters.given_up import GivenUp
from stand_ins import TokensOnly

PROMPT = [3 + i % 40 for i in range(9)]


def text_of(model: Any, n: int = 10) -> list[int]:
    return [r.token for r in outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=n)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """A tiny model, a drafter some of whose guesses are right, and the text without drafts."""
    there = tmp_path_factory.mktemp("made")
    folder = zoo.save_checkpoint("llama", there / "model")
    model, _ = outcore.load_model(folder, draft="none", context=48, govern=False)
    with model.outcore:
        text = text_of(model, 12)
    return folder, drafter_files.save_eagle3("llama", there / "drafter", sorted(set(text[4:7]))), text


def given(made: tuple[Path, Path, list[int]], **options: Any) -> Any:
    """The model, whose drafter was given up in the middle of its first text."""
    folder, drafter, text = made
    model, _ = outcore.load_model(folder, draft=str(drafter), context=48, govern=False, **{"resident": 1, **options})
    session = model.outcore
    session.residency.layers.adapts = True
    for n, r in enumerate(outcore.stream_generate(model, TokensOnly(), PROMPT, max_tokens=10)):
        assert r.token == text[n]
        if n == 4:
            session.residency.layers.give_up_draft()
    return model


@pytest.fixture(autouse=True)
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(asked: int, learnt: AcceptanceStats) -> DraftLengthPolicy:
        return DraftLengthPolicy(min(asked, 3), learnt, fixed=True)

    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", policy)
    monkeypatch.setattr(text_drafts.TextDrafts, "_weigh", lambda *_: None)


def test_it_comes_back_when_that_costs_little_of_the_time_since(
    made: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = made[2]
    with (model := given(made)).outcore as session:
        without, layers = session.size, session.residency.layers
        assert isinstance(session.drafting, GivenUp) and text_of(model) == text[:10]
        assert isinstance(session.drafting, GivenUp), "not while it costs more than a hundredth of the time"
        drafted, session.acceptance.total_s = session.metrics.drafted, 1e6
        assert text_of(model) == text[:10]
        assert session.drafting.name == made[1].name and session.metrics.drafted > drafted
        weights = sum(a.nbytes for _, a in tree_flatten(session.drafting.model.parameters()))
        assert session.size.non_layer == without.non_layer + weights and session.size.rest > without.rest
        assert session.plan.peak_bytes <= session.plan.budget_bytes and layers.given_up is None
        layers.give_up_draft()
        sizes = (session.size.non_layer, session.size.rest, session.size.cache, session.size.growing)
        assert sizes == (without.non_layer, without.rest, without.cache, without.growing)
        assert text_of(model) == text[:10]


def test_layers_make_room_for_it_within_the_budget(
    made: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_up, "PROBE", 1e9)
    with (model := given(made, resident=3)).outcore as session:
        layers = session.residency.layers
        needs = layers.given_up[0].size_with(session.profile)
        session.plan = text_drafts.replace(session.plan, budget_bytes=session.plan.peak_bytes + 1)
        before = list(session.plan.resident)
        mx.reset_peak_memory()
        assert text_of(model) == made[2][:10] and session.drafting.name == made[1].name
        assert len(session.plan.resident) < len(before) and session.size.non_layer == needs.non_layer
        assert session.plan.peak_bytes <= session.plan.budget_bytes


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_is_gone_or_too_large_leaves_the_text_and_the_plan(
    made: tuple[Path, Path, list[int]], gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_up, "PROBE", 1e9)
    drafter = drafter_files.save_eagle3("llama", tmp_path / "drafter", [1, 2, 3])
    with (model := given((made[0], drafter, made[2]))).outcore as session:
        size, layers = session.size, session.residency.layers
        if gone:
            (drafter / "model.safetensors").unlink()
        else:
            session.drafting._back = lambda _: None
        for _ in range(2):
            assert text_of(model) == made[2][:10]
            assert isinstance(session.drafting, GivenUp) and layers.given_up is layers.draft is None
            assert (session.size.non_layer, session.size.rest) == (size.non_layer, size.rest)


def test_a_scheduler_that_goes_on_counts_it_again(
    made: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_up, "PROBE", 1e9)
    with (model := given(made)).outcore as session:
        size, scheduler = session.size, Scheduler(model, prefill_step=16)
        for uid in range(2):
            scheduler.add(Request(uid=uid, tokens=tuple(PROMPT), max_tokens=8))
            found: list[int] = []
            while len(found) < 8:
                found += [token.token for token in scheduler.step().tokens]
            scheduler.remove([uid])
            assert found == made[2][:8] and session.drafting.name == made[1].name
            assert session.size.non_layer > size.non_layer and session.size.rest > size.rest
        scheduler.close()
        assert session.size.non_layer > size.non_layer and session.plan.peak_bytes <= session.plan.budget_bytes


def test_only_what_no_n_gram_knew_is_the_drafts_own() -> None:
    learnt = AcceptanceStats(own=(0.0, 0.0))
    policy = DraftLengthPolicy(4, learnt)
    for seen in range(4):
        learnt.swept(None, 1, 1.0)
        learnt.swept("drafter", 1, 1.0)
        policy.judged([], [seen], 1.0)
    passes, own = learnt.own
    guesses = [
        Guess(5, ("drafter", 1)),
        Guess(6, ("drafter", 1), others=((6, ("ngram", 1)),)),
        Guess(7, ("ngram", 2)),
        Guess(8, ("drafter", 1)),
    ]
    policy.judged(guesses, [5, 6, 7, 9], 1.0)
    assert learnt.own[0] == pytest.approx(passes * 0.98 + 1) and learnt.own[1] == pytest.approx(own * 0.98 + 1)
