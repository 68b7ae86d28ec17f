"""Caches whose keys and values lie on disk: of mlx-lm's classes to who looks, and read for who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from outcore.modules.cache_rollback import KEEPER

if TYPE_CHECKING:
    from .kept_tokens import KeptTokens

KEPT = ("keys", "values")
"""The attributes of a cache that are kept elsewhere."""


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
    def _keeper(self) -> KeptTokens:
        keeper: KeptTokens = self.__dict__[KEEPER]
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
