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
        text: token ids of the prompt and the answer so far.
        held: how many tokens of ``text`` are in ``cache`` or in the decoder's caches.
        found: prompt tokens that the prefix cache had.
        order: number of the sequence; later ones have higher numbers.
        before: tokens in the request's cache whose ids are not known; they come before ``text``.
        began: when the sequence joined, by ``time.monotonic``.
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
        """Tokens to compute when the sequence joins."""
        return len(self.text) - self.held

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.before + len(self.text)

    @property
    def need(self) -> int:
        """The most tokens that the sequence can have at its end."""
        return self.length - self.answered + self.request.max_tokens

    def rewind(self, unseen: int = 0) -> None:
        """Rewinds an ``OwnSampler`` to the end of the answer without its last ``unseen`` tokens."""
        if isinstance(sampler := self.request.sampler, OwnSampler):
            sampler.rewind(self.answered - unseen)

    def begin(self, session: Session, chunk: int, *, whole: bool, finds: bool, records: bool) -> Request:
        """Returns the request with which the sequence begins, or begins again. ``finds``: look the prompt up in the
        prefix cache; ``records``: there is room to store the prompt."""
        if self.cache is not None or self.held or not finds:
            return self.go_on()
        found, cached = look_up(session, self.text, chunk, whole=whole, shared=self.request.shared, records=records)
        self.cache, self.found = (found.cache, found.tokens) if found is not None else (None, 0)
        return self.go_on(cached)

    def go_on(self, cached: CachedPrefix | None = None) -> Request:
        """Returns the request, with the cache, that continues the sequence after its first ``held`` tokens. ``cached``:
        the part of the request's tokens that the cache holds already."""
        cache, self.cache = self.cache, None
        cached = cached or CachedPrefix()
        return replace(
            self.request,
            tokens=self.text[self.held :],
            max_tokens=self.request.max_tokens - self.answered,
            cache=cache,
            earlier=self.text[: self.held],
            cached=cached,
            begun=cache is not None and (self.answered > 0 or self.request.begun) and not cached.tokens,
        )


@dataclass
class StepResult:
    """Result of a scheduler's step.

    Attributes:
        tokens: the next token of each running sequence, or of each that has a verified one left of the last pass.
        joined: sequences that joined for the first time, and the seconds since their prompts were begun.
        found: tokens of these prompts that the prefix cache had.
        prompts: computed prompt tokens of sequences that have not joined.
        drafts: drafted and accepted tokens per sequence.
        full: sequences that end because there is no memory for a longer context.
        failed: sequences that end with an error. Clear it when they are told: the errors' frames have this result.
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
