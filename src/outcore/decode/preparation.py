"""Opens a model and makes its plan, as ``load`` does before it reads weights; ``outcore info`` shows the result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx

from ..calibration.calibration_file import load_calibration
from ..checkpoint.find_model import resolve_model
from ..checkpoint.mirrors import Mirrors, find_mirrors
from ..checkpoint.packed_store import open_model
from ..engine.extensions import kv_offload, on_demand
from ..engine.model_profile import ModelProfile
from ..errors import BudgetError, OutcoreError, UsageError, called
from ..machine.cache_folder import cache_dir
from ..machine.device import on_cpu
from ..machine.hardware import cores
from ..machine.kernels import keep_kernels
from ..machine.memory import last_resort
from ..modules.layers import is_stacked, named_modules, named_parameters
from ..modules.side_by_side import mergeable
from ..options import LoadOptions, chosen
from ..plan.joint_plan import AUTO, MOST, NGRAM, NONE, Choice, Draft, Planned, Planning, expected, fastest
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import ASSUMED, make_plan, resident_budget
from ..plan.workload import Workload, for_sequences
from ..sizes import format_size
from .budget import asked_budget
from .opening import Opening, options_for
from .rounding import rows_differ
from .speculative.sources import DraftSource, draft_sources, parse_draft, with_draft

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


@dataclass(frozen=True)
class Preparation:
    """An opened model and its plan; no weights have been read.

    Attributes:
        planning: makes plans within other budgets, for one sequence.
        given: the model's folder as the user named it; files may be read from a copy in the cache.
        choices: the ways to draft that ``auto`` compared; otherwise empty.
        choice: the chosen way to draft and its expected speed; None: not predicted.
        refused: why the requested budget is too small; the plan is then for the smallest that works. None: it is not.
        mirrors: the model's folder and those with copies of its files; None: there are no copies.
        calibration: of the machine and the disk that the model is on.
    """

    opening: Opening
    profile: ModelProfile
    plan: Plan
    cpu_streams: int
    notes: tuple[str, ...]
    calibration: Calibration
    draft: Draft | None
    planning: Planning
    given: str
    refused: str | None = None
    choices: tuple[Choice, ...] = ()
    choice: Choice | None = None
    mirrors: Mirrors | None = None


class SharedOut(Protocol):
    """One machine's layers of a shared model, and its draft."""

    @property
    def profile(self) -> ModelProfile: ...

    @property
    def draft(self) -> Draft | None: ...


class Ranks(Protocol):
    """The machines that share a model (``outcore_cluster`` implements this). All of them call the same methods at the
    same time."""

    def options(self, o: LoadOptions) -> LoadOptions:
        """Returns the options without those defaults that several machines do not support. Raises ``UsageError`` if the
        user asked for something that they do not support."""

    def share_out(
        self, profile: ModelProfile, o: LoadOptions, folder: Path, known: Calibration | None, budget: int
    ) -> SharedOut:
        """Returns this machine's layers, and its draft."""

    def room_for_draft(self, planning: Planning, o: LoadOptions, budget: int) -> Planning:
        """Returns the planning, without the automatic draft if some machine has no room for it."""

    def several(
        self, size: ModelSize, plan: Plan, o: LoadOptions, planned: Callable[[LoadOptions], tuple[ModelSize, Plan]]
    ) -> tuple[ModelSize, Plan]:
        """Returns the size and the plan for as many sequences as all machines have room for; ``planned`` returns them
        for other options."""

    def predicted(self, prepared: Preparation, o: LoadOptions) -> Preparation:
        """Returns the preparation with times that are predicted for all machines together."""


def prepare(
    model_path: str | Path,
    options: LoadOptions | None = None,
    *,
    least: bool = False,
    **arguments: Any,
) -> Preparation:
    """Opens a model and makes its plan without reading any weights.

    Args:
        options: load options; or, instead, ``arguments`` with fields of ``LoadOptions``, where ``draft`` is ``none`` by
            default.
        least: if the requested budget is too small, plan for the smallest that works (only for one sequence).

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError: see their docstrings.
    """
    o = chosen(options, arguments)
    if options is None and "draft" not in arguments:
        o = replace(o, draft=NONE)
    o, ranks = options_for(Path(model_path), o), cast(Ranks | None, o.ranks)
    if ranks is not None:
        o = ranks.options(o)
    budget, folder = asked_budget(o.memory), Path(model_path)
    opened = _opened(folder, o, budget)
    if ranks is not None:
        planning = ranks.room_for_draft(opened.planning, o, budget)
        opened = replace(opened, planning=planning, draft=planning.draft)
    profile = opened.profile
    alone = o.most_sequences > 1 and (profile.trace.evaluates or not mergeable(profile.lazy.model))
    if o.most_sequences > 1:
        plan_for = partial(_plan_for_several, profile.size, alone=alone, budget=budget, calibration=opened.calibration)
        size, plan = plan_for(o)
        if ranks is not None:
            size, plan = ranks.several(size, plan, o, plan_for)
        prepared = replace(opened, profile=replace(profile, size=size), plan=plan)
    else:
        prepared = _planned_for_one(opened, budget, least)
    notes = (*prepared.profile.notes, *_advice(prepared.profile, prepared.plan, opened.planning, o), *opened.notes)
    if alone:
        notes += ("sequences run one after the other: this model's caches cannot be merged",)
    prepared = replace(prepared, notes=notes, given=str(model_path))
    return prepared if ranks is None else ranks.predicted(prepared, o)


def _opened(folder: Path, o: LoadOptions, budget: int) -> Preparation:
    """Opens a model and its draft, before planning."""
    if o.kv_dir is not None and o.kv_disk != "off" and (offload := kv_offload()) is not None:
        offload.try_folder(Path(o.kv_dir))  # checked even if unused, since the user named it
    # A compact copy is no use to mirrors and ranks, which have the named folder's files, nor on a CPU, which decodes it
    # more slowly than most disks are read.
    compact = not (on_cpu() or o.mirrors or o.ranks is not None)
    lazy = open_model(
        folder,
        compact,
        model_config=o.model_config,
        trust_remote_code=o.trust_remote_code,
        adapter_path=o.adapter_path,
    )
    streams = (o.cpu_streams or cores()) if on_cpu() else 1
    known = load_calibration(folder, streams)
    mirrors = find_mirrors(o.mirrors, lazy.checkpoint)
    kind, which = draft_kind(o)
    opening = Opening(folder, o, known)
    profile = opening.measured(lazy)
    _check_experts(profile, o)
    keep_kernels()  # before any is compiled
    apart, most = not on_cpu() and rows_differ(profile), MOST
    if apart:  # the passes of drafted tokens share a reading, as many as there is memory for their graphs
        most = profile.size.graph(on_cpu=False).readings([1] * (MOST + 1), profile.size.context)[0] - 1
    shared: SharedOut | None = None if o.ranks is None else o.ranks.share_out(profile, o, folder, known, budget)
    if shared is not None:
        profile, kind = shared.profile, NONE if shared.draft is None else shared.draft.kind
    notes = () if mirrors is None else mirrors.about()
    draft = shared.draft if shared is not None else None
    if shared is None:
        profile, draft = with_draft(kind, which, profile, opening)
    planning = Planning(profile.size, kind, draft, ring_options(o), not (on_cpu() or apart), most)
    calibration = known or ASSUMED
    return Preparation(
        opening, profile, cast(Plan, None), streams, notes, calibration, draft, planning, "", mirrors=mirrors
    )


def _check_experts(profile: ModelProfile, o: LoadOptions) -> None:
    """Raises ``UsageError`` if the option ``experts`` is set and no layer's experts can be read one by one."""
    if not o.experts or any(each.experts is not None for each in profile.size.layers):
        return
    asked = f"{called('experts')} {o.experts}"
    if on_demand() is None:
        raise UsageError(f"{asked}: reading experts needs the package outcore_experts, which is missing; install it")
    if o.adapter_path is not None and any(is_stacked(module) for _, module in named_modules(profile.lazy.model)):
        raise UsageError(
            f"{asked}: with the adapter {o.adapter_path} none can be read one by one, because its modules use the "
            f"weights of the modules that they wrap, as DoRA's do; leave out the adapter or {called('experts')}"
        )
    raise UsageError(f"{asked}: this model has no experts that can be read one by one; leave it out")


def _planned_for_one(opened: Preparation, budget: int, least: bool) -> Preparation:
    planning, profile, draft_ways = opened.planning, opened.profile, list[Way]()
    # A default budget leaves memory free as a precaution. Use that memory rather than refuse a model that fits.
    room = budget if opened.opening.options.asked else max(budget, last_resort())
    allowed = max(budget, planning.smallest) if least or planning.smallest <= room else budget
    planned = planning.at(allowed, opened.calibration)
    choice: Choice | None = None
    if planning.kind == AUTO and planned.plan.streams and not planned.plan.pools:
        draft_ways = ways_to_draft(profile, planning, planned, opened.opening, allowed)
        choice = fastest([each for each, _ in draft_ways])
        profile = next(its for each, its in draft_ways if each is choice)
        planned = choice.planned or planned
        planned = replace(planned, plan=replace(planned.plan, smallest_budget_bytes=planning.smallest))
    return replace(
        opened,
        profile=replace(profile, size=replace(planned.size, on_disk=bool(planned.plan.kv_slot))),
        plan=planned.plan,
        draft=planned.draft,
        choices=tuple(each for each, _ in draft_ways),
        choice=choice,
        refused=planning.refusal(budget) if planning.smallest > room else None,
    )


def plan_model(model_path: str | Path, **arguments: Any) -> Plan:
    """Returns the plan by which ``load`` would run a model, as ``outcore plan`` shows it. Weights are not read.

    Args:
        model_path: a folder, or a model of the Hub.
        arguments: as for ``load``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError: as ``load``.
    """
    return prepare(resolve_model(str(model_path)), chosen(None, arguments)).plan


def ring_options(o: LoadOptions) -> dict[str, Any]:
    return {
        "slots": o.slots,
        "resident": o.resident,
        "prefill_step": o.prefill_step_size,
        "head_resident": o.head_resident,
        "experts": o.experts,
    }


def draft_kind(o: LoadOptions) -> tuple[str, Any]:
    """Returns the kind and the argument of the requested draft; ``none`` if several sequences share passes."""
    kind, which = parse_draft(o.draft)
    if o.most_sequences > 1 and kind not in (AUTO, NONE):
        raise UsageError(
            f"{called('draft')} {o.draft}: sequences that share forward passes cannot use drafts; leave it out"
        )
    return (NONE, None) if o.most_sequences > 1 else (kind, which)


def _plan_for_several(
    size: ModelSize, o: LoadOptions, *, alone: bool, budget: int, calibration: Calibration
) -> tuple[ModelSize, Plan]:
    """Returns the size and the plan for sequences that share passes; ``alone``: for one sequence at a time."""

    def planned(size: ModelSize) -> tuple[ModelSize, Plan]:
        planning = Planning(size, options=ring_options(o))
        # A default budget is only a part of the free memory, so more may be used.
        more = not o.asked and planning.smallest <= last_resort()
        found = planning.at(max(budget, planning.smallest) if more else budget, calibration)
        return found.size, found.plan

    if isinstance(o.sequences, int):
        return planned(for_sequences(size, 1 if alone else o.sequences))
    workload = cast(Workload, o.sequences)
    workload = replace(workload, most=1, least=1) if alone else workload
    try:
        return workload.choose(size, partial(make_plan, budget=budget, calibration=calibration, **ring_options(o)))
    except BudgetError:
        return planned(for_sequences(size, workload.least))


def _advice(profile: ModelProfile, plan: Plan, planning: Planning, o: LoadOptions) -> list[str]:
    """Returns notes for the user: what would be faster, what keys and values on disk cost, options without effect."""
    notes: list[str] = []
    scales = {a.dtype for path, a in named_parameters(profile.lazy.model) if path.endswith("scales")}
    if on_cpu() and scales & {mx.bfloat16, mx.float16} and o.dtype is None:
        # Measured with MLX 0.32.4: 8192 x 2048 at 4 bit, 11 against 98 ms.
        notes.append(f"quantized products run about 9 times faster on the CPU with {called('dtype')} float32")
    if plan.streams and profile.trace.evaluates and planning.kind not in (AUTO, NONE):
        notes.append("nothing is drafted: models of this type evaluate arrays inside their forward pass")
    elif plan.pools and not planning.blocks and planning.kind not in (AUTO, NONE):
        notes.append(
            "nothing is drafted: experts are read one by one, and those of a drafted token take as long as a token "
            f"({called('experts')} 0 streams layers whole)"
        )
    if plan.streams and (again := profile.size.further_readings(plan.prefill_step)):
        what = f"a prompt of {profile.size.prompt} tokens takes {again + 1} readings of the weights"
        notes.append(f"{what}: more memory takes fewer")
    if plan.kv_slot:
        each = sum(n for i, n in profile.size.kept_apart if i in plan.streamed)
        notes.append(
            f"keys and values lie on disk ({called('kv_disk')}): each token reads {format_size(each * 1000)} for every "
            "1,000 tokens of context"
        )
    elif o.kv_disk == "on" and not profile.size.kept_apart:
        notes.append("keys and values stay in memory: no layer of this model has some that grow and are its own")
    return notes
