"""Features of images, kept by what they were made of: in memory, and beside the prefix cache on disk.

In memory they are NumPy's arrays, outside of the budget, which is for what MLX holds; ``MOST`` bytes at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

MOST = 64_000_000


class KeptFeatures:
    """Features by digest. ``prefix``: the model's prefix cache, whose files are dropped with the features'; None: they
    are kept in memory alone."""

    def __init__(self, prefix: Any) -> None:
        self._prefix = prefix if hasattr(prefix, "keep_arrays") else None
        self._held: OrderedDict[bytes, dict[str, tuple[Any, mx.Dtype]]] = OrderedDict()

    def has(self, digest: bytes) -> bool:
        return digest in self._held or (self._prefix is not None and self._prefix.has_arrays(digest))

    def find(self, digest: bytes) -> dict[str, mx.array] | None:
        if (held := self._held.get(digest)) is not None:
            self._held.move_to_end(digest)
            return {name: mx.array(a).view(dtype) for name, (a, dtype) in held.items()}
        found: dict[str, mx.array] | None = None if self._prefix is None else self._prefix.arrays(digest)
        if found is not None:
            self._hold(digest, found)
        return found

    def keep(self, digest: bytes, arrays: Mapping[str, mx.array]) -> None:
        self._hold(digest, arrays)
        if self._prefix is not None:
            self._prefix.keep_arrays(digest, arrays)

    def _hold(self, digest: bytes, arrays: Mapping[str, mx.array]) -> None:
        self._held[digest] = {name: (np.array(a.view(mx.uint8)), a.dtype) for name, a in arrays.items()}
        while sum(a.nbytes for held in self._held.values() for a, _ in held.values()) > MOST:
            self._held.popitem(last=False)
