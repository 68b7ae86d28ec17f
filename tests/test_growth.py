"""What caches will hold after any number of tokens, told from what they hold after a few; against real caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import zoo
from outcore.modules.cache_form import (
    FEW,
    Growth,
    cache_bytes,
    known_growth,
    probed_growth,
)
from outcore.modules.hooks import arrays_in
from outcore.modules.layers import find_layers
from outcore.modules.trace import Trace, trace_pass
from outcore.sizes import KV_STEP, held_bytes, held_tokens
from test_equality import KINDS

CONTEXTS = (1, 255, 256, 300)


@functools.cache
def traced_of(model_type: str) -> tuple[nn.Module, Trace]:
    model = zoo.build(model_type)
    traced = trace_pass(model, find_layers(model))
    return model, trace_pass(model, []) if traced.failure else traced


def held_after(model: nn.Module, cache: list[Any], tokens: int, evaluate: bool) -> int:
    """Bytes in real caches, of which shapes are enough, after so many tokens more."""
    out = model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    if evaluate:
        mx.eval(out)
    return sum(a.nbytes for a in arrays_in(cache))


@pytest.mark.parametrize("model_type", sorted(KINDS))
def test_real_caches_hold_what_a_few_tokens_foretell_and_at_most_a_step_less(model_type: str) -> None:
    """In uneven chunks, which leave buffers that end anywhere; each followed by a single token."""
    model, traced = traced_of(model_type)
    step = held_bytes([(each, None) for each, _ in traced.growing], 0)
    # What was looked at twice starts with what it held beside what grows.
    step += sum(c.fixed for c in traced.caches if c.growing is not None)
    assert sum(c.fixed for c in traced.caches) or traced.growing
    cache, fed = make_prompt_cache(model), 0
    for context in CONTEXTS:
        chunk, fed = context - fed, context + 1
        if chunk > 0:
            held = held_after(model, cache, chunk, traced.evaluates)
            assert held <= traced.cache_bytes(context) + chunk * traced.window_bytes, context
        held = held_after(model, cache, 1, traced.evaluates)
        assert held <= traced.cache_bytes(context), context
        assert held >= traced.cache_bytes(context) - step, context


@pytest.mark.parametrize("chunk", [1, 23, 100, 187, 256, 300])
def test_no_chunks_make_a_buffer_larger_than_a_step_beyond_its_tokens(chunk: int) -> None:
    cache, fed = KVCache(), 0
    for _ in range(12):
        cache.update_and_fetch(*[mx.zeros((1, 2, chunk, 8))] * 2)
        fed += chunk
        assert fed <= cache.keys.shape[2] <= held_tokens(fed)


def filled(cache: Any, tokens: Sequence[int]) -> tuple[Any, int]:
    """The cache after chunks of so many tokens, and its bytes before the last."""
    before = 0
    for n in tokens:
        before = cache_bytes(cache)
        cache.update_and_fetch(*[mx.zeros((1, 2, n, 64))] * 2)
    return cache, before


EACH = 2 * 2 * 64 * 4
"""Bytes of a token in those."""


@pytest.mark.parametrize(
    ("cache", "growth"),
    [
        (KVCache(), Growth(growing=(EACH, None))),
        (ConcatenateKVCache(), Growth(growing=(EACH, None))),
        (RotatingKVCache(max_size=100), Growth(growing=(EACH, 100), window=EACH)),
        (RotatingKVCache(max_size=5), Growth(growing=(EACH, 5), window=EACH)),
        (ChunkedKVCache(40), Growth(growing=(EACH, 40 + KV_STEP), window=EACH)),
        # Four bits of each number, and a scale and a bias for 64 of them.
        (QuantizedKVCache(64, 4), Growth(growing=(EACH // 8 + EACH // 64 * 2, None))),
    ],
    ids=lambda c: type(c).__name__,
)
def test_every_kind_of_cache_that_mlx_lm_has_is_known(cache: Any, growth: Growth) -> None:
    assert known_growth(*filled(cache, [FEW, 1])) == growth


def test_recurrent_states_do_not_grow_and_one_that_does_is_not_taken_for_one() -> None:
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.zeros((1, 3, 8)), mx.zeros((1, 4, 4))
    size = cache_bytes(cache)
    assert known_growth(cache, size) == Growth(fixed=size)
    assert known_growth(cache, size - 32) is None
    assert known_growth(ArraysCache(2), 0) == Growth()


class Unheard(KVCache):
    """A class of its own, of which nothing is known: it may keep more than its parent."""


def test_a_cache_of_an_unknown_class_is_looked_at_for_longer() -> None:
    assert known_growth(*filled(Unheard(), [FEW, 1])) is None


@pytest.mark.parametrize(
    "held",
    [
        lambda n: 0,
        lambda n: 7_000,
        lambda n: 40 * n,
        lambda n: 7_000 + 40 * min(n, 300),
        lambda n: 40 * -(-n // KV_STEP) * KV_STEP,
        lambda n: 512 * (n // 4) + 64 * (n % 4),
        lambda n: 40 * 2 ** (n - 1).bit_length(),
    ],
    ids=["nothing", "fixed", "per token", "window", "steps", "groups of four", "doubling"],
)
def test_the_line_through_two_lengths_lies_above_what_is_held_later(held: Any) -> None:
    growth = probed_growth(held(513), held(1025))
    growing = [growth.growing] if growth.growing else []
    for context in (1100, 2047, 2048, 2049, 5000, 65536, 100_001):
        assert growth.fixed + held_bytes(growing, context) >= held(context + 1)
    exact = held(65537)
    assert growth.fixed + held_bytes(growing, 65536) <= exact + sum(each for each, _ in growing) * KV_STEP


class Odd(nn.Module):
    """A model whose cache is its own: a row for every fourth token, within a list of caches."""

    class Cache:
        def __init__(self) -> None:
            self.offset, self.rows = 0, mx.zeros((1, 0, 8))

        def update(self, tokens: int) -> None:
            self.offset += tokens
            self.rows = mx.zeros((1, self.offset // 4, 8))

    def __init__(self, longest: int = 10**9) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = [nn.Linear(8, 8)]
        self.longest = longest

    def make_cache(self) -> list[Any]:
        return [CacheList(KVCache(), Odd.Cache())]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        if ids.shape[1] > self.longest:
            raise ValueError("too long")
        x = self.embed(ids)
        cache[0].caches[0].update_and_fetch(x[:, None], x[:, None])
        cache[0].caches[1].update(ids.shape[1])
        return x


def test_a_models_own_cache_is_followed_inside_a_list_of_caches() -> None:
    traced = trace_pass(Odd(), [])
    assert traced.growing == ((64, None), (8, None))
    assert traced.cache_bytes(4000) >= 64 * 4096 + 1000 * 32
    assert traced.cache_bytes(10**6) <= 72 * (10**6 + KV_STEP)


@pytest.mark.parametrize(
    ("model_type", "scores", "several", "masked"),
    [
        ("qwen3", 1, False, False),
        ("gpt_oss", 3, False, None),  # sinks
        ("deepseek_v3", 2, False, True),  # a mask of numbers for each head
        ("phi3small", 2, False, None),  # half of its layers compute attention themselves
        ("gemma4_text", 1, True, None),  # later layers are handed keys and values
        ("gemma3n", 1, True, None),  # later layers are given earlier ones' caches
        ("afm7", 1, True, False),
    ],
)
def test_a_trace_tells_how_attention_is_computed_and_what_is_handed_on(
    model_type: str, scores: int, several: bool, masked: bool | None
) -> None:
    _, traced = traced_of(model_type)
    assert traced.passing.scores == scores
    assert (traced.passing.versions > 0) == several
    assert (traced.passing.expanded > 0) == (model_type == "deepseek_v3")  # keys and values of latents
    assert masked is None or (traced.passing.masked > 0) == masked
