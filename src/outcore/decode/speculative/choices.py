"""Ways to draft for a model within a budget, opened and planned for, the fastest of which ``--draft auto`` takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoint.manifest import MANIFEST
from ...checkpoint.packed_store import missing_bytes, source_of, whole_files
from ...engine.model_profile import ModelProfile
from ...errors import BudgetError, OutcoreError
from ...machine.cache_folder import cache_dir
from ...options import LoadOptions
from ...plan.draft_choice import Choice, expected
from ...plan.draft_cost import MTP, NGRAM, NONE, SELF
from ...plan.joint_plan import Planned, Planning
from ...plan.machine_profile import Calibration
from ...plan.plan import Plan
from ...plan.planner import ASSUMED, resident_budget
from ...sizes import format_size
from .drafting import head_drafts
from .opened import with_draft
from .self_draft import SelfDraft, self_draft

BITS = (2, 3, 4)
"""Of copies, or of high bits, that are looked at."""

ROOM = 1_000_000_000
"""Bytes of the cache's disk that stay free."""


@dataclass(frozen=True)
class Way:
    """A way to draft: what it is expected to give, and the model opened for it."""

    choice: Choice
    profile: ModelProfile
    planning: Planning


def ways_to_draft(
    profile: ModelProfile,
    planning: Planning,
    base: Planned,
    folder: Path,
    o: LoadOptions,
    known: Calibration | None,
    budget: int,
) -> list[Way]:
    """Every way that there is, simplest first; those that cannot be say why.

    Args:
        planning: of ``auto``: the text's own repetitions where there is room for them; ``base``: its plan.
    """
    calibration = known or ASSUMED
    none = replace(planning, kind=NONE, draft=None)
    found = [Way(expected(none.at(budget, calibration), calibration, NONE, planning.blocks), profile, none)]
    if base.draft is not None:
        found.append(Way(expected(base, calibration, NGRAM, planning.blocks), profile, planning))
    if base.plan.kv_slot or o.kv_disk == "on":
        return found
    for name, kind, bits in other_ways(profile):
        if bits is not None and (least := least_bytes(profile, bits)) > budget:
            # Without opening it, which takes its time.
            found.append(Way(Choice(name, reason=f"needs more than {format_size(least)}"), profile, planning))
            continue
        found.append(_way(name, kind, bits, profile, planning, folder, o, known, budget))
    return found


def other_ways(profile: ModelProfile) -> Iterator[tuple[str, str, int | None]]:
    """Ways to draft beside the text's own repetitions: name, kind, and bits of a copy."""
    if (heads := head_drafts()) is not None and heads.has_head(profile.lazy):
        yield MTP, MTP, None
    quantization = profile.lazy.config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    for n in BITS:
        if not isinstance(bits, int) or n < bits:
            yield f"{SELF}:{n}", SELF, n


def least_bytes(profile: ModelProfile, bits: int) -> int:
    """Bytes that a copy of so many bits takes at least."""
    quantization = profile.lazy.config.get("quantization")
    whole = quantization.get("bits", 16) if isinstance(quantization, dict) else 16
    # Scales, and what is quantized in fewer bits than the others, are as they are.
    return sum(layer.resident for layer in profile.size.layers) * bits // (max(whole, bits) + 2)


def _way(
    name: str,
    kind: str,
    bits: int | None,
    plain: ModelProfile,
    planning: Planning,
    folder: Path,
    o: LoadOptions,
    known: Calibration | None,
    budget: int,
) -> Way:
    calibration = known or ASSUMED
    try:
        profile, draft = with_draft(plain, kind, bits, folder, o, known)
    except OutcoreError as e:
        return Way(Choice(name, reason=str(e)), plain, planning)
    with_it = replace(planning, size=profile.size, kind=kind, draft=draft)
    try:
        planned = with_it.at(budget, calibration)
    except BudgetError as e:
        reason = str(e)
        if e.smallest is not None:
            whole = e.smallest >= resident_budget(plain.size)
            needed = f"needs {format_size(e.smallest, round_up=True)}"
            reason = "takes more memory than all of the model" if whole else needed
        return Way(Choice(name, reason=reason), profile, with_it)
    first = to_write(profile, planned.plan, bits) if bits is not None else 0
    if bits is not None and first and (reason := cannot_be_written(first, self_draft(profile, bits).folder)):
        return Way(Choice(name, reason=reason), profile, with_it)
    return Way(expected(planned, calibration, name, planning.blocks, first=first), profile, with_it)


def to_write(profile: ModelProfile, plan: Plan, bits: int) -> int:
    """Bytes of the cache that are to be written before a copy of so many bits drafts, once."""
    low = missing_bytes(profile.lazy, profile.layers) if plan.streams else 0
    return low + copy_to_write(profile, self_draft(profile, bits))


def copy_to_write(profile: ModelProfile, copy: SelfDraft) -> int:
    """Bytes of a copy that are not in the cache yet."""
    whole = whole_files(copy.folder, MANIFEST, copy.files, source_of(profile.lazy.checkpoint))
    return sum(f.nbytes for f in copy.files if f.name not in whole)


def cannot_be_written(nbytes: int, folder: Path) -> str:
    """Why so many bytes of the cache, and of a copy's folder, cannot be written; nothing if they can."""
    for at in (cache_dir(), folder):
        while not at.exists() and at != at.parent:
            at = at.parent
        if not os.access(at, os.W_OK):
            return f"{format_size(nbytes)} are to be written, and {at} cannot be written to"
        if nbytes + ROOM > (free := shutil.disk_usage(at).free):
            return f"{format_size(nbytes)} are to be written, and {format_size(free)} are free for the cache"
    return ""
