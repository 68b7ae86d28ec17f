"""A sequence that is being generated: its tokens, its text, and where that ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .prompt import cached_tokens
from .request import Request, Token


@dataclass(frozen=True)
class RequestOutput:
    """How a sequence ended.

    Attributes:
        tokens: generated, the one that ended it included.
        text: without that one, and without a stop string.
        finish_reason: ``stop`` or ``length``.
        logprobs: of each token, where they were asked for.
        cache: the sequence's caches, where they were asked for; they hold all tokens but the last.
    """

    request: Request
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] = ()
    cache: list[Any] | None = None


def tokens_of(request: Request) -> tuple[int, int]:
    """Of the prompt, and of the answer at most."""
    return cached_tokens(request.cache or ()) + len(request.tokens), request.max_tokens


@dataclass
class Writing:
    """A sequence that is being generated."""

    request: Request
    tokenizer: TokenizerWrapper
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""

    def __post_init__(self) -> None:
        self._text = self.tokenizer.detokenizer
        self._seen = 0  # characters in which no stop string begins
        self._end: int | None = None

    def add(self, token: Token) -> bool:
        """Take the next token; whether it was the last."""
        self.tokens.append(token.token)
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
        if token.token in self.tokenizer.eos_token_ids:
            self.reason = "stop"
        else:
            self._text.add_token(token.token)
            if self._stopped():
                self.reason = "stop"
            elif len(self.tokens) >= self.request.max_tokens:
                self.reason = "length"
        return bool(self.reason)

    def _stopped(self) -> bool:
        """Whether a stop string is there; the first one ends the text."""
        if not self.request.stop:
            return False
        text = self._text.text
        places = [at for stop in self.request.stop if (at := text.find(stop, self._seen)) >= 0]
        self._seen = max(0, len(text) - max(map(len, self.request.stop)))
        self._end = min(places, default=None)
        return bool(places)

    def output(self, cache: list[Any] | None) -> RequestOutput:
        self._text.finalize()
        if self._end is None and self._stopped():
            self.reason = "stop"
        text: str = self._text.text[: self._end]
        return RequestOutput(self.request, text, tuple(self.tokens), self.reason, tuple(self.logprobs), cache)
