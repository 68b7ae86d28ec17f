"""Chunks of a prompt that ranks compute one behind the other, and what these are foreseen to take.

Before each text ranks agree whether one of them holds something else in memory than when that was foreseen last.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from outcore.engine.session import Session
from outcore.errors import BudgetError, PromptError, UsageError
from outcore.plan.plan import Plan

from .agreement import Agreement
from .ranks_plan import RanksPlan

NOTE = "other memory: "
"""How the note begins that tells of it; the last one is kept."""

ENDLESS = 2**62
"""Tokens of an answer that has no limit."""


def agreed_text(
    session: Session, text: Sequence[int], has_room: Callable[[], tuple[int, int]], *, asked: bool
) -> tuple[int, int]:
    """Tokens that the answer to a prompt may have, -1 for any number, and tokens of the prompt to compute at a time;
    the same on all ranks, which ask at the same time.

    Args:
        text: the prompt, and whatever else of it has to be the same on all ranks.
        has_room: both, as this rank has room for them. asked: as in ``agreed_chunk``.

    Raises:
        PromptError, BudgetError: ``has_room`` raised it here or elsewhere; then it is raised on all ranks.
        UsageError: another rank was given another prompt.
    """
    if session.link is None:
        return has_room()
    refusal: PromptError | BudgetError = BudgetError("another machine has no room for it")
    tokens = step = 0
    try:
        tokens, step = has_room()
    except (PromptError, BudgetError) as e:
        refusal = e
    mark = int.from_bytes(hashlib.sha256(array("q", text).tobytes()).digest()[:7])
    mine = [mark, -mark, ENDLESS if tokens < 0 else tokens, step, holds_as_foreseen(session)]
    first, last, tokens, room, same = Agreement(session.link).leasts(mine)
    if first != -last:
        raise UsageError("another machine was given another prompt: each has to be asked the same, in the same order")
    if not room:
        raise refusal
    return -1 if tokens == ENDLESS else tokens, _chunk(session, room, bool(same), asked=asked)


def agreed_chunk(session: Session, most: int, *, asked: bool) -> int:
    """Tokens of a prompt to compute at a time, the same on all ranks, which ask at the same time.

    Args:
        most: that this rank has room for. asked: they were asked for; else they are as many as are best.
    """
    if session.link is None:
        return most
    least, same = Agreement(session.link).leasts([most, holds_as_foreseen(session)])
    return _chunk(session, least, bool(same), asked=asked)


def _chunk(session: Session, least: int, same: bool, *, asked: bool) -> int:
    """The same where ranks have said what they have room for, and whether they hold what was foreseen."""
    if not same:
        foresee_anew(session)
    return least if session.shared is None or asked else min(least, session.shared.step)


def holds_as_foreseen(session: Session) -> bool:
    """Whether this rank has in memory what it had when it was last foreseen what all take."""
    return session.foreseen is None or _held(session.foreseen) == _held(session.plan)


def foresee_anew(session: Session) -> None:
    """Have all ranks tell what they hold, and foresee by that; all call it. Layers stay with the rank that they are
    of."""
    before, foresee = session.shared, session.foresee
    if before is None or foresee is None:
        return
    session.shared, session.foreseen = foresee(session.size, session.plan), session.plan
    if session.link is not None and session.link.rank == 0:
        session.notes = (*(n for n in session.notes if not n.startswith(NOTE)), _note(before, session.shared))


def _held(plan: Plan) -> tuple[object, ...]:
    """What decides on a rank's sweeps, but for chunks."""
    return plan.resident, plan.kept, plan.pools, plan.slots, plan.unit_bytes, plan.head_streamed, plan.kv_slot


def _note(before: RanksPlan, now: RanksPlan) -> str:
    changed = [
        f"{new.host} keeps {new.resident} of {new.layers} layers, {old.resident} before"
        for old, new in zip(before.parts, now.parts, strict=True)
        if (old.resident, old.bytes_per_token) != (new.resident, new.bytes_per_token)
    ]
    return f"{NOTE}{', '.join(changed) or 'as before'}; {1 / now.token_s:.3g} tokens a second are foreseen"
