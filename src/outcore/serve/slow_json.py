"""JSON of megabytes, read in Python: slower than any library, and other threads run meanwhile.

A library reads a body in one call, in which it keeps Python's lock: three million escapes, or as many names, take it a
tenth of a second and more, in which nobody is heard. Here no single step takes longer than ``WINDOW`` characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from json import decoder
from typing import Any

from .exchange import RequestError

WINDOW = 1 << 16
"""Characters that are looked at in one step."""

_TOKEN = re.compile(
    r"(?P<space>[ \t\n\r]{1,65536}+)|[\[\]{}:,\"]|true|false|null"
    r"|(?P<number>-?(?:0|[1-9][0-9]{0,4299}+)(?P<real>(?:\.[0-9]{1,4300}+)?(?:[eE][-+]?[0-9]{1,4300}+)?)(?![0-9.eE]))"
)
_RUN = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
_scan: Callable[[str, int], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]
_HALF = re.compile("[\\ud800-\\udfff]")
_WORDS = {"true": True, "false": False, "null": None}

_VALUE, _ITEM, _NAME, _FIRST_NAME, _COLON, _NEXT = range(6)
"""What has to come: a value; one, or the end of a list; a name; one, or an object's end; a colon; a comma or an end."""


def decoded(text: str, depth: int, values: int) -> Any:
    """What a JSON document says.

    Args:
        depth: brackets in brackets at most. ``values``: values in all at most.

    Raises:
        RequestError: a number is too large for a float, brackets are too deep, or there are too many values.
        ValueError: it is not JSON; says where.
    """
    root: list[Any] = []
    held: Any = root
    outer: list[Any] = []
    state, at, name, left = _VALUE, 0, "", values
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            raise _wrong(at)
        start, at, kind = at, found.end(), found.lastgroup
        if kind == "space":
            continue
        first = text[start]
        if state is _NEXT and outer and first == ",":
            state = _NAME if isinstance(held, dict) else _VALUE
        elif first in "]}":
            fits = isinstance(held, dict) is (first == "}")
            if not outer or not fits or state not in (_NEXT, _FIRST_NAME if first == "}" else _ITEM):
                raise _wrong(start)
            held, state = outer.pop(), _NEXT
        elif state is _COLON and first == ":":
            state = _VALUE
        elif state in (_NAME, _FIRST_NAME) and first == '"':
            name, at = _string(text, at)
            state = _COLON
        elif state in (_VALUE, _ITEM) and first not in ":,":
            value: Any
            left -= 1
            if left < 0:
                raise too_many(values)
            if first == '"':
                value, at = _string(text, at)
            elif first in "[{":
                value = [] if first == "[" else {}
            elif kind == "number":
                value = _number(found)
            else:
                value = _WORDS[found[0]]
            if isinstance(held, dict):
                held[name] = value
            else:
                held.append(value)
            state = _NEXT
            if first in "[{":
                outer.append(held)
                if len(outer) > depth:
                    raise RequestError(f"the body has more than {depth} brackets inside each other")
                held, state = value, _ITEM if first == "[" else _FIRST_NAME
        else:
            raise _wrong(start)
    if outer or state is not _NEXT:
        raise ValueError("it ends in the middle")
    return root[0]


def too_many(values: int) -> RequestError:
    """That a body holds more than so many values."""
    return RequestError(f"the body holds more than {values} values", "request_too_large", status=413)


def _wrong(at: int) -> ValueError:
    return ValueError(f"not what may come at character {at}")


def _number(found: re.Match[str]) -> int | float:
    if not found["real"]:
        return int(found["number"])
    value = float(found["number"])
    if math.isinf(value):
        raise RequestError("the body holds a number that is too large")
    return value


def _string(text: str, at: int) -> tuple[str, int]:
    """A string's text, and where it ends; ``at``: behind its first quotation mark."""
    parts: list[str] = []
    while True:
        found = _RUN.match(text, at, at + WINDOW)
        assert found is not None
        end = found.end()
        part = text[at:end] if "\\" not in found[0] else _scan(f'{found[0]}"', 0)[0]
        ended = end < len(text) and text[end] == '"'
        if not ended and end == at:
            raise _wrong(end)
        if not ended and end - at > 6 and "\ud800" <= part[-1] <= "\udbff":
            part, end = part[:-1], end - 6  # half of an escaped character: the other half is in the next step
        if "\\" in found[0] and (half := _HALF.search(part)):
            raise ValueError(f"half of a surrogate pair after character {at + half.start()}")
        parts.append(part)
        at = end
        if ended:
            return "".join(parts), end + 1
