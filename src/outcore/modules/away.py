"""Caches whose keys and values somebody keeps elsewhere: what goes back to where they were asks it, and not them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .cache_rollback import KEEPER, by_offset
from .call_values import flat
from .hooks import arrays_in


class Keeper(Protocol):
    """Who keeps a cache's keys and values elsewhere, as KV offload does."""

    def mark(self, cache: Any) -> Callable[[], None]:
        """What takes the cache back to what it is now, between passes."""

    def bring_back(self, cache: Any) -> None:
        """All of it into memory, and nobody keeps it any more.

        Raises:
            StoreError: the disk failed.
        """


def keeper_of(cache: Any) -> Keeper | None:
    """Who keeps this cache's keys and values; None: it does."""
    keeper: Keeper | None = getattr(cache, "__dict__", {}).get(KEEPER)
    return keeper


def is_away(cache: Any) -> bool:
    """Whether its keys and values are elsewhere now: asked for, they would be read."""
    return getattr(type(cache), "outcore_away", False)


def in_memory(caches: Sequence[Any]) -> None:
    """Bring back what is kept elsewhere of any of these caches: nobody keeps it any more."""
    for cache in flat(caches):
        if (keeper := keeper_of(cache)) is not None:
            if is_away(cache):
                keeper.bring_back(cache)
            cache.__dict__.pop(KEEPER, None)


def snapshot_bytes(cache: Sequence[Any]) -> int:
    """Bytes that a snapshot keeps from being freed once the caches have moved on: of all that is not taken back by an
    offset. Exact for caches that hold their arrays; 0 for empty ones."""
    return sum(a.nbytes for c in flat(cache) if not by_offset(c) for a in arrays_in(c))
