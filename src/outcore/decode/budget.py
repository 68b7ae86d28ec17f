"""The budget, in bytes, that ``--memory`` asks for."""

from __future__ import annotations

from ..errors import BudgetError, called
from ..machine.memory import default_budget, memory_limits, process_memory_limit
from ..options import budget_bytes
from ..sizes import format_size


def asked_budget(memory: int | float | str | None) -> int:
    """Returns the bytes of a budget after checking that this process can have them; ``memory``: as in ``given_budget``.

    Raises:
        UsageError: ``memory`` is not positive, or no size.
        BudgetError: the budget is larger than the machine's memory.
    """
    budget = given_budget(memory)
    limit = min(memory_limits(), key=lambda limit: limit.total)
    if budget > limit.total:
        raise BudgetError(
            f"a budget of {format_size(budget)} is larger than what there is: {format_size(limit.total)} "
            f"({limit.source}); leave {called('memory')} out to use what is free"
        )
    return budget


def given_budget(memory: int | float | str | None, *, of: int | None = None) -> int:
    """Returns the bytes of a budget, without checking that the machine has them.

    Args:
        memory: bytes; a size such as ``"4GB"``; ``"50%"`` of the memory that may be used now; None or ``"auto"``: the
            default budget, which depends on the free memory.
        of: bytes that may be used, on another machine; None: on this one.

    Raises:
        UsageError: ``memory`` is not positive, or no size.
    """
    found = budget_bytes(memory, lambda: process_memory_limit().available if of is None else of)
    if found is not None:
        return found
    return default_budget() if of is None else of
