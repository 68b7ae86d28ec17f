"""Opens and plans each way to draft for a model within a budget; ``--draft auto`` takes the fastest."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.model_profile import ModelProfile
from ...errors import BudgetError, OutcoreError
from ...machine.cache_folder import cache_dir
from ...plan.joint_plan import NGRAM, NONE, Choice, Planned, Planning, expected
from ...plan.planner import ASSUMED, resident_budget
from ...sizes import format_size
from ..opening import Opening
from .sources import DraftSource, draft_sources

# Bytes to leave free on the cache's disk.
ROOM = 1_000_000_000


# A way to draft, with its expected speed, and the model opened for it.
Way = tuple[Choice, ModelProfile]


def ways_to_draft(profile: ModelProfile, planning: Planning, base: Planned, opening: Opening, budget: int) -> list[Way]:
    """Returns every way to draft, simplest first; those that cannot be used have a ``reason``. ``base``: the plan with
    n-grams."""
    calibration = opening.known or ASSUMED
    none = replace(planning, kind=NONE, draft=None).at(budget, calibration)
    found = [(expected(none, calibration, NONE, planning.blocks), profile)]
    if base.draft is not None:
        found.append((expected(base, calibration, NGRAM, planning.blocks), profile))
    if base.plan.kv_slot or opening.options.kv_disk == "on":
        return found
    for source in draft_sources().values():
        for name, which, least in source.offers(profile):
            if least > budget:  # then do not open it, which takes long
                found.append((Choice(name, reason=f"needs more than {format_size(least)}"), profile))
            else:
                found.append(_way(source, name, which, profile, planning, opening, budget))
    return found


def _way(
    source: DraftSource,
    name: str,
    which: Any,
    plain: ModelProfile,
    planning: Planning,
    opening: Opening,
    budget: int,
) -> Way:
    calibration = opening.known or ASSUMED
    try:
        profile, draft = source.open(which, plain, opening)
        planned = replace(planning, size=profile.size, kind=source.kind, draft=draft).at(budget, calibration)
    except BudgetError as e:
        whole = e.smallest is not None and e.smallest >= resident_budget(plain.size)
        needed = str(e) if e.smallest is None else f"needs {format_size(e.smallest, round_up=True)}"
        return Choice(name, reason="takes more memory than all of the model" if whole else needed), plain
    except OutcoreError as e:
        return Choice(name, reason=str(e)), plain
    first, folder = source.to_write(profile, planned.plan, draft)
    if first and (reason := _cannot_be_written(first, folder)):
        return Choice(name, reason=reason), profile
    return expected(planned, calibration, name, planning.blocks, first), profile


def _cannot_be_written(nbytes: int, folder: Path | None) -> str:
    """Returns why ``nbytes`` bytes cannot be written to the cache and ``folder``; "" if they can."""
    for at in (cache_dir(), folder or cache_dir()):
        while not at.exists() and at != at.parent:
            at = at.parent
        if not os.access(at, os.W_OK):
            return f"{format_size(nbytes)} are to be written, and {at} is not writable"
        if nbytes + ROOM > (free := shutil.disk_usage(at).free):
            return f"{format_size(nbytes)} are to be written, and {format_size(free)} are free for the cache"
    return ""
