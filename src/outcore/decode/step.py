"""Sequences of the scheduler, and the result of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.session import Session
from .prefix_cache import look_up
from .request import CachedPrefix, Request, Token
from .sampling import OwnSampler


@dataclass
class ScheduledSequence:
    """A sequence of the scheduler.

    Attributes:
        text: its prompt and answer so far.
        held: how many tokens of it ``cache``, or the decoder's caches, hold.
        found: tokens of its prompt that the prefix cache had.
        order: grows with each sequence that is added.
        before: tokens in the cache that it came with whose ids are not known; they come before ``text``.
        began: when it joined, by ``time.monotonic``.
    """

    request: Request
    text: list[int]
    order: int
    held: int = 0
    cache: list[Any] | None = None
    found: int = 0
    began: float = 0.0
    before: int = 0

    @property
    def answered(self) -> int:
        return len(self.text) - len(self.request.tokens)

    @property
    def new(self) -> int:
        """Tokens to be computed when it joins."""
        return len(self.text) - self.held

    @property
    def length(self) -> int:
        """Tokens of all of its text so far."""
        return self.before + len(self.text)

    @property
    def need(self) -> int:
        """The most tokens that it may come to."""
        return self.length - self.answered + self.request.max_tokens

    def rewind(self, unseen: int = 0) -> None:
        """Takes its own sampler back to its answer, less the last ``unseen`` tokens, which the caller did not get."""
        if isinstance(sampler := self.request.sampler, OwnSampler):
            sampler.rewind(self.answered - unseen)

    def begin(self, session: Session, chunk: int, *, whole: bool, finds: bool, records: bool) -> Request:
        """The request with which it begins, or begins anew. ``finds``: look its prompt up in the prefix cache;
        ``records``: there is room to store it."""
        if self.cache is not None or self.held or not finds:
            return self.go_on()
        found, cached = look_up(session, self.text, chunk, whole=whole, shared=self.request.shared, records=records)
        self.cache, self.found = (found.cache, found.tokens) if found is not None else (None, 0)
        return self.go_on(cached)

    def go_on(self, cached: CachedPrefix | None = None) -> Request:
        """The request that continues the sequence after its first ``held`` tokens. It takes over the cache; ``cached``
        says which of its tokens are in there already."""
        cache, self.cache = self.cache, None
        cached = cached or CachedPrefix()
        return replace(
            self.request,
            tokens=self.text[self.held :],
            max_tokens=self.request.max_tokens - self.answered,
            cache=cache,
            given=True,
            earlier=self.text[: self.held],
            cached=cached,
            begun=cache is not None and (self.answered > 0 or self.request.begun) and not cached.tokens,
        )


@dataclass
class StepResult:
    """Result of a scheduler's step.

    Attributes:
        tokens: one of each running sequence; with drafts, of each that has another verified one.
        joined: sequences that joined for the first time, and the seconds since their prompts were begun.
        found: tokens of their prompts that the prefix cache had.
        prompts: computed prompt tokens of sequences that have not joined.
        drafts: drafted and accepted tokens per sequence.
        full: sequences that end because there is no memory for a longer context.
        failed: sequences that end with an error.
    """

    tokens: list[Token] = field(default_factory=list)
    joined: dict[int, float] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    drafts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def without(self, gone: Collection[int]) -> StepResult:
        def rest(of: Mapping[int, Any]) -> dict[int, Any]:
            return {uid: value for uid, value in of.items() if uid not in gone}

        tokens = [token for token in self.tokens if token.uid not in gone]
        full, failed = [*rest(dict.fromkeys(self.full))], [*rest(dict(self.failed)).items()]
        return StepResult(
            tokens, rest(self.joined), rest(self.found), rest(self.prompts), rest(self.drafts), full, failed
        )
