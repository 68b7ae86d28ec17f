"""Sequences that are scheduled together, and what a step brings each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.session import Session
from .prefix_cache import look_up, unkept
from .request import CachedPrefix, Request, Token
from .sampling import OwnSampler


@dataclass
class ScheduledSequence:
    """A sequence.

    Attributes:
        text: its prompt and answer so far.
        held: how many of them ``cache`` holds, or the batch that it joined with them.
        found: of its prompt, what the prefix cache had when it joined.
        order: a later one joined later.
        before: tokens before ``text`` that the cache it came with holds, of which it is not known what they are.
        began: when it was let in, by ``time.monotonic``.
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
        """Tokens of the answer so far."""
        return len(self.text) - len(self.request.tokens)

    @property
    def new(self) -> int:
        """Tokens that joining computes."""
        return len(self.text) - self.held

    @property
    def length(self) -> int:
        """Tokens of all of its text so far."""
        return self.before + len(self.text)

    @property
    def need(self) -> int:
        """Tokens of it at most."""
        return self.length - self.answered + self.request.max_tokens

    def rewind(self, unseen: int = 0) -> None:
        """Have its own sampler be as after its answer, but for ``unseen`` tokens: what was computed ahead and given to
        nobody has not been drawn."""
        if isinstance(sampler := self.request.sampler, OwnSampler):
            sampler.rewind(self.answered - unseen)

    def begin(self, session: Session, chunk: int, *, whole: bool, finds: bool, records: bool) -> Request:
        """What it begins with, or begins anew.

        Args:
            chunk, whole: as in ``look_up``. finds: prompts are looked up; records: and there is room to keep them.
        """
        if self.cache is not None or self.held or not finds:
            return self.go_on()
        found, known = look_up(session, self.text, chunk, whole=whole, shared=self.request.shared)
        self.cache, self.found = (found.cache, found.tokens) if found is not None else (None, 0)
        return self.go_on(known if records else unkept(session, known, len(self.text)))

    def go_on(self, known: CachedPrefix | None = None) -> Request:
        """What it goes on from, which takes over its cache; ``known``: what that holds of ``text`` beyond ``held``."""
        cache, self.cache = self.cache, None
        return replace(
            self.request,
            tokens=self.text[self.held :],
            max_tokens=self.request.max_tokens - self.answered,
            cache=cache,
            given=True,
            earlier=self.text[: self.held],
            known=known or CachedPrefix(),
            begun=cache is not None and (self.answered > 0 or self.request.begun) and not (known and known.held),
        )


@dataclass
class StepResult:
    """What a step brought.

    Attributes:
        tokens: one of each sequence under way; with drafts, of each that the last sweep brought another.
        joined: sequences that joined with it, for the first time, and seconds since their prompts were begun;
            ``found``: tokens of their prompts that the prefix cache had.
        prompts: of sequences that have not joined, tokens of their prompts that are computed.
        drafts: of each, tokens that were drafted and those that were right.
        full: those that end because there is no memory for a longer context; those that ``failed``, and why.
    """

    tokens: list[Token] = field(default_factory=list)
    joined: dict[int, float] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    drafts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def without(self, gone: Collection[int]) -> StepResult:
        """What it brought the others."""

        def rest(told: Mapping[int, Any]) -> dict[int, Any]:
            return {uid: value for uid, value in told.items() if uid not in gone}

        tokens = [token for token in self.tokens if token.uid not in gone]
        full, failed = [*rest(dict.fromkeys(self.full))], [*rest(dict(self.failed)).items()]
        return StepResult(
            tokens, rest(self.joined), rest(self.found), rest(self.prompts), rest(self.drafts), full, failed
        )
