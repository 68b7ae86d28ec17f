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

import ast
import json
import re
from collections.abc import Callable
from typing import Any

FORMAT = re.compile(r"[+,]?(?:\.\d+)?[fdegs%]")
# A selector, or a key that is no name of Python's; Python then reads both as strings in brackets.
QUOTED = re.compile(r"\[([^\]]*)\]|(\.[A-Za-z_]\w*(?:-\w+)+)")


class NumberError(Exception):
    """A title that cannot be read, or that its result does not answer."""


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {"max": max, "min": min, "sum": sum, "count": len}


def _values(node: ast.expr, data: Any) -> list[Any]:
    """All values that an expression stands for, by Python's own reading of it with quoted selectors."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return [number]
        case ast.Name(id=key):
            return [_key(data, key)]
        case ast.Attribute(value=inner, attr=key):
            return [_key(value, key) for value in _values(inner, data)]
        case ast.Subscript(value=inner, slice=ast.Constant(value=str(selector))):
            return [entry for value in _values(inner, data) for entry in _select(value, selector)]
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as operator, right=right):
            a, b = _number(_one(left, data)), _number(_one(right, data))
            if isinstance(operator, ast.Div) and b == 0:
                raise NumberError("division by 0")
            return [a * b if isinstance(operator, ast.Mult) else a / b]
        case ast.Call(func=ast.Name(id=name), args=args) if name in FUNCTIONS:
            given = [value for each in args for value in _entries(_values(each, data))]
            if not given and name != "count":
                raise NumberError(f"{name} of nothing")
            return [FUNCTIONS[name]([*given] if name == "count" else [_number(value) for value in given])]
        case ast.Call(func=ast.Name(id=name)):
            raise NumberError(f"no function {name!r}; there are {', '.join(FUNCTIONS)}")
    raise NumberError(f"cannot read {ast.unparse(node)!r}")


def _entries(found: list[Any]) -> list[Any]:
    return found[0] if len(found) == 1 and isinstance(found[0], list) else found


def _one(node: ast.expr, data: Any) -> Any:
    entries = _entries(found := _values(node, data))
    if len(found) != 1 or entries is not found:
        raise NumberError(f"{ast.unparse(node)!r}: {len(entries)} entries where one is wanted: not a number")
    return found[0]


def _key(value: Any, key: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise NumberError(f"no {key!r}")
    return value[key]


def _select(value: Any, selector: str) -> list[Any]:
    if selector.startswith("."):
        return [_key(value, selector[1:])]
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
        raise NumberError(f"{value!r}: not a number")
    return value


def evaluate(title: str, data: Any) -> str:
    """What a field with this title shows.

    Raises:
        NumberError: the title cannot be read, or ``data`` does not have what it asks for.
    """
    expression, _, spec = title.strip().rpartition(" ")
    if not expression or not FORMAT.fullmatch(spec):
        raise NumberError(f"title {title!r}: write an expression and a format, such as 'a.b .2f'")
    try:
        read = ast.parse(QUOTED.sub(lambda m: f"[{(m[1] or m[2]).strip()!r}]", expression), mode="eval").body
    except SyntaxError as e:
        raise NumberError(f"cannot read {expression!r}") from e
    value = _one(read, data)
    if spec.endswith("s"):
        return str(value)
    number = _number(value)
    return format(round(number) if spec.endswith("d") else number, spec)
