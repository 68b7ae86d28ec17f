"""Caches whose keys and values somebody keeps elsewhere: what goes back to where they were asks it, and not them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .cache_rollback import KEEPER, by_offset
from .call_values import flat
from .hooks import arrays_in

KEPT = ("keys", "values")
"""The attributes of a cache that are kept elsewhere."""


class Keeper(Protocol):
    """Who keeps a cache's keys and values elsewhere, as KV offload does."""

    def mark(self, cache: Any) -> Callable[[], None]:
        """What takes the cache back to what it is now, between passes."""

    def bring_back(self, cache: Any) -> None:
        """All of it into memory, and nobody keeps it any more.

        Raises:
            StoreError: the disk failed.
        """

    def quantized(self, cache: Any, group_size: int, bits: int) -> Any:
        """The cache as a quantized one, which it becomes when it is needed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the cache would have in memory."""


def keeper_of(cache: Any) -> Keeper | None:
    """Who keeps this cache's keys and values; None: it does."""
    keeper: Keeper | None = getattr(cache, "__dict__", {}).get(KEEPER)
    return keeper


class Away:
    """Mixed in before a cache's own class while its keys and values are elsewhere. Its offset alone takes it back.

    Whoever looks at keys or values finds what it would hold in memory, read for who asks; whoever assigns to them, or
    adds tokens outside of a streamed layer, has them in memory from then on.
    """

    offset: int
    outcore_away = True
    """Asked for by ``cache_rollback``."""

    def __getattr__(self, name: str) -> Any:
        if name not in KEPT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEPT:
            self._keeper.bring_back(self)
        object.__setattr__(self, name, value)

    def __deepcopy__(self, _: Any) -> Any:
        """In memory."""
        return self._whole()

    def __reduce_ex__(self, _: Any) -> Any:
        """In memory, for whoever copies or pickles it."""
        whole = self._whole()
        return _made, (type(whole), whole.__dict__)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self._keeper.bring_back(self)
        cache: Any = self  # of its own class now
        return cache.update_and_fetch(keys, values)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """As mlx-lm's, when it is needed next."""
        return self._keeper.quantized(self, group_size, bits)

    def empty(self) -> bool:
        """Whether it holds no tokens."""
        return not self.offset

    @property
    def nbytes(self) -> int:
        """Of the arrays that it would have in memory."""
        return self._keeper.nbytes

    @property
    def _keeper(self) -> Keeper:
        keeper: Keeper = self.__dict__[KEEPER]
        return keeper

    def _whole(self) -> Any:
        """The same in memory; this one stays as it is."""
        made = _made(type(self), self.__dict__)
        self._keeper.bring_back(made)
        return made


def _made(kind: Any, attributes: dict[str, Any]) -> Any:
    made: Any = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


_AWAY: dict[type, type] = {
    # Named as what they are for whoever writes a cache's class down.
    KVCache: type("KVCache", (Away, KVCache), {"__module__": __name__}),
    QuantizedKVCache: type(
        "QuantizedKVCache", (Away, QuantizedKVCache), {"__module__": __name__, "to_quantized": property()}
    ),
}
_PLAIN = {away: plain for plain, away in _AWAY.items()}

PLAIN = tuple(_AWAY)
"""Classes of caches that can be away."""


def as_away(cache: Any) -> None:
    """A cache of one of ``PLAIN`` holds nothing itself any more."""
    for name in KEPT:
        cache.__dict__.pop(name, None)
    cache.__class__ = _AWAY.get(type(cache), type(cache))


def as_plain(cache: Any) -> None:
    """A cache is mlx-lm's own again, with the arrays that it will be given."""
    cache.__class__ = _PLAIN.get(type(cache), type(cache))


def is_away(cache: Any) -> bool:
    """Whether its keys and values are elsewhere now: asked for, they would be read."""
    return getattr(type(cache), "outcore_away", False)


def in_memory(caches: Sequence[Any]) -> None:
    """Bring back what is kept elsewhere of any of these caches: nobody keeps it any more."""
    for cache in flat(caches):
        if (keeper := keeper_of(cache)) is not None:
            if isinstance(cache, Away):
                keeper.bring_back(cache)
            cache.__dict__.pop(KEEPER, None)


def snapshot_bytes(cache: Sequence[Any]) -> int:
    """Bytes that a snapshot keeps from being freed once the caches have moved on: of all that is not taken back by an
    offset. Exact for caches that hold their arrays; 0 for empty ones."""
    return sum(a.nbytes for c in flat(cache) if not by_offset(c) for a in arrays_in(c))
