"""Bounds the prompt caches that mlx-lm's server stores for later requests: they get the planned cache memory that
running texts do not use, and the oldest are dropped when a text needs room."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache

from outcore.engine.session import Session


class CacheRoom:
    """Planned cache memory: running texts take theirs, and stored caches get the rest."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._models: list[weakref.ref[nn.Module]] = []
        self._stores: weakref.WeakSet[BoundedPromptCache] = weakref.WeakSet()
        self._texts: list[_TextsUnderWay] = []

    def join(self, model: nn.Module) -> None:
        with self.lock:
            self._models = [ref for ref in self._models if ref() is not None]
            self._models.append(weakref.ref(model))

    def store(self, store: BoundedPromptCache) -> None:
        with self.lock:
            self._stores.add(store)

    @contextmanager
    def texts(self, session: Session, sequences: int, tokens: int) -> Iterator[None]:
        """Reserves room for running texts: at most ``sequences`` at once, of ``tokens`` tokens each."""
        texts = _TextsUnderWay(session, sequences, tokens)
        with self.lock:
            self._texts.append(texts)
        try:
            self.keep_to()
            yield
        finally:
            with self.lock:
                self._texts.remove(texts)

    def keep_to(self) -> None:
        """Drops stored caches that have no room any more."""
        with self.lock:
            sessions = [model.outcore for ref in self._models if (model := ref()) is not None]
            sessions = [s for s in sessions if not s.closed]
            if not sessions:
                return
            unused = sum(map(self._unused, sessions))
            for store in list(self._stores):
                excess = sum(x.nbytes for x in self._stores) - unused
                if excess > 0:
                    store.trim_to(n_bytes=store.nbytes - excess)

    def _unused(self, session: Session) -> int:
        """Returns the bytes that are planned for a model's caches and that no running text has reserved."""
        taken = sum(texts.nbytes for texts in self._texts if texts.session is session)
        return max(0, session.plan.cache_bytes - taken)


@dataclass(frozen=True, eq=False)
class _TextsUnderWay:
    session: Session
    sequences: int
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of these texts' caches at full length, including the copy that MLX makes when a cache grows."""
        size = replace(self.session.size, sequences=self.sequences, shared=0, joining=0)
        return size.at_context(self.tokens).caches(1.0)


cache_room = CacheRoom()


class BoundedPromptCache(LRUPromptCache):
    """mlx-lm's store of prompt caches, bounded to the room that running texts leave."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cache_room.store(self)

    def fetch_nearest_cache(self, *args: Any, **kwargs: Any) -> Any:
        with cache_room.lock:
            return super().fetch_nearest_cache(*args, **kwargs)

    def insert_cache(self, *args: Any, **kwargs: Any) -> None:
        with cache_room.lock:
            super().insert_cache(*args, **kwargs)
            cache_room.keep_to()

    def trim_to(self, **kwargs: Any) -> None:
        with cache_room.lock:
            super().trim_to(**kwargs)
