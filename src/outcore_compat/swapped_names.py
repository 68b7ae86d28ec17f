"""Names all over a process that stand for something else for a while, and are given back exactly.

``from mlx_lm import load`` makes a name in the module that says so. To have every such module use another function,
each name that *is* the function is found and set; later each that is the replacement is set back.
"""

from __future__ import annotations

import sys
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
        self._own: set[tuple[str, str]] | None = None  # names that were replacements before any was put

    def put(self) -> None:
        """Put the replacements in place, also in modules that were loaded since. Safe to call twice."""
        if self._own is None:
            known = {id(new) for _, new in self._pairs}
            self._own = {(module, name) for module, _, name, value in self._names() if id(value) in known}
        self._exchange({id(original): new for original, new in self._pairs})

    def give_back(self) -> None:
        """Put the originals back, also in modules that were loaded meanwhile and got the replacements. Safe to call
        twice."""
        self._exchange({id(new): original for original, new in self._pairs})
        self._own = None

    def _exchange(self, instead: Mapping[int, object]) -> None:
        for module, names, name, value in self._names():
            if id(value) in instead and (module, name) not in (self._own or ()):
                names[name] = instead[id(value)]

    def _names(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """A module's name and namespace, and a name and a value there."""
        for module, loaded in list(sys.modules.items()):
            own = module.partition(".")[0].partition("_")[0] == self._except_in
            if isinstance(loaded, ModuleType) and not own:
                # Not getattr and setattr: some modules make attributes when they are asked for them.
                names: dict[str, Any] = object.__getattribute__(loaded, "__dict__")
                for name, value in list(names.items()):
                    yield module, names, name, value
