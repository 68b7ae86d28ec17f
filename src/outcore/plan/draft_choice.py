"""What a draft is expected to give: tokens of a sweep, and tokens a second, by simulated sweeps.

A guess that is right with the same chance wherever it stands makes (1 - p ** (n + 1)) / (1 - p) tokens of a sweep over
n guesses, the token included that the model says itself (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .draft_cost import NGRAM, guess_s
from .joint_plan import Planned
from .machine_profile import Calibration
from .model_size import ModelSize
from .plan import Plan
from .prediction import sweep_s

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of guesses that are looked at."""

REPEATED, TRIED = 1.3, 2
"""Tokens that a sweep gives where the text's own repetitions draft, and guesses that are tried for it."""

MARGIN = 0.97
"""A draft is taken that takes less than this share of the time of what is simpler."""


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


def expected(planned: Planned, calibration: Calibration, name: str, blocks: bool, first: int = 0) -> Choice:
    """What a plan gives with what drafts for it.

    Args:
        blocks: guesses are computed in one pass; else in one each.
    """
    size, plan, draft = planned.size, planned.plan, planned.draft

    def swept(guesses: int) -> float:
        return sweep_s(size, plan, calibration, guesses + 1, blocks)

    best = Choice(name, planned, token_s=swept(0), first=first)
    if draft is None:
        return best
    if draft.kind == NGRAM:
        tried = min(TRIED, size.drafted)
        token_s = _repeating(swept(0), swept(tried), REPEATED) / REPEATED
        return min((Choice(name, planned, "", tried, REPEATED, token_s), best), key=lambda c: c.token_s)
    guess = guess_s(size, draft, calibration)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted):
        tokens = _tokens(draft.chance, n)
        token_s = (swept(n) + n * guess) / tokens
        if token_s < best.token_s:
            best = Choice(name, planned, "", n, tokens, token_s, first)
    return best


def pays_for_several(
    size: ModelSize,
    plan: Plan,
    calibration: Calibration,
    texts: int,
    blocks: bool,
    *,
    tokens: float | None = None,
    chance: float | None = None,
    guess_s: float = 0.0,
) -> bool:
    """Whether texts that share sweeps are written faster with drafts, each in passes of its own, than with one token
    each from a pass over all of them: by simulated sweeps.

    Args:
        tokens: that a sweep was seen to give of a text whose own repetitions draft; None: none was seen.
        chance: how likely a guess is right of what drafts instead, which takes ``guess_s`` seconds for each.
    """
    together = sweep_s(size, plan, calibration, texts, True)  # a row of one pass for each
    alone = sweep_s(size, plan, calibration, 1, blocks, texts)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted // texts):
        seconds = sweep_s(size, plan, calibration, n + 1, blocks, texts) + n * texts * guess_s
        if chance is not None:
            given = _tokens(chance, n)
        elif n > TRIED:
            break
        else:
            given = tokens or REPEATED
            seconds = _repeating(alone, seconds, given)
        if seconds < MARGIN * given * together:
            return True
    return False


def _tokens(chance: float, guesses: int) -> float:
    """Tokens of a sweep over so many guesses."""
    return (1 - chance ** (guesses + 1)) / (1 - chance)


def _repeating(plain: float, tried: float, tokens: float) -> float:
    """Seconds of a sweep over a text's own repetitions: where there is nothing to repeat nothing is tried."""
    return plain + min(1.0, tokens - 1) * (tried - plain)


def fastest(choices: Sequence[Choice]) -> Choice:
    """The fastest; of those that are about as fast, the first. One at least must have a plan."""
    possible = [c for c in choices if c.planned is not None]
    best = possible[0]
    for choice in possible[1:]:
        if choice.token_s < best.token_s * MARGIN:
            best = choice
    return best
