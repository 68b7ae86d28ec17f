"""What a sequence begins with, and what each of its tokens comes with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..modules.call_values import caches_in
from .passes import KvBits
from .sampling import Draw, Processor


class Recorder(Protocol):
    """Keeps what is computed of a prompt (``prefix.Recording``)."""

    def passed(self, tokens: int, cache: Sequence[Any]) -> None:
        """A chunk's graph was built behind which the caches hold so many tokens of the prompt."""

    def save(self, cache: Sequence[Any], logits: mx.array | None, tokens: int | None = None) -> None:
        """The prompt was computed, or its first ``tokens``, of which ``cache`` holds no others."""


@dataclass(frozen=True)
class CachedPrefix:
    """What is known of a prompt before it is computed.

    Attributes:
        held: its first tokens, which the caches hold.
        logits: (1, vocabulary) of its last position, where they hold all of it.
        recording: what keeps the rest; None: nothing does.
    """

    held: int = 0
    logits: mx.array | None = None
    recording: Recorder | None = None

    def passed(self, cache: Sequence[Any], tokens: int) -> None:
        """A chunk's graph was built that ends behind so many tokens of those that are computed."""
        if self.recording is not None:
            self.recording.passed(self.held + tokens, cache)


@dataclass(frozen=True)
class Alone:
    """What a text can ask for that is written by itself.

    Attributes:
        keeps: somebody goes on with its caches: whatever fails, they are what they were before it.
        whole: they hold the answer's last token too when it has ended; else all but that.
        kv: how keys and values are quantized; None: they are not.
        bound: tokens that its caches hold at most; None: as many as it has.
        embeddings: (tokens, hidden), in place of the prompt's.
        progress: called with the tokens of the prompt that are computed, and all of them.
        history: tokens before the prompt that the caches hold, as far as they are known: drafts may repeat them.
        draft_model: drafts in place of what was loaded for it.
        forget: has the caller's caches be as they were before, where the text leaves nothing in them.
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
    """What a sequence begins with.

    Attributes:
        uid: names it; no other that runs at the same time has the same.
        tokens: ids of the prompt, at least one.
        max_tokens: of the answer, at least one.
        sampler: log-probabilities of shape (1, vocabulary) to a token of shape (1,); None: the likeliest.
        processors: mlx-lm's logits processors.
        stop: strings that end the answer; not part of it.
        cache: what has been computed of the text before the prompt; copied, not changed. None: nothing.
        given: the cache is taken over instead, out of the list.
        earlier: the tokens of that text, where a processor looks at them.
        known: what ``cache`` holds of ``tokens`` themselves.
        begun: ``tokens`` are the last of an answer that goes on, and not a prompt.
        shared: the first of ``tokens``, with which others' texts begin too.
        logprobs: tokens come with their log-probability, and with so many of the likeliest; None: without.
        scores: tokens come with the log-probabilities that they were drawn by, of shape (vocabulary,).
        alone: it is written by itself, and into its own ``cache``; None: others may share its passes.
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
    known: CachedPrefix = field(default_factory=CachedPrefix)
    begun: bool = False
    shared: int = 0
    logprobs: int | None = None
    scores: bool = False
    alone: Alone | None = None


@dataclass(frozen=True)
class Token:
    """One more token of a sequence; its log-probability, the likeliest tokens in its place, best first, and the
    log-probabilities of all, where that was asked for; whether it was drafted."""

    uid: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    scores: mx.array | None = None
    drafted: bool = False


def grow_by(caches: Any, step: int) -> None:
    """Have caches grow by so many tokens at a time."""
    for cache in caches_in(caches):
        if hasattr(cache, "step"):
            cache.step = step


def own_cache(model: nn.Module, request: Request) -> list[Any]:
    """Caches that a sequence's tokens may be written to."""
    if request.cache is None:
        return make_prompt_cache(model)
    if request.alone is not None:
        return cast(list[Any], request.cache)
    if not request.given:
        return copy.deepcopy(list(request.cache))
    cache = list(request.cache)
    # Whoever refers to a cache's arrays has MLX copy them for every token.
    cast(list[Any], request.cache).clear()
    return cache
