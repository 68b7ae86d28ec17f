"""Shapes of JSON: keys and types, not values; and the golden files that hold them.

A word that programs branch on (``object``, ``type``, ``role``, why an answer ended) is part of a shape. Events of a
stream that have one shape and follow each other are one. ``OUTCORE_WRITE_GOLDEN=1`` writes the files anew: what changes
then is a change of what users rely on, and belongs into CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"

WORDS = {
    "object", "type", "role", "finish_reason", "stop_reason", "done_reason", "status", "stop_type", "index", "error",
    "exit_status", "code", "param",
}  # fmt: skip


def shape(value: Any, key: str = "") -> Any:
    """Of a JSON value that stands under this key."""
    if isinstance(value, dict) and key == "top_logprobs" and all(isinstance(v, float) for v in value.values()):
        return {"a token": "number"}
    if isinstance(value, dict):
        return {k: shape(v, k) for k, v in sorted(value.items())}
    if isinstance(value, list):
        found: list[Any] = []
        for each in (shape(v, key if key == "top_logprobs" else "") for v in value):
            if each not in found:
                found.append(each)
        return found
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "bool"
    if isinstance(value, int | float):
        return "number"
    return value if key in WORDS and len(value) < 40 and " " not in value else "text"


def collapsed(events: list[Any]) -> list[Any]:
    """The shapes of a stream's events in order; those that are alike and follow each other once."""
    found: list[Any] = []
    for each in map(shape, events):
        if not found or found[-1] != each:
            found.append(each)
    return found


def same(name: str, shapes: dict[str, Any], *, loose: bool = False) -> None:
    """These are the shapes of a golden file; what differs is told by its place.

    Args:
        loose: what may be null, and lists that may be empty, are so on some machines.
    """
    path = GOLDEN / f"{name}.json"
    if os.environ.get("OUTCORE_WRITE_GOLDEN"):
        path.write_text(json.dumps(shapes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    golden = json.loads(path.read_text(encoding="utf-8"))
    wrong = [
        line for key in golden.keys() | shapes.keys() for line in _differ(golden.get(key), shapes.get(key), key, loose)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def _differ(was: Any, now: Any, place: str, loose: bool) -> list[str]:
    if loose and (was in ("null", []) or now in ("null", [])) and None not in (was, now):
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        return [x for k in was.keys() | now.keys() for x in _differ(was.get(k), now.get(k), f"{place}.{k}", loose)]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return [x for n, (a, b) in pairs for x in _differ(a, b, f"{place}[{n}]", loose)]
    return [] if was == now else [f"{place}: {json.dumps(was)[:300]} became {json.dumps(now)[:300]}"]
