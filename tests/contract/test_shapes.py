"""The comparison of shapes itself: what it lets through and what not."""

from __future__ import annotations

import json
from pathlib import Path

import json_shapes as shapes
import pytest


def test_a_key_a_type_and_a_word_that_changed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "GOLDEN", tmp_path)
    answer = {"object": "chat.completion", "n": 1, "parts": [{"text": "a"}, {"text": "b"}], "none": None}
    was = {"x": shapes.shape(answer)}
    (tmp_path / "it.json").write_text(json.dumps(was))
    shapes.same("it", {"x": shapes.shape(answer | {"n": 2.5, "parts": [{"text": "c"}]})})
    shapes.same("it", {"x": shapes.shape(answer | {"none": 3, "parts": []})}, loose=True)
    for wrong in ({"object": "chat"}, {"n": "1"}, {"more": 1}, {"parts": [{"text": 1}]}, {"none": 3}):
        with pytest.raises(AssertionError, match=next(iter(wrong))):
            shapes.same("it", {"x": shapes.shape(answer | wrong)})
    with pytest.raises(AssertionError, match="n: "):
        shapes.same("it", {"x": shapes.shape({k: v for k, v in answer.items() if k != "n"})}, loose=True)
    assert shapes.collapsed([{"a": 1}, {"a": 2}, {"b": 1}, {"a": 3}]) == [
        {"a": "number"},
        {"b": "number"},
        {"a": "number"},
    ]
