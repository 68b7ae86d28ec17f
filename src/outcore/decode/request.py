"""Requests of sequences, and the tokens that answer them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..modules.hooks import caches_in
from .passes import KvBits
from .sampling import Draw, Processor


class Recorder(Protocol):
    """Stores a prompt's computed caches (``prefix_cache``)."""

    def passed(self, tokens: int, cache: Sequence[Any]) -> None:
        """A chunk's graph was built; after it the caches hold so many tokens of the prompt."""

    def save(self, cache: Sequence[Any], logits: mx.array | None, tokens: int | None = None) -> None:
        """The prompt was computed, or its first ``tokens``, and ``cache`` holds exactly those."""


@dataclass(frozen=True)
class CachedPrefix:
    """The first ``tokens`` of a prompt, which a request's cache holds already.

    Attributes:
        logits: (1, vocabulary) of the last position, where the cache holds all of it.
        recording: stores the rest as it is computed; None: it is not stored.
    """

    tokens: int = 0
    logits: mx.array | None = None
    recording: Recorder | None = None

    def passed(self, cache: Sequence[Any], tokens: int) -> None:
        if self.recording is not None:
            self.recording.passed(self.tokens + tokens, cache)


@dataclass(frozen=True)
class Alone:
    """Options that only a text running alone can have.

    Attributes:
        keeps: the caller goes on with its caches: after any failure they are what they were before it.
        whole: at the end the caches hold the answer's last token too; else all but that.
        kv: how keys and values are quantized; None: they are not.
        bound: the most tokens that its caches hold; None: all.
        embeddings: (tokens, hidden), instead of the prompt's.
        progress: called with the computed and all tokens of the prompt.
        history: the tokens in the caches before the prompt, as far as known: drafts may repeat them.
        draft_model: drafts instead of the loaded drafter.
        forget: restores the caller's caches where the text leaves nothing in them.
    """

    keeps: bool = False
    whole: bool = False
    kv: KvBits | None = None
    bound: int | None = None
    embeddings: mx.array | None = None
    progress: Callable[[int, int], object] = lambda *_: None
    history: Sequence[int] = ()
    draft_model: nn.Module | None = None
    forget: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Request:
    """A sequence to be written.

    Attributes:
        uid: unique among the sequences that run at the same time.
        tokens: ids of the prompt, at least one.
        max_tokens: of the answer, at least one.
        sampler: log-probabilities of shape (1, vocabulary) to a token of shape (1,); None: the likeliest.
        processors: mlx-lm's logits processors.
        stop: strings that end the answer and are not part of it.
        cache: caches of the text before the prompt; copied, not changed. None: there is none.
        given: the caches are taken out of the list instead of copied.
        earlier: the tokens of that text, where a processor looks at them.
        cached: the part of ``tokens`` that ``cache`` holds.
        begun: ``tokens`` are the end of an answer that goes on, not a prompt.
        shared: number of first ``tokens`` that other prompts begin with too.
        logprobs: how many of the likeliest tokens come with each token and its log-probability; None: no
            log-probabilities.
        scores: tokens come with the log-probabilities that they were drawn from, of shape (vocabulary,).
        alone: options of a text that runs alone and writes into its own ``cache``; None: it may share passes.
    """

    uid: int
    tokens: Sequence[int]
    max_tokens: int
    sampler: Draw | None = None
    processors: Sequence[Processor] = ()
    stop: tuple[str, ...] = ()
    cache: Sequence[Any] | None = None
    given: bool = False
    earlier: Sequence[int] = ()
    cached: CachedPrefix = field(default_factory=CachedPrefix)
    begun: bool = False
    shared: int = 0
    logprobs: int | None = None
    scores: bool = False
    alone: Alone | None = None


@dataclass(frozen=True)
class Token:
    """The next token of a sequence. As the request asks: its log-probability, the likeliest tokens in its place (best
    first), and the log-probabilities of all. ``drafted``: it is an accepted draft token."""

    uid: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    scores: mx.array | None = None
    drafted: bool = False


def grow_by(caches: Any, step: int) -> None:
    for cache in caches_in(caches):
        if hasattr(cache, "step"):
            cache.step = step


def own_cache(model: nn.Module, request: Request) -> list[Any]:
    """Caches that may be written to for a request."""
    if request.cache is None:
        return make_prompt_cache(model)
    if request.alone is not None:
        return cast(list[Any], request.cache)
    if not request.given:
        return copy.deepcopy(list(request.cache))
    cache = list(request.cache)
    # A second reference to a cache's arrays makes MLX copy them for every token.
    cast(list[Any], request.cache).clear()
    return cache
