"""``load``: from a model's name and a budget to a model that runs within it, as mlx-lm's ``load`` to those that fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..calibration.calibration_file import load_calibration
from ..disk.reader import IO_MODES
from ..errors import BudgetError, UsageError
from ..generation.speculative.draft_model import STEP as DRAFT_STEP
from ..generation.speculative.drafting import (
    AUTO,
    NGRAM,
    NONE,
    Draft,
    Drafting,
    check_tokenizers,
    draft_by_model,
    draft_folder,
    draft_of_itself,
    parse_draft,
)
from ..generation.speculative.self_draft import load_self_draft, make_self_draft
from ..model.call_values import mergeable
from ..model.checkpoint import resolve_model
from ..model.packed_store import open_model
from ..model.split_linear import cores
from ..model.tokenizer import load_tokenizer
from ..options import choice, whole
from ..planning.joint_plan import Planning
from ..planning.machine_profile import Calibration
from ..planning.plan import ModelSize, Plan
from ..planning.planner import (
    ASSUMED,
    PLACEMENTS,
    make_plan,
    resident_budget,
)
from ..planning.workload import Workload, plan_for_several
from ..runtime.install import (
    Progress,
    Reading,
    install,
    on_cpu,
)
from ..runtime.kernels import compile_kernels, keep_kernels
from ..runtime.session import Session
from ..streaming.model_profile import Survey, survey
from ..streaming.unsupported import check_experts
from ..system.memory import AUTO as AUTO_BUDGET
from ..system.memory import PROFILES, asked_budget, last_resort
from .first_use import check_machine

__all__ = ["COMPUTE_DTYPES", "PRIORITIES", "Preparation", "Progress", "Session", "load", "load_model", "prepare"]

COMPUTE_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

PRIORITIES = {"speed": 512, "balanced": 1024, "context": None}
"""Tokens of context that memory is reserved for at first; None: as many as are expected. More is made room for as it
comes, by streaming layers that were resident."""

PUBLISHED_PRIORITIES = {"maxTPS": "speed", "maxContext": "context"}
"""Other names for them, from the literature."""


@dataclass(frozen=True)
class Preparation:
    """A model opened and planned for, of which nothing has been read: what ``outcore info`` shows.

    Attributes:
        planning: makes plans within other budgets. For one sequence.
        opened: the folder, and the arguments that the model was opened with.
        refused: why the budget that was asked for does not do, where the plan is for the smallest that does.
    """

    survey: Survey
    plan: Plan
    cpu_streams: int
    notes: tuple[str, ...]
    calibration: Calibration
    draft: Draft | None
    planning: Planning
    opened: Mapping[str, Any]
    refused: str | None = None


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load a model and its tokenizer so that the model runs within a memory budget.

    Args:
        path_or_hf_repo, tokenizer_config, model_config, adapter_path, return_config, revision, trust_remote_code:
            as in ``mlx_lm.load``.
        options: as in ``load_model``: memory, resident, slots, io, context, prefill_step_size, dtype, cpu_streams,
            priority, profile, placement, head_resident, sequences, batch, threads, govern, resumable, draft, progress.

    Returns:
        ``(model, tokenizer)``, or with ``return_config`` ``(model, tokenizer, config)``. The model works in mlx-lm's
        functions unchanged; ``model.outcore`` holds the plan, the metrics and ``close()``.

    Raises:
        BudgetError: the budget is too small (says the smallest that works) or larger than the machine.
        CheckpointError: the model folder is not whole, or mlx-lm does not know the model.
    """
    if unknown := sorted(options.keys() - set(load_model.__kwdefaults__ or ())):
        raise TypeError(f"load() got an unexpected argument: {', '.join(unknown)}")
    folder = resolve_model(path_or_hf_repo, revision)
    model, config = load_model(
        folder,
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
        **options,
    )
    try:
        extra = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
        tokenizer = load_tokenizer(folder, extra, eos=config.get("eos_token_id"))
    except BaseException:
        model.outcore.close()
        raise
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_model(
    model_path: str | Path,
    *,
    memory: float | str | None = None,
    resident: int | None = None,
    slots: int | None = None,
    priority: str = "context",
    profile: str = "balanced",
    placement: str = "even",
    io: str = "auto",
    context: int | None = None,
    prompt: int | None = None,
    prefill_step_size: int | None = None,
    dtype: str | None = None,
    cpu_streams: int | None = None,
    head_resident: bool | None = None,
    sequences: int | Workload = 1,
    batch: int | None = None,
    threads: int | None = None,
    govern: bool = True,
    resumable: bool = False,
    draft: str = "auto",
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model from a local folder so that it runs within a memory budget.

    Args:
        memory: bytes, a size such as ``"4GB"``, or ``"50%"`` of what may be used now, that weights, slots, caches,
            activations and MLX's own cache may use together. None or ``"auto"``: from what is free.
        resident: keep exactly so many layers in memory; None: as many as fit.
        slots: slots of the ring, at least 2; None: 3 where they fit.
        priority: ``speed``, ``balanced`` or ``context``: reserve memory for 512, 1024, or all of the tokens of
            ``context``; room for more is made while running.
        profile: ``safety``, ``balanced`` or ``performance``: how much of what is free is used without ``memory``.
        placement: where resident layers lie: ``even``, ``interleaved``, ``first`` or ``last``.
        io: ``auto``, ``direct`` (around the page cache) or ``cached``.
        context: tokens of prompt and answer that memory is reserved for; None: 2048, or the model's own maximum.
        prompt: tokens of the longest prompt, if known: less memory is set aside for computing it.
        prefill_step_size: prompt tokens computed at a time; None: 2048 as in mlx-lm, or less where memory is short.
        dtype: ``float32``, ``bfloat16`` or ``float16`` to compute in; None: as the checkpoint says.
        cpu_streams: streams that linear layers are split over on the CPU device; None: one per core.
        head_resident: whether the head stays in memory; None: it is streamed only where nothing else would fit.
        sequences: that share each sweep (``batch_generate``), each with that context, without drafts; a ``Workload``:
            as many as answer it soonest.
        batch: sequences of ``context`` tokens that are evaluated in one call, without caches and with the logits of
            every token (mlx-lm's ``eval_ppl``); None: memory for such calls is not set aside.
        threads: reads in flight at once; None: 4, or 8 where there are as many cores.
        govern: watch memory while the model runs, and stream resident layers where it gets short.
        resumable: one prompt cache will serve several texts: set memory aside for taking it back where a sweep fails.
            Otherwise that is found when such a cache is used, in place of resident layers.
        draft: what drafts tokens, so that a sweep over the weights makes several: ``auto`` (``ngram`` where something
            is streamed), ``none``, ``ngram`` (the text's own repetitions), ``self`` or ``self:BITS`` (a low-bit copy of
            the model, in memory), or a model with the same tokenizer, in memory.
        progress: called with what is being done, bytes done and bytes in all.

    Returns:
        The model and its config. ``model.outcore`` is a ``Session``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError, ReadError: see their docstrings.
    """
    threads = None if threads is None else whole("--threads", threads)
    prepared = prepare(
        model_path,
        memory=memory,
        resident=resident,
        slots=slots,
        io=io,
        context=context,
        priority=priority,
        profile=profile,
        placement=placement,
        prompt=prompt,
        prefill_step_size=prefill_step_size,
        dtype=dtype,
        cpu_streams=cpu_streams,
        head_resident=head_resident,
        sequences=sequences,
        resumable=resumable,
        batch=batch,
        draft=draft,
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
    )
    model = prepared.survey.lazy.model
    calibration = prepared.calibration
    reading = Reading(io, threads or calibration.threads, calibration.chunk)
    if io == "auto" and calibration.io != "auto":
        reading = replace(reading, io=calibration.io)
    found, plan = prepared.survey, prepared.plan
    report = progress or (lambda *_: None)
    keep_kernels()
    check_machine(found.lazy.checkpoint.files, reading.io, found.lazy.checkpoint.check)
    drafts = _other_model(prepared.draft, dtype, cpu_streams, report)
    copy = prepared.draft.copy if prepared.draft is not None else None
    chunk, bits = min(plan.prefill_step, found.size.prompt), None if copy is None else copy.bits
    compiling = compile_kernels(found, prepared.opened, plan.budget_bytes, chunk, bits)
    with contextlib.closing(compiling) if compiling is not None else contextlib.nullcontext():
        session = install(found, plan, calibration, reading, prepared.cpu_streams, report, govern)
        if compiling is not None:
            try:
                compiling.wait(report)
            except BaseException:
                session.close()
                raise
    session.notes = prepared.notes
    session.drafting = drafts
    if prepared.draft is not None and prepared.draft.copy is not None:
        try:
            session.drafting = _own_copy(prepared, prepared.draft, session.plan.head_streamed, report)
        except BaseException:
            session.close()
            raise
    session.prefill_step_size = prefill_step_size
    model.outcore = session
    return model, prepared.survey.lazy.config


def prepare(
    model_path: str | Path,
    *,
    memory: float | str | None = None,
    resident: int | None = None,
    slots: int | None = None,
    priority: str = "context",
    profile: str = "balanced",
    placement: str = "even",
    io: str = "auto",
    context: int | None = None,
    prompt: int | None = None,
    prefill_step_size: int | None = None,
    dtype: str | None = None,
    cpu_streams: int | None = None,
    head_resident: bool | None = None,
    sequences: int | Workload = 1,
    resumable: bool = False,
    batch: int | None = None,
    draft: str = NONE,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
    least: bool = False,
) -> Preparation:
    """Open a model and plan for it without reading any weights. Arguments and errors as in ``load_model``.

    Args:
        least: plan for the smallest budget that works where the one that was asked for is too small, however large that
            is; for one sequence. ``refused`` says so then.
    """
    if dtype is not None:
        choice("--dtype", dtype, COMPUTE_DTYPES)
    resident, slots, cpu_streams, context, prompt, prefill_step_size = (
        None if number is None else whole(flag, number, least)
        for flag, number, least in (
            ("--resident", resident, 0), ("--slots", slots, 2), ("--cpu-streams", cpu_streams, 1),
            ("--context", context, 1), ("--prompt-tokens", prompt, 1), ("--prefill-step-size", prefill_step_size, 1),
        )
    )  # fmt: skip
    if not isinstance(sequences, Workload):
        sequences = whole("sequences", sequences)
    choice("--io", io, IO_MODES)
    choice("--profile", profile, PROFILES)
    choice("--placement", placement, PLACEMENTS)
    reserved = reserved_tokens(priority)
    budget, asked = asked_budget(memory, profile), memory is not None and memory != AUTO_BUDGET
    lazy = open_model(
        Path(model_path),
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
    )
    compute = COMPUTE_DTYPES[dtype] if dtype is not None else None
    streams = (cpu_streams or cores()) if on_cpu() else 1
    calibration, _ = load_calibration(Path(model_path), streams)
    # A disk that calibration read faster through the page cache is read so, and units need not keep to its blocks.
    how = calibration.io if calibration is not None and io == "auto" else io
    most = sequences if isinstance(sequences, int) else sequences.most
    kind, which = _kind(draft, most)
    direct = how != "cached"
    check_experts(lazy, compute)
    found = survey(lazy, context=context, prompt=prompt, dtype=compute, direct=direct, together=most > 1)
    if resumable:
        found = replace(found, size=replace(found.size, kept=found.size.states))
    if batch is not None:
        found = replace(found, size=found.size.in_batches(batch, context or found.size.context))
    if reserved is not None and reserved < found.size.context:
        # The prompt, if it is known, is there from the first sweep on.
        found = replace(found, size=found.size.at_context(max(reserved, min(prompt or 0, found.size.context))))
    options: dict[str, Any] = {
        "slots": slots,
        "resident": resident,
        "prefill_step": prefill_step_size,
        "head_resident": head_resident,
        "placement": placement,
    }
    measured = calibration or ASSUMED
    drafts = _draft(kind, which, found, Path(model_path), dtype)
    planning = Planning(found.size, kind, drafts, options)
    alone = most > 1 and (found.evaluates or not mergeable(lazy.model))
    refused = None
    if most > 1:
        size, plan = _plan_for_several(found.size, sequences, alone, budget, not asked, options, measured)
    else:
        # A caution of ours is no reason to refuse what there is room for.
        room = budget if asked else max(budget, last_resort())
        allowed = max(budget, planning.smallest) if least or planning.smallest <= room else budget
        planned = planning.at(allowed, measured)
        plan, size, drafts = planned.plan, planned.size, planned.draft
        refused = planning.refusal(budget) if planning.smallest > room else None
    found = replace(found, size=size)
    notes = found.notes + _advice(found, compute)
    if alone:
        notes += ("sequences run one after the other: this model's caches cannot be merged",)
    opened = {
        "folder": str(model_path),
        "dtype": dtype,
        "model_config": model_config,
        "trust_remote_code": trust_remote_code,
        "adapter_path": None if adapter_path is None else str(adapter_path),
    }
    return Preparation(found, plan, streams, notes, measured, drafts, planning, opened, refused)


def reserved_tokens(priority: str) -> int | None:
    """Tokens of context that a priority reserves memory for at first; None: all.

    Raises:
        UsageError: there is no such priority.
    """
    name = PUBLISHED_PRIORITIES.get(priority, priority) if isinstance(priority, str) else priority
    return PRIORITIES[choice("--priority", name, PRIORITIES)]


def _kind(draft: str, sequences: int) -> tuple[str, int | str | None]:
    """What ``--draft`` asks for, which is nothing where several sequences share sweeps."""
    kind, which = parse_draft(draft)
    if sequences > 1 and kind not in (AUTO, NONE):
        raise UsageError(f"--draft {draft}: several sequences that share sweeps have no drafts; leave it out")
    return (NONE, None) if sequences > 1 else (kind, which)


def _draft(kind: str, which: int | str | None, found: Survey, folder: Path, dtype: str | None) -> Draft | None:
    """What ``--draft`` names, opened and sized; nothing of it has been read."""
    if kind == NONE:
        return None
    if isinstance(which, int):
        return draft_of_itself(found, which)
    if which is None:
        return Draft(NGRAM, NGRAM)
    other = draft_folder(which)
    check_tokenizers(folder, other)
    size = survey(
        open_model(other), context=None, prompt=None, dtype=COMPUTE_DTYPES[dtype] if dtype is not None else None
    ).size
    return draft_by_model(other, replace(size.at_context(found.size.context), prompt=DRAFT_STEP))


def _plan_for_several(
    size: ModelSize,
    sequences: int | Workload,
    alone: bool,
    budget: int,
    cautious: bool,
    options: dict[str, Any],
    calibration: Calibration,
) -> tuple[ModelSize, Plan]:
    """The size and the plan for sequences that share sweeps.

    Args:
        cautious: the budget is what we take of what is free; there may be more.
    """
    plan_for: Callable[..., Plan] = partial(make_plan, calibration=calibration, **options)

    def planned(size: ModelSize) -> Plan:
        try:
            return plan_for(size, budget=budget)
        except BudgetError as e:
            if not cautious or e.smallest is None or e.smallest > last_resort():
                raise
            return plan_for(size, budget=e.smallest)

    return plan_for_several(size, sequences, alone, partial(plan_for, budget=budget), planned)


def _other_model(
    draft: Draft | None, dtype: str | None, cpu_streams: int | None, progress: Progress
) -> Drafting | None:
    """What drafts, but for a copy of the model itself: another model is loaded, all of it."""
    if draft is None or draft.copy is not None:
        return None
    if draft.folder is None:
        return Drafting(draft.kind, draft.name)
    prepared = prepare(draft.folder, memory=None, dtype=dtype, cpu_streams=cpu_streams)
    model, _ = load_model(
        draft.folder,
        memory=resident_budget(prepared.survey.size),
        dtype=dtype,
        cpu_streams=cpu_streams,
        govern=False,
        draft=NONE,
        progress=progress,
    )
    return Drafting(draft.kind, draft.name, model)


def _own_copy(prepared: Preparation, draft: Draft, head_streamed: bool, progress: Progress) -> Drafting:
    """A low-bit copy of the model, made if it is not there yet, in memory."""
    assert draft.copy is not None
    make_self_draft(prepared.survey, draft.copy, progress)
    copy = load_self_draft(prepared.survey, draft.copy, head_streamed, prepared.cpu_streams)
    return Drafting(draft.kind, draft.name, copy)


def _advice(found: Survey, compute: mx.Dtype | None) -> tuple[str, ...]:
    parameters = dict(tree_flatten(found.lazy.model.parameters()))
    half = {a.dtype for path, a in parameters.items() if path.endswith("scales")} & {mx.bfloat16, mx.float16}
    if on_cpu() and half and compute is None:
        # Measured with MLX 0.32.4: 8192 x 2048 at 4 bit, 11 against 98 ms.
        return ("quantized products run about 9 times faster on the CPU with --dtype float32",)
    return ()
