"""Names all over a process that stand for something else for a while, and are given back exactly.

``from mlx_lm import load`` makes a name in the module that says so. To have every such module use another function,
each name that *is* the function is found and set; later each that is the replacement is set back.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any


class SwappedNames:
    """Objects, and what stands in their places in all modules that are loaded, but for some.

    Args:
        pairs: originals and their replacements.
        except_in: a package whose modules keep what they have, and those of packages that are named after it.
    """

    def __init__(self, pairs: Iterable[tuple[object, object]], except_in: str) -> None:
        self._pairs = tuple(pairs)
        self._except_in = except_in
        # Modules may leave ``sys.modules`` while somebody still uses them.
        self._touched: weakref.WeakSet[ModuleType] = weakref.WeakSet()
        self._own: set[tuple[str, str]] | None = None  # names that were replacements before any was put

    def put(self) -> None:
        """Put the replacements in place, also in modules that were loaded since. Safe to call twice."""
        if self._own is None:
            known = {id(new) for _, new in self._pairs}
            self._own = {(module.__name__, name) for module, name, value in self._names() if id(value) in known}
        self._exchange({id(original): new for original, new in self._pairs})

    def give_back(self) -> None:
        """Put the originals back, also in modules that were loaded meanwhile and got the replacements. Safe to call
        twice."""
        if self._own is not None:
            self._exchange({id(new): original for original, new in self._pairs})
            self._own = None
            self._touched.clear()

    def _exchange(self, instead: Mapping[int, object]) -> None:
        for module, name, value in self._names():
            if id(value) in instead and (module.__name__, name) not in (self._own or ()):
                # Not setattr: some modules make attributes when they are asked for them.
                _namespace(module)[name] = instead[id(value)]
                self._touched.add(module)

    def _names(self) -> Iterator[tuple[ModuleType, str, Any]]:
        for module in {id(m): m for m in (*self._modules(), *tuple(self._touched))}.values():
            for name, value in list(_namespace(module).items()):
                yield module, name, value

    def _modules(self) -> Iterator[ModuleType]:
        for name, module in list(sys.modules.items()):
            own = name.partition(".")[0].partition("_")[0] == self._except_in
            if isinstance(module, ModuleType) and not own:
                yield module


def _namespace(module: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found
