"""A model opened and planned for: all that ``load`` does before it reads weights, and what ``outcore info`` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..calibration.calibration_file import load_calibration
from ..calibration.mirrors import known_mirrors
from ..disk.replica import Replica
from ..disk.scratch import try_folder
from ..errors import BudgetError, UsageError
from ..generation.speculative.draft_model import PROMPT_STEP
from ..generation.speculative.drafting import (
    check_tokenizers,
    draft_by_model,
    draft_folder,
    draft_of_itself,
    parse_draft,
)
from ..model.call_values import mergeable
from ..model.find_model import resolve_model
from ..model.lazy_model import LazyModel
from ..model.mirror import about, find_mirror
from ..model.nested import with_nested_layers
from ..model.packed_store import open_again, open_model
from ..options import LoadArguments, LoadOptions, chosen, named_as_arguments
from ..planning.draft_cost import AUTO, NGRAM, NONE, Draft
from ..planning.joint_plan import Planning
from ..planning.machine_profile import Calibration
from ..planning.plan import ModelSize, Plan
from ..planning.planner import ASSUMED, make_plan
from ..planning.workload import Workload, plan_for_several
from ..sizes import format_size
from ..streaming.model_profile import ModelProfile, profile_of
from ..streaming.unsupported import check_experts
from ..system.device import COMPUTE_DTYPES, on_cpu
from ..system.hardware import cores
from ..system.memory import asked_budget, last_resort
from .expert_profile import with_experience

MOSTLY = 0.95
"""Share of the layers' bytes that mirrors have and from which nothing is said of the rest."""


@dataclass(frozen=True)
class Preparation:
    """A model opened and planned for, of which nothing has been read.

    Attributes:
        planning: makes plans within other budgets. For one sequence.
        opened: the folder, and the arguments that the model was opened with.
        refused: why the budget that was asked for does not do, where the plan is for the smallest that does.
        mirrors: folders with copies of the model's files, which were compared.
        calibration: of the machine with the disks of its mirrors, as far as they were measured.
    """

    profile: ModelProfile
    plan: Plan
    cpu_streams: int
    notes: tuple[str, ...]
    calibration: Calibration
    draft: Draft | None
    planning: Planning
    opened: Mapping[str, Any]
    refused: str | None = None
    mirrors: tuple[Replica, ...] = ()


def prepare(
    model_path: str | Path,
    options: LoadOptions | None = None,
    *,
    least: bool = False,
    **arguments: Unpack[LoadArguments],
) -> Preparation:
    """Open a model and plan for it without reading any weights.

    Args:
        options: or ``arguments``, its fields; without drafts where they do not name any.
        least: plan for the smallest budget that works where the one that was asked for is too small, however large that
            is; for one sequence. ``refused`` says so then.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError: see their docstrings.
    """
    o = chosen(options, arguments)
    if options is None and "draft" not in arguments:
        o = replace(o, draft=NONE)
    budget, folder = asked_budget(o.memory, o.profile), Path(model_path)
    if o.kv_dir is not None and o.kv_disk != "off":
        try_folder(Path(o.kv_dir))  # whether or not anything will lie there: it was named
    lazy = open_model(
        folder, model_config=o.model_config, trust_remote_code=o.trust_remote_code, adapter_path=o.adapter_path
    )
    mirrors = tuple(find_mirror(m, lazy.checkpoint) for m in o.mirrors)
    streams = (o.cpu_streams or cores()) if on_cpu() else 1
    known, _ = load_calibration(folder, streams)
    kind, which = _kind(o)
    profile = _measured(lazy, o, known)
    if isinstance(which, int):
        profile = _nested(profile, which, o, known)
    measured, told = _mirrored(known, mirrors, profile, o, streams)
    draft = _draft(kind, which, profile, folder, o.dtype)
    if draft is not None and draft.bits is not None and profile.size.kv_disk != "off":
        if o.kv_disk == "on":
            raise UsageError(
                f"{o.name('kv_disk')} on and {o.name('draft')} {o.draft}: a copy of the model reads all keys and "
                f"values for every token that it drafts; with {o.name('draft')} ngram it need not"
            )
        profile = replace(profile, size=replace(profile.size, kv_disk="off"))
    planning = Planning(profile.size, kind, draft, _ring_options(o), blocks=not on_cpu())
    alone = o.most_sequences > 1 and (profile.evaluates or not mergeable(lazy.model))
    refused = None
    if o.most_sequences > 1:
        size, plan = _plan_for_several(profile.size, o, alone, budget, measured)
    else:
        # A caution of ours is no reason to refuse what there is room for.
        room = budget if o.asked else max(budget, last_resort())
        allowed = max(budget, planning.smallest) if least or planning.smallest <= room else budget
        planned = planning.at(allowed, measured)
        plan, size, draft = planned.plan, planned.size, planned.draft
        size = replace(size, on_disk=bool(plan.kv_slot))
        refused = planning.refusal(budget) if planning.smallest > room else None
    profile = replace(profile, size=size)
    notes = profile.notes + _advice(profile, o) + _undrafted(plan, kind, o) + _about_kv(profile, plan, o) + told
    if alone:
        notes += ("sequences run one after the other: this model's caches cannot be merged",)
    return Preparation(
        profile, plan, streams, notes, measured, draft, planning, _opened(model_path, o), refused, mirrors
    )


def plan_model(model_path: str | Path, **arguments: Unpack[LoadArguments]) -> Plan:
    """The plan by which ``load`` would hold a model, as ``outcore plan`` shows it. Weights are not read.

    Args:
        model_path: a folder, or a model of the Hub.
        arguments: as for ``load``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError: as ``load``.
    """
    options = chosen(None, arguments)
    with named_as_arguments(options):
        return prepare(resolve_model(str(model_path)), options).plan


def _ring_options(o: LoadOptions) -> dict[str, Any]:
    """What ``make_plan`` takes."""
    return {
        "slots": o.slots,
        "resident": o.resident,
        "prefill_step": o.prefill_step_size,
        "head_resident": o.head_resident,
        "placement": o.placement,
        "experts": o.experts,
    }


def _opened(model_path: str | Path, o: LoadOptions) -> dict[str, Any]:
    """By which another process opens the same model."""
    return {
        "folder": str(model_path),
        "dtype": o.dtype,
        "model_config": o.model_config,
        "trust_remote_code": o.trust_remote_code,
        "adapter_path": None if o.adapter_path is None else str(o.adapter_path),
    }


def _measured(lazy: LazyModel, o: LoadOptions, calibration: Calibration | None) -> ModelProfile:
    """What the model weighs, for the context and the use that it is opened for."""
    compute = COMPUTE_DTYPES[o.dtype] if o.dtype is not None else None
    # A disk that calibration read faster through the page cache is read so, and units need not keep to its blocks.
    how = calibration.io if calibration is not None and o.io == "auto" else o.io
    check_experts(lazy, compute)
    several = o.most_sequences > 1
    profile = profile_of(
        lazy, context=o.context, prompt=o.prompt, dtype=compute, direct=how != "cached", together=several
    )
    size = profile.size
    if o.resumable:
        size = replace(size, kept=size.states)
    if o.batch is not None:
        size = size.in_batches(o.batch, o.context or size.context)
    if o.reserved is not None and o.reserved < size.context:
        # The prompt, if it is known, is there from the first sweep on.
        size = size.at_context(max(o.reserved, min(o.prompt or 0, size.context)))
    if o.sequences == 1 and o.batch is None and size.kept_apart:
        size = replace(size, kv_disk=o.kv_disk)
    size, notes = with_experience(size, lazy.checkpoint.identity())
    return replace(profile, size=size, notes=(*profile.notes, *notes))


def _nested(profile: ModelProfile, high: int, o: LoadOptions, known: Calibration | None) -> ModelProfile:
    """The model with layers of which only low bits are read, where so many high bits of its own codes draft for it: not
    where experts can be read one by one, and not where a layer's codes are looked at from outside."""
    size = profile.size
    streamable = [each.streamable for each in size.layers]
    if not any(streamable) or any(each.experts is not None for each in size.layers) or profile.evaluates:
        return profile
    lazy = with_nested_layers(open_again(profile.lazy), high)
    if lazy is None:
        return profile
    nested = _measured(lazy, o, known)
    if [each.streamable for each in nested.size.layers] != streamable:
        return profile
    layers = tuple(replace(n, kind=p.kind) for n, p in zip(nested.size.layers, size.layers, strict=True))
    return replace(nested, size=replace(nested.size, layers=layers))


def _mirrored(
    known: Calibration | None, mirrors: Sequence[Replica], profile: ModelProfile, o: LoadOptions, cpu_streams: int
) -> tuple[Calibration, tuple[str, ...]]:
    """The machine with the disks of mirrors as well, and what the user should know of them."""
    if not mirrors:
        return known or ASSUMED, ()
    rates = known_mirrors(mirrors, cpu_streams)
    if o.threads is not None:
        for mirror in mirrors:
            mirror.threads = None
    notes = [line for mirror in mirrors for line in about(mirror, profile.lazy.checkpoint)]
    copies = {file for mirror in mirrors for file in mirror.copies or ()}
    extents = [e for unit in profile.units if unit is not None for e in unit.extents]
    total = sum(e.nbytes for e in extents)
    there = sum(e.nbytes for e in extents if e.file in copies)
    if there < total * MOSTLY:
        notes.append(
            f"{format_size(total - there)} of {format_size(total)} of layers are in no mirror, and read from one disk: "
            "what mlx-lm changes when it loads lies in the cache (a mirror of what outcore pack writes has all)"
        )
    if rates.unknown and known is not None:
        which = ", ".join(str(mirror.folder) for mirror in rates.unknown)
        notes.append(f"predicted without {which}: that disk was not measured (outcore plan {o.name('mirror')})")
    return (known or ASSUMED).joined(rates.gbps, there / total if total else 1.0), tuple(notes)


def _kind(o: LoadOptions) -> tuple[str, int | str | None]:
    """What drafts, which is nothing where several sequences share sweeps."""
    kind, which = parse_draft(o.draft)
    if o.most_sequences > 1 and kind not in (AUTO, NONE):
        raise UsageError(
            f"{o.name('draft')} {o.draft}: several sequences that share sweeps have no drafts; leave it out"
        )
    return (NONE, None) if o.most_sequences > 1 else (kind, which)


def _draft(kind: str, which: int | str | None, profile: ModelProfile, folder: Path, dtype: str | None) -> Draft | None:
    """What ``--draft`` names, opened and sized; nothing of it has been read."""
    if kind == NONE:
        return None
    if isinstance(which, int):
        return draft_of_itself(profile, which)
    if which is None:
        return Draft(NGRAM, NGRAM)
    other = draft_folder(which)
    check_tokenizers(folder, other)
    size = profile_of(
        open_model(other), context=None, prompt=None, dtype=COMPUTE_DTYPES[dtype] if dtype is not None else None
    ).size
    return draft_by_model(other, replace(size.at_context(profile.size.context), prompt=PROMPT_STEP))


def _plan_for_several(
    size: ModelSize, o: LoadOptions, alone: bool, budget: int, calibration: Calibration
) -> tuple[ModelSize, Plan]:
    """The size and the plan for sequences that share sweeps."""
    plan_for: Callable[..., Plan] = partial(make_plan, calibration=calibration, **_ring_options(o))

    def planned(size: ModelSize) -> Plan:
        try:
            return plan_for(size, budget=budget)
        except BudgetError as e:
            # Where none was asked for, the budget is what we take of what is free; there may be more.
            if o.asked or e.smallest is None or e.smallest > last_resort():
                raise
            return plan_for(size, budget=e.smallest)

    sequences = o.sequences if isinstance(o.sequences, int) else cast(Workload, o.sequences)
    return plan_for_several(size, sequences, alone, partial(plan_for, budget=budget), planned)


def _undrafted(plan: Plan, kind: str, o: LoadOptions) -> tuple[str, ...]:
    """That a draft which was asked for has nothing to do."""
    if not plan.pools or not on_cpu() or kind in (AUTO, NONE):
        return ()
    return (
        f"nothing is drafted: experts are read one by one, and each drafted token's take as long as a token does "
        f"({o.name('experts')} 0 streams layers whole)",
    )


def _about_kv(profile: ModelProfile, plan: Plan, o: LoadOptions) -> tuple[str, ...]:
    """What a context on disk costs; or that there can be none."""
    if plan.kv_slot:
        each = sum(n for i, n in profile.size.kept_apart if i in plan.streamed)
        return (
            f"keys and values lie on disk ({o.name('kv_disk')}): each token reads {format_size(each * 1000)} for every "
            "1,000 tokens of context",
        )
    if o.kv_disk == "on" and not profile.size.kept_apart:
        return ("keys and values stay in memory: no layer of this model has some that grow and are its own",)
    return ()


def _advice(profile: ModelProfile, o: LoadOptions) -> tuple[str, ...]:
    parameters = dict(tree_flatten(profile.lazy.model.parameters()))
    half = {a.dtype for path, a in parameters.items() if path.endswith("scales")} & {mx.bfloat16, mx.float16}
    if on_cpu() and half and o.dtype is None:
        # Measured with MLX 0.32.4: 8192 x 2048 at 4 bit, 11 against 98 ms.
        return (f"quantized products run about 9 times faster on the CPU with {o.name('dtype')} float32",)
    return ()
