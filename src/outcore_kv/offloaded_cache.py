"""mlx-lm cache classes whose keys and values lie on disk and are read when somebody looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from outcore.modules.cache_rollback import KEEPER

if TYPE_CHECKING:
    from .cache_store import CacheStore

KEPT = ("keys", "values")


class Offloaded:
    """Mixed in before a cache's own class while its keys and values are on disk. Trimming only changes its offset.

    Reading keys or values loads them for the caller. Assigning to them, or adding tokens outside of a streamed layer,
    brings them back to memory for good.
    """

    offset: int
    outcore_away = True
    """Read by ``cache_rollback``."""

    def __getattr__(self, name: str) -> Any:
        if name not in KEPT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEPT:
            self._keeper.bring_back(self)
        object.__setattr__(self, name, value)

    def __deepcopy__(self, _: Any) -> Any:
        return self._whole()

    def __reduce_ex__(self, _: Any) -> Any:
        """Copies and pickles as a cache in memory."""
        whole = self._whole()
        return _made, (type(whole), whole.__dict__)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self._keeper.bring_back(self)
        cache: Any = self  # of its own class now
        return cache.update_and_fetch(keys, values)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """As mlx-lm's, but when the cache is needed next."""
        return self._keeper.quantized(self, group_size, bits)

    def empty(self) -> bool:
        return not self.offset

    @property
    def nbytes(self) -> int:
        return self._keeper.nbytes

    @property
    def _keeper(self) -> CacheStore:
        keeper: CacheStore = self.__dict__[KEEPER]
        return keeper

    def _whole(self) -> Any:
        made = _made(type(self), self.__dict__)
        self._keeper.bring_back(made)
        return made


def _made(kind: Any, attributes: dict[str, Any]) -> Any:
    made: Any = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


_OFFLOADED: dict[type, type] = {
    # Named as what they are for whoever writes a cache's class down.
    KVCache: type("KVCache", (Offloaded, KVCache), {"__module__": __name__}),
    QuantizedKVCache: type(
        "QuantizedKVCache", (Offloaded, QuantizedKVCache), {"__module__": __name__, "to_quantized": property()}
    ),
}
_PLAIN = {away: plain for plain, away in _OFFLOADED.items()}

PLAIN = tuple(_OFFLOADED)


def as_offloaded(cache: Any) -> None:
    """Turns a cache of a class in ``PLAIN`` into an offloaded one."""
    for name in KEPT:
        cache.__dict__.pop(name, None)
    cache.__class__ = _OFFLOADED.get(type(cache), type(cache))


def as_plain(cache: Any) -> None:
    """Turns a cache back into mlx-lm's class, without arrays."""
    cache.__class__ = _PLAIN.get(type(cache), type(cache))
