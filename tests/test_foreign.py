"""Caches of others' layers: they hold nothing, and all that is asked of them but their contents is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from outcore.modules.cache_rollback import Snapshot
from outcore.modules.hooks import arrays_in, caches_in
from outcore_cluster.foreign import advance
from outcore_cluster.watched_pass import Advance

WIDTH = 64
KINDS: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "window": lambda: RotatingKVCache(8),
    "window with a beginning": lambda: RotatingKVCache(8, keep=2),
    "chunks": lambda: ChunkedKVCache(8),
    "states": lambda: ArraysCache(2),
    "several": lambda: CacheList(KVCache(), ArraysCache(2), RotatingKVCache(8)),
}


def real(cache: Any, batch: int, tokens: int) -> None:
    """What a layer does that is computed here."""
    for c in caches_in(cache):
        if isinstance(c, ArraysCache):
            c[0], c[1] = mx.ones((batch, 3, WIDTH)), mx.ones((batch, 2, WIDTH, WIDTH))
            c.advance(tokens)
        else:
            c.update_and_fetch(mx.ones((batch, 2, tokens, WIDTH)), mx.ones((batch, 2, tokens, WIDTH)))


def foreign(cache: Any, batch: int, tokens: int) -> None:
    """What is done for a layer that is not."""
    caches = caches_in(cache)
    advances = [
        Advance(n, entries=(0, 1), counted=True) if isinstance(c, ArraysCache) else Advance(n, tokens=True)
        for n, c in enumerate(caches)
    ]
    advance(caches, advances, batch, tokens)


def seen(cache: Any) -> list[Any]:
    """What a model asks its caches for, for a token and for four."""
    found: list[Any] = []
    for c in caches_in(cache):
        mx.eval(arrays_in(c))
        offset = getattr(c, "offset", None)
        found += [offset.tolist() if isinstance(offset, mx.array) else offset, c.size(), c.empty()]
        found += [_mask(c, tokens) for tokens in (1, 4)]
    return found


def _mask(cache: Any, tokens: int) -> Any:
    x = mx.zeros((1, tokens, WIDTH))
    mask = create_ssm_mask(x, cache) if isinstance(cache, ArraysCache) else create_attention_mask(x, cache)
    return mask.tolist() if isinstance(mask, mx.array) else mask


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_and_masks_are_those_of_a_layer_that_is_computed(kind: str) -> None:
    ours, theirs = KINDS[kind](), KINDS[kind]()
    for tokens in (3, 1, 6, 1, 1, 12, 1):
        foreign(ours, 1, tokens)
        real(theirs, 1, tokens)
        assert seen(ours) == seen(theirs)
        assert not any(c.nbytes for c in caches_in(ours))
    for c in (ours, theirs):
        c.trim(2) if c.is_trimmable() else None
    assert seen(ours) == seen(theirs)
    kept, kept_theirs = Snapshot([ours]), Snapshot([theirs])
    foreign(ours, 1, 1)
    real(theirs, 1, 1)
    kept.restore()
    kept_theirs.restore()
    assert seen(ours) == seen(theirs)


@pytest.mark.parametrize("kind", ["plain", "window", "states", "several"])
def test_sequences_join_and_leave(kind: str) -> None:
    def batch(step: Callable[[Any, int, int], None]) -> list[list[Any]]:
        alone = [KINDS[kind]() for _ in range(3)]
        for cache, tokens in zip(alone, (5, 3, 11), strict=True):
            step(cache, 1, tokens)
        merged = alone[0].merge(alone[:2])
        step(merged, 2, 1)
        found = [seen(merged)]
        merged.extend(alone[2].merge(alone[2:]))
        step(merged, 3, 1)
        found.append(seen(merged))
        merged.filter([1, 2])
        step(merged, 2, 1)
        found += [seen(merged), seen(merged.extract(1))]
        if step is foreign:
            assert not any(c.nbytes for c in caches_in(merged))
        return found

    assert batch(foreign) == batch(real)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized(bits: int) -> None:
    ours, theirs = [KVCache()], [KVCache()]
    for caches, step in ((ours, foreign), (theirs, real)):
        step(caches, 1, 5)
        maybe_quantize_kv_cache(caches, 0, 64, bits)
        step(caches, 1, 300)
        step(caches, 1, 1)
        caches[0].trim(1)
    assert type(ours[0]) is type(theirs[0]) and seen(ours[0]) == seen(theirs[0])
    assert ours[0].nbytes == 0


def test_a_call_without_caches() -> None:
    advance([], [Advance(0, tokens=True)], 1, 4)


def test_states_of_sequences_that_are_padded() -> None:
    ours, theirs = ArraysCache(2, left_padding=[0, 6]), ArraysCache(2, left_padding=[0, 6])
    for cache, step in ((ours, foreign), (theirs, real)):
        cache.prepare(lengths=[5, 9])
        step(cache, 2, 4)
    assert seen(ours) == seen(theirs)
    assert seen(ours)[-1] == [[True, False, False, False], [False, False, True, True]]
