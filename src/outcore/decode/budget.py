"""The budget that ``--memory`` asks for, in bytes."""

from __future__ import annotations

from ..checks import parse_size, whole
from ..errors import BudgetError, UsageError
from ..machine.memory import default_budget, memory_limits, process_memory_limit
from ..options import AUTO, SHARE
from ..sizes import MOST_BYTES, format_size


def asked_budget(memory: int | float | str | None, profile: str = "balanced") -> int:
    """Bytes of a budget that this process can have.

    Args:
        memory: as in ``given_budget``.

    Raises:
        UsageError: it is not positive, or no size. BudgetError: it is larger than what there is.
    """
    budget = given_budget(memory, profile)
    limit = min(memory_limits(), key=lambda limit: limit.total)
    if budget > limit.total:
        raise BudgetError(
            f"a budget of {format_size(budget)} is larger than what there is: {format_size(limit.total)} "
            f"({limit.source}); leave --memory out to use what is free"
        )
    return budget


def given_budget(memory: int | float | str | None, profile: str = "balanced", *, of: int | None = None) -> int:
    """Bytes of a budget as it was given, whether or not there is so much.

    Args:
        memory: bytes; a size such as ``"4GB"``; ``"50%"`` of what may be used now; None or ``"auto"``: from what is
            free.
        of: bytes that may be used, of a machine that is not this one.

    Raises:
        UsageError: it is not positive, or no size.
    """
    if memory is None or (isinstance(memory, str) and memory.strip().lower() == AUTO):
        return default_budget(profile=profile) if of is None else of
    if not isinstance(memory, str):
        return whole("memory", memory, most=MOST_BYTES)
    share = SHARE.fullmatch(memory.strip()) if len(memory) < 40 else None
    if share is None:
        return parse_size(memory)
    if not 0 < float(share[1]) <= 100:
        raise UsageError(f"--memory {memory.strip()}: from 1% to 100% of what may be used now")
    available = process_memory_limit().available if of is None else of
    return max(1, int(available * float(share[1]) / 100))
