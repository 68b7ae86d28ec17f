"""What mlx-lm calls a cache's state, as arrays and JSON, and back into a new cache of the same kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .blocks import Block

Packed = tuple[Any, list[mx.array]]
"""A cache's state: what it is made of, for JSON, with numbers in place of its arrays; and those."""


def state_of(cache: Any) -> Packed:
    """What mlx-lm calls a cache's state, its arrays by reference.

    Raises:
        TypeError: there is something in it that cannot be kept.
    """
    arrays: list[mx.array] = []
    return _packed(cache.state, arrays), arrays


def _packed(tree: Any, arrays: list[mx.array]) -> Any:
    if isinstance(tree, mx.array):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [_packed(part, arrays) for part in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"a {type(tree).__name__}")


def _unpacked(tree: Any, arrays: Sequence[mx.array]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    if kind == "array":
        return arrays[inside]
    parts = [_unpacked(part, arrays) for part in inside]
    return tuple(parts) if kind == "tuple" else parts


def named(states: dict[int, Packed]) -> dict[str, mx.array]:
    """Arrays of several caches' states, by the cache and their number in it."""
    return {f"{i}.{n}": a for i, (_, arrays) in states.items() for n, a in enumerate(arrays)}


def notes(states: dict[int, Packed]) -> dict[str, str]:
    return {str(i): json.dumps(tree) for i, (tree, _) in states.items()}


def set_state(cache: Any, block: Block, i: int) -> None:
    """What ``state_of`` gave, into a new cache of the same kind."""
    count = sum(name.split(".")[0] == str(i) for name in block.arrays)
    cache.state = _unpacked(json.loads(block.notes[str(i)]), [block.arrays[f"{i}.{n}"] for n in range(count)])
