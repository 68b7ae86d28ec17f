"""The seam for kinds of drafts: one class brings one, a kind that nobody brings is refused by name, and the core alone
drafts n-grams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest

import outcore
from outcore import packages
from outcore.decode import text_drafts
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.decode.speculative.proposers import Guess
from outcore.decode.speculative.sources import DraftSource, with_draft
from outcore.errors import UsageError
from outcore.plan.joint_plan import Draft
from stand_ins import TokensOnly

OPTIONS: dict[str, Any] = {"resident": 0, "context": 64, "prompt": 16, "govern": False}


class Echo(DraftSource, Drafting):
    """Guesses that a text says its last token again."""

    kind, usage, cheaper = "echo", "echo:TIMES", None

    def parse(self, asked: str, argument: str | None) -> int:
        return int(argument or 1)

    def open(self, which: int, profile: Any, opening: Any) -> tuple[Any, Draft]:
        return profile, Draft(self.kind, f"echo:{which}", detail=which)

    def load(self, draft: Draft, *_: Any) -> Drafting:
        self.name, self._times = draft.name, draft.detail
        return self

    def proposer(self, *_: Any) -> Any:
        return self

    def begin(self, text: Sequence[int]) -> None:
        self._last = text[-1]

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        return Guess(self._last, (self.kind, 0)) if len(drafted) < self._times else None


def bring(monkeypatch: pytest.MonkeyPatch, *sources: DraftSource) -> None:
    there = {"some": SimpleNamespace(SOURCES=sources)} if sources else {}
    monkeypatch.setattr(packages, "modules", lambda group: there if group == "drafts" else {})


def said(folder: Path, draft: str) -> tuple[list[int], str, int]:
    """Tokens of an answer, what drafted, and how many were drafted."""
    model, _ = outcore.load_model(folder, draft=draft, **OPTIONS)
    with model.outcore as session:
        tokens = [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5, 6], max_tokens=16)]
        return tokens, session.drafting.name if session.drafting is not None else "", session.metrics.drafted


def test_one_class_brings_a_kind_of_draft(quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quick_models(2)
    plain = said(folder, "none")[0]
    bring(monkeypatch, Echo())
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(4, fixed=True))
    tokens, name, drafted = said(folder, "echo:2")
    assert tokens == plain and name == "echo:2" and drafted > 0
    with pytest.raises(UsageError, match=r"draft ehco: no such folder; did you mean echo\? .* none, ngram, echo:TIMES"):
        outcore.load_model(folder, draft="ehco", **OPTIONS)


def test_an_unknown_kind_is_refused_by_name(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match="draft blocks: give auto, none, ngram, "):
        with_draft("blocks", None, nothing, nothing)
    bring(monkeypatch, Echo())
    with pytest.raises(UsageError, match="draft /no/such/folder: needs the package outcore_drafts"):
        outcore.load_model(demo_model, draft="/no/such/folder", **OPTIONS)


@pytest.mark.parametrize("draft", ["self", "self:2", "mtp", "some/model"])
def test_without_the_package_one_line_says_what_is_missing(
    draft: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(monkeypatch)
    with pytest.raises(UsageError, match=f"^draft {draft}: needs the package outcore_drafts, [^\n]*$"):
        outcore.load_model(demo_model, draft=draft, **OPTIONS)


def test_without_the_package_auto_drafts_n_grams(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch)
    model, _ = outcore.load_model(demo_model, draft="auto", **OPTIONS)
    with model.outcore as session:
        assert session.drafting is not None and session.drafting.name == "ngram"


def test_without_the_package_a_draft_model_is_refused(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(monkeypatch)
    model, _ = outcore.load_model(quick_models(2), draft="none", **OPTIONS)
    with model.outcore, pytest.raises(UsageError, match="draft_model: needs the package outcore_drafts"):
        list(outcore.stream_generate(model, TokensOnly(), [3, 4], max_tokens=2, draft_model=nn.Linear(1, 1)))
