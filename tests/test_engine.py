"""The engine behind a model: complete when constructed, and changed by its own methods alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import outcore
import zoo
from outcore.engine.engine import Engine
from stand_ins import TokensOnly

OF_TEXTS = {"found", "in_cache", "text", "acceptance"}
"""What a session keeps of the last text; whoever wrote it writes it down."""


@pytest.mark.parametrize("resident", [None, 1])
def test_nothing_outside_assigns_to_an_engines_attributes(
    resident: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "model")
    assigned: set[str] = set()

    def checked(self: Engine, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        if name not in OF_TEXTS and frame.f_locals.get("self") is not self:
            assigned.add(f"{frame.f_globals['__name__']}: {name}")
        object.__setattr__(self, name, value)

    monkeypatch.setattr(Engine, "__setattr__", checked)
    model, _ = outcore.load_model(folder, memory="20MB", resident=resident, context=64, prompt=16, draft="ngram")
    with model.outcore as session:
        assert (session.streaming is None) == (resident is None)
        said = [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=8)]
        session.residency.layers.shed(1)
        session.residency.layers.regrow(1)
        session.residency.reserve(400, 300)
        assert [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=8)] == said
        session.allow(session.plan.budget_bytes + 1000)
    assert session.closed
    assert not assigned
