"""Expected speed of drafts, from simulated passes.

If each guess is right with chance p, a pass over n guesses yields (1 - p ** (n + 1)) / (1 - p) tokens, including the
model's own (Leviathan et al. 2023, arXiv 2211.17192).
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

# Draft lengths that are compared.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Tokens per pass assumed for n-gram drafts, and guesses per pass.
REPEATED, TRIED = 1.3, 2

# A draft is chosen over a simpler one if it takes less than this share of its time.
MARGIN = 0.97


@dataclass(frozen=True)
class Choice:
    """A plan with a draft, and its expected speed.

    Attributes:
        planned: None where the draft does not fit or is not possible; ``reason`` says why.
        drafted: guesses per pass.
        tokens: per pass.
        token_s: seconds per token of a text.
        first: bytes to write once, before the first answer.
    """

    name: str
    planned: Planned | None = None
    reason: str = ""
    drafted: int = 0
    tokens: float = 1.0
    token_s: float = float("inf")
    first: int = 0


def expected(planned: Planned, calibration: Calibration, name: str, blocks: bool, first: int = 0) -> Choice:
    """Returns the expected speed of a plan with its draft.

    Args:
        blocks: one pass computes all guesses; otherwise each takes its own.
    """
    size, plan, draft = planned.size, planned.plan, planned.draft

    def pass_s(guesses: int) -> float:
        return sweep_s(size, plan, calibration, guesses + 1, blocks)

    best = Choice(name, planned, token_s=pass_s(0), first=first)
    if draft is None:
        return best
    if draft.kind == NGRAM:
        tried = min(TRIED, size.drafted)
        token_s = _repeating(pass_s(0), pass_s(tried), REPEATED) / REPEATED
        return min((Choice(name, planned, "", tried, REPEATED, token_s), best), key=lambda c: c.token_s)
    guess = guess_s(size, draft, calibration)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted):
        tokens = _tokens(draft.chance, n)
        token_s = (pass_s(n) + n * guess) / tokens
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
    """Returns whether texts that share passes are faster with drafts than with one token each, by simulation.

    With drafts each text needs a pass of its own; without, one pass serves all of them.

    Args:
        tokens: observed tokens per pass with n-gram drafts; None: not observed.
        chance: that a guess of another draft is right; each of its guesses takes ``guess_s`` seconds.
    """
    together = sweep_s(size, plan, calibration, texts, True)  # one batched pass
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
    """Tokens of a pass over so many guesses."""
    return (1 - chance ** (guesses + 1)) / (1 - chance)


def _repeating(plain: float, tried: float, tokens: float) -> float:
    """Seconds of a pass with n-gram drafts, which guess only where the text repeats itself."""
    return plain + min(1.0, tokens - 1) * (tried - plain)


def fastest(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice; among nearly equal ones, the first. At least one must have a plan."""
    possible = [c for c in choices if c.planned is not None]
    best = possible[0]
    for choice in possible[1:]:
        if choice.token_s < best.token_s * MARGIN:
            best = choice
    return best
