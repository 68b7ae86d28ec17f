"""Files and lines that went wrong: what hypothesis draws from a whole one.

A mutation keeps most of what it starts from, so that it is caught late, where it hurts, and not by the first check.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, -0.5,
    1e-300, 1e300, float("nan"), float("inf"), float("-inf"), True, False,
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "x", "0", "-1", "nan", "\x00", "\n", "a\nb", "\ud800", "\udcff", "é", "𝄞", "../x", "/", ".", "..", "a/b",
    "[red]", "[/]", "%s", "{}", "F32", "BF16", "I64", "weight", "x" * 5000,
]  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


OTHERS: list[Any] = [None, [], {}, [None], [[]], {"": {}}, {"x": None}, [0], [-1], [2**63], ["x"], _nested(40)]

values = st.sampled_from(NUMBERS + TEXTS + OTHERS) | st.integers() | st.floats() | st.text(max_size=20)
"""What a JSON document would rather not hold."""


def documents(base: Any) -> st.SearchStrategy[Any]:
    """The JSON value with one to three of its parts replaced, dropped, doubled, or put in another's place."""
    return st.builds(_edited, st.just(base), st.lists(_edits(), min_size=1, max_size=3))


def _edits() -> st.SearchStrategy[tuple[int, str, Any, int]]:
    actions = st.sampled_from(["put", "put", "put", "drop", "move", "add", "scale"])
    return st.tuples(st.integers(0, 2**16), actions, values, st.integers(0, 2**16))


def _edited(base: Any, edits: list[tuple[int, str, Any, int]]) -> Any:
    document = copy.deepcopy(base)
    for where, action, value, other in edits:
        value = copy.deepcopy(value)
        places = _places(document)
        if not places:
            return value
        holder, key = places[where % len(places)]
        if action == "drop":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[str(value)[:50]] = holder[key]
        elif action == "add":
            holder.insert(key, value)
        elif action == "scale" and isinstance(holder[key], int | float):
            holder[key] = holder[key] * [0, -1, 2, 1000, 10**9][other % 5]
        elif action == "move":
            source, at = places[other % len(places)]
            holder[key] = copy.deepcopy(source[at])
        else:
            holder[key] = value
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every place of a document that holds something: a list or an object, and an index or a name."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    if not isinstance(document, dict | list):
        return []
    found: list[tuple[Any, Any]] = []
    for key, value in list(pairs):
        found.append((document, key))
        # A vocabulary of thousands of words would be all that is ever changed.
        if isinstance(value, list | dict) and len(value) <= 300:
            found += _places(value)
    return found


def texts(base: Any) -> st.SearchStrategy[bytes]:
    """A JSON file: its document changed, its bytes changed, or anything."""
    written = documents(base).map(lambda d: json.dumps(d).encode())
    return st.one_of(written, written, written, changed(json.dumps(base).encode()), st.binary(max_size=60))


def changed(base: bytes) -> st.SearchStrategy[bytes]:
    """Bytes with some cut off, changed, doubled or put in between."""
    edit = st.tuples(st.integers(0, len(base)), st.sampled_from(["cut", "flip", "put", "drop"]), st.binary(max_size=9))
    return st.builds(_changed, st.just(base), st.lists(edit, min_size=1, max_size=4))


def _changed(base: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    data = bytearray(base)
    for at, action, new in edits:
        at = min(at, len(data))
        if action == "cut":
            del data[at:]
        elif action == "drop":
            del data[at : at + len(new)]
        elif action == "put":
            data[at:at] = new
        else:
            data[at : at + len(new)] = new
    return bytes(data)


def safetensors(base: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file: its header changed and its length kept true, or its bytes changed near the beginning."""
    length = int.from_bytes(base[:8], "little")
    header, body = json.loads(base[8 : 8 + length]), base[8 + length :]

    def joined(document: Any) -> bytes:
        text = json.dumps(document).encode()
        return len(text).to_bytes(8, "little") + text + body

    headers = documents(header).map(joined)
    # All in one place of a large file would change weights alone, which nothing can tell.
    begins = changed(base[: 8 + length]).map(lambda begin: begin + body)
    lengths = st.sampled_from([0, 1, length - 1, length + 1, len(base), 2**32, 2**63, 2**64 - 1])
    others = lengths.map(lambda n: n.to_bytes(8, "little") + base[8:])
    ends = st.integers(-9, 9).map(lambda n: base[:n] if n < 0 else base + bytes(n))
    return st.one_of(headers, headers, begins, others, ends)
