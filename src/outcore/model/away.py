"""Caches whose keys and values somebody keeps elsewhere: what goes back to where they were asks it, and not them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlx_lm.models.cache import CacheList

KEEPER = "_outcore_keeper"
"""The attribute of such a cache. What it refers to has no ``__dict__``: who looks for a cache's arrays passes it by."""


class Keeper(Protocol):
    """Who keeps a cache's keys and values."""

    def mark(self, cache: Any) -> Callable[[], None]:
        """What takes the cache back to what it is now, between sweeps."""


class Away:
    """Mixed in before a cache's own class while its keys and values are elsewhere. Its offset alone takes it back."""

    offset: int


def keeper_of(cache: Any) -> Keeper | None:
    """Who keeps this cache's keys and values; None: it does."""
    keeper: Keeper | None = getattr(cache, "__dict__", {}).get(KEEPER)
    return keeper


def flat(caches: Sequence[Any]) -> list[Any]:
    """Every cache, in place of lists of them what they hold."""
    return [part for c in caches for part in (flat(c.caches) if isinstance(c, CacheList) else [c])]
