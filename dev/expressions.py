"""What a number of the docs is made of: where it stands in a result, and how it is written.

An expression has:

    a.b[0].c             a path
    rows[mode=outcore,resident_units=0].s_per_token
                         the one entry of a list that has these values; null, true, false as in JSON
    disk[*].gbps         of all entries, as arguments of a function
    a / b, a * 100
    max(...) min(...) sum(...)
    count(results[variant=tiny])   how many entries
"""

import json
import re
from collections.abc import Callable
from typing import Any

FORMAT = re.compile(r"[+,]?(?:\.\d+)?[fdegs%]")
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<name>[A-Za-z_][\w-]*)|(?P<other>[*/(),.]|\[[^\]]*\]))"
)


class NumberError(Exception):
    """A title that cannot be read, or that its result does not answer."""


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {"max": max, "min": min, "sum": sum, "count": len}


class Expression:
    """A recursive-descent reader that computes as it goes: products of numbers, paths and functions."""

    def __init__(self, text: str, data: Any) -> None:
        self.text = text
        self.data = data
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            match = TOKEN.match(text, at)
            if match is None:
                raise NumberError(f"cannot read {text[at:]!r}")
            self.tokens.append((match.lastgroup or "", match.group(match.lastgroup or 0)))
            at = match.end()
        self.at = 0

    def value(self) -> Any:
        """What the whole expression comes to."""
        result = self._product()
        if self.at < len(self.tokens):
            raise NumberError(f"{self.text!r}: {self.tokens[self.at][1]!r} is one too many")
        if isinstance(result, list):
            raise NumberError(f"{self.text!r}: {len(result)} entries where one is wanted")
        return result

    def _peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def _next(self) -> tuple[str, str]:
        if self.at >= len(self.tokens):
            raise NumberError(f"{self.text!r}: ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, wanted: str) -> None:
        if self._next()[1] != wanted:
            raise NumberError(f"{self.text!r}: {wanted!r} is missing")

    def _product(self) -> Any:
        result = self._atom()
        while self._peek() in ("*", "/"):
            operator = self._next()[1]
            other = _number(self._atom())
            if operator == "/" and other == 0:
                raise NumberError(f"{self.text!r}: division by 0")
            result = _number(result) * other if operator == "*" else _number(result) / other
        return result

    def _atom(self) -> Any:
        kind, token = self._next()
        if kind == "number":
            return float(token)
        if kind == "name" and self._peek() == "(":
            return self._function(token)
        if kind != "name":
            raise NumberError(f"{self.text!r}: {token!r} is no path")
        return self._path(token)

    def _function(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise NumberError(f"no function {name!r}; there are {', '.join(FUNCTIONS)}")
        self._expect("(")
        values: list[Any] = []
        while True:
            value = self._product()
            values += value if isinstance(value, list) else [value]
            if self._peek() != ",":
                break
            self._next()
        self._expect(")")
        if name == "count":
            return len(values)
        if not values:
            raise NumberError(f"{self.text!r}: {name} of nothing")
        return FUNCTIONS[name]([_number(v) for v in values])

    def _path(self, first: str) -> Any:
        found = [_key(self.data, first)]
        while self._peek() == "." or self._peek().startswith("["):
            token = self._next()[1]
            if token == ".":
                key = self._next()[1]
                found = [_key(entry, key) for entry in found]
                continue
            found = [entry for value in found for entry in _select(value, token[1:-1].strip())]
        if len(found) == 1:
            return found[0]
        return found


def _key(value: Any, key: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise NumberError(f"no {key!r}")
    return value[key]


def _select(value: Any, selector: str) -> list[Any]:
    if not isinstance(value, list):
        raise NumberError(f"[{selector}]: not a list")
    if selector == "*":
        return value
    if re.fullmatch(r"-?\d+", selector):
        try:
            return [value[int(selector)]]
        except IndexError:
            raise NumberError(f"[{selector}]: the list has {len(value)} entries") from None
    conditions = [re.fullmatch(r"\s*([\w.-]+?)\s*=\s*(.*?)\s*", part) for part in selector.split(",")]
    if None in conditions:
        raise NumberError(f"[{selector}]: write an index, * or key=value")
    return [v for v in value if all(_shown(v, c[1]) == c[2] for c in conditions if c)]


def _shown(entry: Any, path: str) -> str:
    for key in path.split("."):
        entry = _key(entry, key)
    return entry if isinstance(entry, str) else json.dumps(entry)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        raise NumberError(f"{what}: not a number")
    return value


def evaluate(title: str, data: Any) -> str:
    """What a field with this title shows.

    Raises:
        NumberError: the title cannot be read, or ``data`` does not have what it asks for.
    """
    expression, _, spec = title.strip().rpartition(" ")
    if not expression or not FORMAT.fullmatch(spec):
        raise NumberError(f"title {title!r}: write an expression and a format, such as 'a.b .2f'")
    value = Expression(expression, data).value()
    if spec.endswith("s"):
        return str(value)
    number = _number(value)
    return format(round(number) if spec.endswith("d") else number, spec)
