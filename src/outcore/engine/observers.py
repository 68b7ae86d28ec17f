"""Moments of a sweep that others want to hear of: any number of them join, and leave."""

from __future__ import annotations

from collections.abc import Callable

Observer = Callable[[], object]


class Observers:
    """Those who are called at one moment, in the order in which they joined."""

    def __init__(self) -> None:
        self._joined: list[Observer] = []

    def join(self, observer: Observer) -> None:
        """Be called from now on; once, however often it joins."""
        if observer not in self._joined:
            self._joined.append(observer)

    def leave(self, observer: Observer) -> None:
        """Be called no more. Safe to call twice."""
        if observer in self._joined:
            self._joined.remove(observer)

    def __call__(self) -> None:
        """Call all of them; what one raises comes out, and those after it are not called."""
        for observer in tuple(self._joined):
            observer()
