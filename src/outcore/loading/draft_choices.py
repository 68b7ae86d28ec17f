"""Ways to draft for a model within a budget, opened and planned for, the fastest of which ``--draft auto`` takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.find_model import name_of, with_same_tokens
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.packed_store import missing_bytes, source_of, whole_files
from ..decode.speculative.drafting import head_drafts
from ..decode.speculative.self_draft import SelfDraft, self_draft
from ..engine.model_profile import ModelProfile
from ..errors import BudgetError, OutcoreError
from ..machine.cache_folder import cache_dir
from ..options import LoadOptions
from ..plan.draft_choice import Choice, SeenDrafts, expected, fastest
from ..plan.draft_cost import MODEL, MTP, NGRAM, NONE, SELF
from ..plan.joint_plan import Planned, Planning
from ..plan.machine_profile import Calibration
from ..plan.plan import Plan
from ..plan.planner import ASSUMED, resident_budget
from ..sizes import format_size
from .draft_experience import key_of, known_drafts, seen_before
from .opened import with_draft

BITS = (2, 3, 4)
"""Of copies, or of high bits, that are looked at."""

OTHERS, SMALLER = 2, 4
"""Other models that are looked at at most, and by how many times they are smaller at least."""

ROOM = 1_000_000_000
"""Bytes of the cache's disk that stay free."""


@dataclass(frozen=True)
class Way:
    """A way to draft: what it is expected to give, and the model opened for it."""

    choice: Choice
    profile: ModelProfile
    planning: Planning


def chosen_way(ways: list[Way]) -> Way:
    """The fastest; of those that are about as fast, the first."""
    best = fastest([way.choice for way in ways])
    return next(way for way in ways if way.choice is best)


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
    seen = known_drafts(profile.lazy.checkpoint.identity())

    def gives(name: str, planned: Planned, first: int = 0) -> Choice:
        counts = seen.get(key_of(name, o.dtype))
        return expected(planned, calibration, name, planning.blocks, counts.seen() if counts else SeenDrafts(), first)

    none = replace(planning, kind=NONE, draft=None)
    found = [Way(gives(NONE, none.at(budget, calibration)), profile, none)]
    if base.draft is not None:
        found.append(Way(gives(NGRAM, base), profile, planning))
    if base.plan.kv_slot or o.kv_disk == "on":
        return found
    for name, kind, which in other_ways(profile, folder):
        if isinstance(which, int) and (least := least_bytes(profile, which)) > budget:
            # Without opening it, which takes its time.
            found.append(Way(Choice(name, reason=f"needs more than {format_size(least)}"), profile, planning))
            continue
        found.append(_way(name, kind, which, profile, planning, folder, o, known, budget, gives))
    return found


def _needed(least: int, plain: ModelProfile) -> str:
    if least >= resident_budget(plain.size):
        return "takes more memory than all of the model"
    return f"needs {format_size(least, round_up=True)}"


def what_it_gives(
    profile: ModelProfile, planned: Planned, calibration: Calibration, blocks: bool, dtype: str | None
) -> Choice:
    """What one way to draft is expected to give, by what was seen of it."""
    name = planned.draft.name if planned.draft is not None else NONE
    return expected(planned, calibration, name, blocks, seen_before(profile.lazy.checkpoint.identity(), name, dtype))


def other_ways(profile: ModelProfile, folder: Path) -> Iterator[tuple[str, str, int | str | None]]:
    """Ways to draft beside the text's own repetitions: name, kind, and which."""
    if (heads := head_drafts()) is not None and heads.has_head(profile.lazy):
        yield MTP, MTP, None
    quantization = profile.lazy.config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    for n in BITS:
        if not isinstance(bits, int) or n < bits:
            yield f"{SELF}:{n}", SELF, n
    for other in with_same_tokens(folder, profile.lazy.checkpoint.nbytes // SMALLER)[:OTHERS]:
        yield name_of(other), MODEL, str(other)


def least_bytes(profile: ModelProfile, bits: int) -> int:
    """Bytes that a copy of so many bits takes at least."""
    quantization = profile.lazy.config.get("quantization")
    whole = quantization.get("bits", 16) if isinstance(quantization, dict) else 16
    # Scales, and what is quantized in fewer bits than the others, are as they are.
    return sum(layer.resident for layer in profile.size.layers) * bits // (max(whole, bits) + 2)


def _way(
    name: str,
    kind: str,
    which: int | str | None,
    plain: ModelProfile,
    planning: Planning,
    folder: Path,
    o: LoadOptions,
    known: Calibration | None,
    budget: int,
    gives: Callable[[str, Planned, int], Choice],
) -> Way:
    try:
        profile, draft = with_draft(plain, kind, which, folder, o, known)
    except OutcoreError as e:
        return Way(Choice(name, reason=str(e)), plain, planning)
    with_it = replace(planning, size=profile.size, kind=kind, draft=draft)
    try:
        planned = with_it.at(budget, known or ASSUMED)
    except BudgetError as e:
        needed = _needed(e.smallest, plain) if e.smallest is not None else str(e)
        return Way(Choice(name, reason=needed), profile, with_it)
    first = to_write(profile, planned.plan, which) if isinstance(which, int) else 0
    if isinstance(which, int) and first and (reason := cannot_be_written(first, self_draft(profile, which).folder)):
        return Way(Choice(name, reason=reason), profile, with_it)
    return Way(gives(name, planned, first), profile, with_it)


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
