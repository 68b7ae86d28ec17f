"""What each of several machines would do alone: beside it stands what they do together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.decode.preparation import prepare
from outcore.errors import BudgetError, OutcoreError
from outcore.plan.draft_cost import NONE
from outcore.sizes import format_size
from outcore_cluster.link.link import Link
from outcore_cluster.ranks_plan import RanksPlan


@dataclass(frozen=True)
class SingleMachine:
    """One machine with the whole model, within the same budget, without drafts.

    Attributes:
        token_s: predicted seconds for a token; None: it cannot be said.
        smallest: bytes of the smallest budget that works there, where the one that was asked for does not.
        calibrated: it rests on measurements.
    """

    token_s: float | None = None
    smallest: int | None = None
    calibrated: bool = False

    @property
    def short(self) -> str:
        """For a cell of a table."""
        if self.smallest is not None:
            return f"needs {format_size(self.smallest)}"
        return "-" if self.token_s is None else f"{self.token_s:.3g} s"


def all_alone(link: Link, folder: Path, options: dict[str, Any]) -> list[SingleMachine]:
    """Of each rank; all of them ask at the same time."""
    told = link.gather(json.dumps(asdict(_alone(folder, options))).encode())
    return [SingleMachine(**json.loads(each)) for each in told]


def _alone(folder: Path, options: dict[str, Any]) -> SingleMachine:
    try:
        plan = prepare(folder, **(options | {"ranks": None, "draft": NONE})).plan
    except BudgetError as e:
        return SingleMachine(smallest=e.smallest)
    except OutcoreError:
        return SingleMachine()  # this host may have its own layers alone
    return SingleMachine(plan.token_s, calibrated=plan.calibrated)


def beside(shared: RanksPlan, alone: Sequence[SingleMachine]) -> str:
    """A sentence on who is the fastest alone, and how much faster all are."""
    known = [(each.token_s, rank) for rank, each in enumerate(alone) if each.token_s is not None]
    if known:
        best, rank = min(known)
        many = "both" if len(alone) == 2 else "all"
        sure = "" if alone[rank].calibrated else ", not measured"
        return (
            f"Alone, with the whole model, {shared.parts[rank].host} is predicted to take {best:.3g} s a token{sure}; "
            f"{many} together take {shared.token_s / best:.2f} of that."
        )
    least = [each.smallest for each in alone if each.smallest is not None]
    if least:
        return f"None of them could run it alone within this budget: {format_size(min(least))} is the least that works."
    return "What one of them would do alone is not known: none has the whole model."
