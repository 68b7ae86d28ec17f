"""What a draft is expected to give: tokens of a sweep, and tokens a second, by simulated sweeps.

A guess that is right with the same chance wherever it stands makes (1 - p ** (n + 1)) / (1 - p) tokens of a sweep over
n guesses, the token included that the model says itself (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .draft_cost import NGRAM, Draft, guess_s
from .joint_plan import Planned
from .machine_profile import Calibration
from .model_size import ModelSize
from .plan import Plan
from .prediction import sweep_s

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of guesses that are looked at."""

CHANCES = {2: 0.75, 3: 0.88, 4: 0.94}
"""By bits of a copy, how likely its guess is what the model says, before any was seen: tokens of code and prose that
both choose, with a model of 28M parameters at 4 and 8 bits (dev/LOG.md). More bits: as 4."""

OTHER = 0.6
"""The same of another model."""

REPEATED, TRIED = 1.3, 2
"""Tokens that a sweep gives where the text's own repetitions draft, and guesses that are tried for it."""

MARGIN = 0.97
"""A draft is taken that takes less than this share of the time of what is simpler."""


@dataclass(frozen=True)
class SeenDrafts:
    """What drafting has shown of a way to draft for a model: ``tokens`` a sweep, how likely a guess is right, seconds
    of a guess; None where it has not shown that."""

    tokens: float | None = None
    chance: float | None = None
    guess_s: float | None = None


@dataclass(frozen=True)
class Choice:
    """A plan with a way to draft, and what it is expected to give.

    Attributes:
        name: of the draft, for people.
        planned: None where it has no room, or cannot be; ``reason`` says why.
        tokens: of a sweep; ``drafted``: guesses of it. ``token_s``: seconds for each token of a text.
        first: bytes that are to be written before its first answer, once.
    """

    name: str
    planned: Planned | None = None
    reason: str = ""
    drafted: int = 0
    tokens: float = 1.0
    token_s: float = float("inf")
    first: int = 0


def expected(
    planned: Planned, calibration: Calibration, name: str, blocks: bool, seen: SeenDrafts | None = None, first: int = 0
) -> Choice:
    """What a plan gives with what drafts for it.

    Args:
        blocks: guesses are computed in one pass; else in one each.
        seen: what is known of it; what is not is assumed.
    """
    size, plan, draft = planned.size, planned.plan, planned.draft
    seen = seen or SeenDrafts()
    guess = 0.0
    if draft is not None and draft.kind != NGRAM:
        guess = seen.guess_s if seen.guess_s is not None else guess_s(size, draft, calibration)
    return expected_of(planned, name, seen, guess, lambda n: sweep_s(size, plan, calibration, n + 1, blocks), first)


def expected_of(
    planned: Planned, name: str, seen: SeenDrafts, guess: float, swept: Callable[[int], float], first: int = 0
) -> Choice:
    """The same where it is known what sweeps and guesses take.

    Args:
        guess: seconds of one. ``swept``: seconds of a sweep over so many of them and one token.
    """
    size, draft = planned.size, planned.draft
    if draft is None:
        return Choice(name, planned, token_s=swept(0), first=first)
    if draft.kind == NGRAM:
        tokens = seen.tokens or REPEATED
        # Where there is nothing to repeat nothing is tried.
        share = min(1.0, tokens - 1)
        tried = min(TRIED, size.drafted)
        seconds = swept(0) + share * (swept(tried) - swept(0))
        return min(
            (Choice(name, planned, "", tried, tokens, seconds / tokens), Choice(name, planned, token_s=swept(0))),
            key=lambda c: c.token_s,
        )
    chance = chance_of(draft, seen)
    best = Choice(name, planned, token_s=swept(0), first=first)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted):
        tokens = (1 - chance ** (n + 1)) / (1 - chance)
        token_s = (swept(n) + n * guess) / tokens
        if token_s < best.token_s:
            best = Choice(name, planned, "", n, tokens, token_s, first)
    return best


def pays_for_several(
    size: ModelSize, plan: Plan, calibration: Calibration, texts: int, seen: SeenDrafts, blocks: bool
) -> bool:
    """Whether texts that share sweeps are written faster with drafts, each in passes of its own, than with one token
    each from a pass over all of them: by simulated sweeps. Without a ``chance`` their own repetitions draft."""
    together = sweep_s(size, plan, calibration, texts, True)  # a row of one pass for each
    alone = sweep_s(size, plan, calibration, 1, blocks, texts)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted // texts):
        seconds = sweep_s(size, plan, calibration, n + 1, blocks, texts) + n * texts * (seen.guess_s or 0.0)
        tokens = seen.tokens or REPEATED
        if seen.chance is not None:
            tokens = (1 - seen.chance ** (n + 1)) / (1 - seen.chance)
        elif n > TRIED:
            break
        else:  # where there is nothing to repeat nothing is tried
            seconds = alone + min(1.0, tokens - 1) * (seconds - alone)
        if seconds < MARGIN * tokens * together:
            return True
    return False


def chance_of(draft: Draft, seen: SeenDrafts) -> float:
    """How likely a guess is right."""
    assumed = CHANCES.get(min(draft.bits, 4), OTHER) if draft.bits is not None else OTHER
    return min(max(assumed if seen.chance is None else seen.chance, 0.0), 0.999)


def fastest(choices: Sequence[Choice]) -> Choice:
    """The fastest; of those that are about as fast, the first. One at least must have a plan."""
    possible = [c for c in choices if c.planned is not None]
    best = possible[0]
    for choice in possible[1:]:
        if choice.token_s < best.token_s * MARGIN:
            best = choice
    return best
