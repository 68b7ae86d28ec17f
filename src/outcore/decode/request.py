"""Requests, and the tokens of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..modules.hooks import caches_in
from .media import Media
from .passes import KvBits
from .prompt import cached_tokens
from .sampling import Draw, Processor


class Recorder(Protocol):
    """Stores a prompt's computed caches (``prefix_cache``)."""

    def passed(self, tokens: int, cache: Sequence[Any]) -> None:
        """Called when a chunk's graph was built; with it, the caches hold the prompt's first ``tokens`` tokens."""

    def save(self, cache: Sequence[Any], logits: mx.array | None, tokens: int | None = None) -> None:
        """Called when the prompt, or its first ``tokens`` tokens, was computed; ``cache`` holds these and no others."""


@dataclass(frozen=True)
class CachedPrefix:
    """The first ``tokens`` of a prompt, which a request's cache holds already.

    Attributes:
        logits: (1, vocabulary) after the prompt's last token; None: the cache does not hold the whole prompt.
        recording: stores the rest of the prompt while it is computed; None: it is not stored.
    """

    tokens: int = 0
    logits: mx.array | None = None
    recording: Recorder | None = None

    def passed(self, cache: Sequence[Any], tokens: int) -> None:
        if self.recording is not None:
            self.recording.passed(self.tokens + tokens, cache)


@dataclass(frozen=True)
class Alone:
    """Options of a text that runs alone, without other sequences.

    Attributes:
        keeps: the caller goes on with its caches, so a step that fails restores them.
        whole: at the end, the caches hold the answer's last token too; otherwise all but that one.
        kv: how keys and values are quantized; None: they are not.
        bound: the most tokens that the caches hold at a time; None: all tokens.
        embeddings: (tokens, hidden), used instead of the prompt's.
        progress: called with the number of computed prompt tokens and of all prompt tokens.
        history: the tokens in the caches before the prompt, as far as known: drafts may repeat them.
        draft_model: drafts instead of the loaded drafter.
        forget: called if the text leaves no token in the caller's caches; restores them.
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
    """A prompt, and how it is to be answered.

    Attributes:
        uid: unique among the sequences that run at the same time.
        tokens: ids of the prompt, at least one.
        max_tokens: the most tokens of the answer, at least one.
        sampler: turns log-probabilities (1, vocabulary) into a token (1,); None: takes the likeliest.
        processors: mlx-lm's logits processors.
        stop: strings that end the answer and are not part of it.
        cache: caches of the text before the prompt, which are taken out of this list; None: there are none.
        earlier: the tokens of the text before the prompt, for processors, which look at all tokens.
        cached: the part of ``tokens`` that ``cache`` holds.
        begun: ``tokens`` are not a prompt, but the end of an answer that goes on.
        shared: number of first ``tokens`` that other prompts begin with too.
        logprobs: return each token's log-probability, and those of this many of the likeliest tokens; None: return no
            log-probabilities.
        scores: return with each token all log-probabilities that it was drawn from, of shape (vocabulary,).
        alone: options of a text that runs alone and writes into its own ``cache``; None: it may share passes.
        media: images of the text, its part before the prompt included; None: it has none.
    """

    uid: int
    tokens: Sequence[int]
    max_tokens: int
    sampler: Draw | None = None
    processors: Sequence[Processor] = ()
    stop: tuple[str, ...] = ()
    cache: Sequence[Any] | None = None
    earlier: Sequence[int] = ()
    cached: CachedPrefix = field(default_factory=CachedPrefix)
    begun: bool = False
    shared: int = 0
    logprobs: int | None = None
    scores: bool = False
    alone: Alone | None = None
    media: Media | None = None

    def open_media(self, model: nn.Module, hold: Callable[[int], None] | None = None) -> None:
        """Prepares what the passes over the prompt need of its images; ``hold``: as in ``Media.open``."""
        if self.media is not None:
            held = max(len(self.earlier) + self.cached.tokens, cached_tokens(self.cache or ()))
            self.media.open(model, held, self.tokens, hold)

    def close_media(self) -> None:
        if self.media is not None:
            self.media.close()


@dataclass(frozen=True)
class Token:
    """The next token of a sequence; ``drafted``: it is an accepted draft token. If the request asks for them:
    ``logprob``, ``top`` (the likeliest tokens with theirs, best first), and ``scores`` (those of all tokens)."""

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
    """Returns the caches that a request is computed in: its own or new ones."""
    if request.cache is None:
        return make_prompt_cache(model)
    if request.alone is not None:
        return cast(list[Any], request.cache)
    cache = list(request.cache)
    # A second reference to a cache's arrays makes MLX copy them for every token.
    cast(list[Any], request.cache).clear()
    return cache
