"""Replaces objects under every name in a process, and restores each exactly.

``from mlx_lm import load`` makes a name in the importing module. To have every such module use another function, each
name that *is* the function is set to the replacement, and later set back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from types import ModuleType
from typing import Any


class SwappedNames:
    """Replaces objects in all loaded modules but some.

    Args:
        pairs: originals and their replacements.
        except_in: a package whose modules, and those of packages named after it, are left as they are.
    """

    def __init__(self, pairs: Iterable[tuple[object, object]], except_in: str) -> None:
        self._pairs = tuple(pairs)
        self._except_in = except_in
        self._own: set[tuple[str, str]] | None = None  # names that were replacements to begin with

    def put(self) -> None:
        """Puts the replacements in place, also in modules that were loaded since. Safe to call twice."""
        if self._own is None:
            known = {id(new) for _, new in self._pairs}
            self._own = {(module, name) for module, _, name, _ in self._names(known)}
        self._exchange({id(original): new for original, new in self._pairs})

    def give_back(self) -> None:
        """Restores the originals, also in modules that were loaded meanwhile. Safe to call twice."""
        self._exchange({id(new): original for original, new in self._pairs})
        self._own = None

    def _exchange(self, instead: Mapping[int, object]) -> None:
        for module, names, name, value in self._names(instead.keys()):
            if (module, name) not in (self._own or ()):
                names[name] = instead[id(value)]

    def _names(self, wanted: Set[int]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Yields each module's name and namespace, with a name in it and its value, whose identity is wanted."""
        for module, loaded in list(sys.modules.items()):
            own = module.partition(".")[0].partition("_")[0] == self._except_in
            if issubclass(type(loaded), ModuleType) and not own:
                # Neither isinstance nor getattr: some objects only say that they are modules, some make attributes.
                names: dict[str, Any] = object.__getattribute__(loaded, "__dict__")
                # Most have none: a look at all values at once takes a tenth of one at each name.
                if not wanted.isdisjoint(map(id, list(names.values()))):
                    yield from (
                        (module, names, name, value) for name, value in list(names.items()) if id(value) in wanted
                    )
