"""Any JSON that a client may send, alone or in the middle of a body that is understood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

WORDS = ("user", "assistant", "system", "tool", "function", "text", "auto", "\ud800", "", "9" * 5000, "[" * 3000)

TEXTS = st.text(alphabet=st.characters(), max_size=5) | st.sampled_from(WORDS)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**400), 10**400), st.just(10**4000),
    st.floats(allow_nan=False), TEXTS,
)  # fmt: skip


def values(names: Iterable[str]) -> st.SearchStrategy[Any]:
    """Any value; fields of objects often have these names."""
    known = st.sampled_from(sorted({"type", "role", "content", "x", *names}))
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(known | TEXTS, inner, max_size=4),
        max_leaves=12,
    )


def deep(depth: int = 50_000) -> Any:
    """Lists and objects in one another."""
    value: Any = "x"
    for i in range(depth):
        value = [value] if i % 2 else {"type": value}
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(body: dict[str, Any], place: int, value: Any) -> dict[str, Any]:
    """A body with another value in one of its ``places``."""
    body = _copied(body)
    holder, key = list(places(body))[place]
    holder[key] = value
    return body


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value
