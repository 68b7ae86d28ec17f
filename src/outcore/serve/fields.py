"""A request's JSON object, read field by field: each is checked as it is taken, and what nobody took has no effect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..decode.request_values import NUMBERS, Bounds, logit_bias, number, stop_strings, whole_text
from ..text import shortened
from .exchange import RequestError, Sampling

UNSUPPORTED = "unsupported_parameter"

MOST_DEPTH = 128
"""Objects and lists in one another, in schemas and arguments: templates and grammars go through them recursively."""

MOST_STOPS = 64
MOST_TOOLS = 1024
MOST_IGNORED = 32

PENALTIES = ("repetition", "presence", "frequency")

SAMPLER: dict[str, Bounds] = {
    **{name: NUMBERS[name] for name in ("temperature", "top_p", "min_p", "top_k", "seed")},
    **{f"{name}_{what}": NUMBERS[f"{name}_{what}"] for name in PENALTIES for what in ("penalty", "context_size")},
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 0.5),
}
"""Fields that are named as ``Sampling``'s."""


class Fields:
    """An object of a request. A field that is null is one that is not there.

    Args:
        path: where it stands in the body, for errors: ``messages[0]``; empty: it is the body.
    """

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body, self.path = body, path
        self._taken: set[str] = set()

    def at(self, name: str) -> str:
        """Where a field stands in the body."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """A field's value, of any kind; None: it is not given."""
        self._taken.add(name)
        return self._body.get(name)

    def number(self, name: str, bounds: Bounds | None = None) -> Any:
        """A number; None: it is not given.

        Args:
            bounds: None: those of ``NUMBERS``.
        """
        value = self.take(name)
        return None if value is None else number(self.at(name), value, bounds or NUMBERS[name])

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false is needed")
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        """A string of whole characters."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "a string is needed")
        return whole_text(value, self.at(name))

    def needed(self, name: str, empty: bool = False) -> str:
        """A string that has to be there.

        Args:
            empty: whether it may have no characters.
        """
        text = self.text(name)
        if not text and not (empty and self.take(name) is not None):
            raise self.error(name, "a string is needed")
        return text

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty: it is not given."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "a list is needed")
        return [self.item(name, i, one) for i, one in enumerate(value or ())]

    def item(self, name: str, place: int, value: Any) -> Fields:
        """An object that stands in a list."""
        where = f"{self.at(name)}[{place}]"
        if not isinstance(value, dict):
            raise RequestError(f"{where}: a JSON object is needed", param=where)
        return Fields(value, where)

    def word(self, name: str, known: Iterable[str]) -> str | None:
        """One of these; None: it is not given."""
        value, words = self.take(name), tuple(known)
        if value is not None and not (isinstance(value, str) and value in words):
            raise self.error(name, f"one of {', '.join(words)} is needed")
        return value

    def inner(self, name: str) -> Fields | None:
        """An object; None: it is not given."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "a JSON object is needed")
        return Fields(value, self.at(name))

    def sound(self, name: str) -> dict[str, Any] | None:
        """An object that templates and grammars can take; None: it is not given."""
        return None if self.inner(name) is None else sound(self.take(name), self.at(name))

    def refuse(self, **neutral: tuple[Any, ...]) -> None:
        """Fields that are known and not supported, but for these values, which ask for nothing.

        Raises:
            RequestError: one of them asks for something.
        """
        for name, values in neutral.items():
            value = self.take(name)
            if value is not None and not any(value == v and type(value) is type(v) for v in values):
                raise self.error(name, "not supported; leave it out", UNSUPPORTED)

    def ignore(self, *names: str) -> None:
        """Fields that say nothing about an answer: they are taken."""
        self._taken.update(names)

    def sampling(self, default: Sampling) -> Sampling:
        """How tokens are drawn, by the fields that are named as ``Sampling``'s."""
        given = {name: self.number(name, bounds) for name, bounds in SAMPLER.items()}
        values = {name: getattr(default, name) if value is None else value for name, value in given.items()}
        if given["repetition_penalty"] == 0:  # mlx_lm.server's word for none
            values["repetition_penalty"] = 1.0
        bias = self.take("logit_bias")
        values["logit_bias"] = default.logit_bias if bias is None else logit_bias(bias)
        return Sampling(**values)

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """Strings that end an answer."""
        stops = stop_strings(self.take(name), self.at(name))
        if len(stops) > MOST_STOPS:
            raise self.error(name, f"at most {MOST_STOPS} strings")
        return stops

    def rest(self) -> Iterator[str]:
        """Where the fields stand that nobody took and that are not null."""
        return (self.at(name) for name, value in self._body.items() if value is not None and name not in self._taken)

    def unused(self, *names: str) -> tuple[str, ...]:
        """Names for ``Answering.ignored``: what nobody took, and these; printable ASCII without commas."""
        found = dict.fromkeys(_plain(name) for name in (*self.rest(), *names))
        return tuple(found)[:MOST_IGNORED]

    def error(self, name: str, wanted: str, code: str = "invalid_request") -> RequestError:
        """That a field is not what it has to be."""
        return RequestError(f"{self.at(name)}: {wanted}", code, param=self.at(name))


def _plain(name: str) -> str:
    return ascii(shortened(name))[1:-1].replace(",", "")


def sound(value: Any, where: str) -> Any:
    """The value, if templates and grammars can take it: not nested without end, whole characters, finite numbers.

    Raises:
        RequestError: it is not so.
    """
    layer: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for part in layer:
            if isinstance(part, dict):
                below += (*part.keys(), *part.values())
            elif isinstance(part, list):
                below += part
            elif isinstance(part, str):
                whole_text(part, where)
            elif isinstance(part, float) and not math.isfinite(part):
                raise RequestError(f"{where}: a number is out of range", param=where)
            elif isinstance(part, int) and part.bit_length() > 1024:
                raise RequestError(f"{where}: a whole number is out of range", param=where)
        if not below:
            return value
        layer = below
    raise RequestError(f"{where}: more than {MOST_DEPTH} objects and lists in one another", param=where)


def check_count(tools: Sequence[Any], where: str) -> None:
    """Refuse more tools than any model can be told of.

    Raises:
        RequestError: there are.
    """
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"{where}: {len(tools)} of them; at most {MOST_TOOLS}", param=where)


def second(names: Iterable[str]) -> int | None:
    """Which of them is the first that was there before; None: each is there once."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            return i
        seen.add(name)
    return None


def extent(value: Any, most: int) -> int:
    """Characters of all names and texts in a value, and one for each other value; beyond ``most`` it ends early."""
    count, layer = 0, [value]
    while layer and count <= most:
        part = layer.pop()
        if isinstance(part, str):
            count += len(part)
        else:
            count += 1
            if isinstance(part, Mapping):
                layer += (*part.keys(), *part.values())
            elif isinstance(part, list | tuple):
                layer += part
    return count


def json_object(text: str, where: str) -> dict[str, Any]:
    """An object that a string holds as JSON, such as a call's arguments; empty: one without fields.

    Raises:
        RequestError: it holds something else.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: a JSON object, written as a string, is needed", param=where)
    found: dict[str, Any] = sound(value, where)
    return found
