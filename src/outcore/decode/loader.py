"""``load``: from a model's name and a budget to a model that runs within it, as mlx-lm's ``load`` to those that fit."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Unpack, cast

import mlx.nn as nn

from ..calibration.first_use import check_machine
from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.find_model import resolve_model
from ..checkpoint.nested import nested_modules, share_high_bits
from ..checkpoint.packed_store import open_packed
from ..checkpoint.tokenizer import load_tokenizer
from ..checks import refuse_unknown
from ..engine.binding import Progress
from ..engine.droppable_draft import DroppableDraft, file_stamps
from ..engine.session import Folders, Session
from ..errors import StoreSpaceError
from ..machine.kernels import keep_kernels
from ..options import LoadArguments, LoadOptions, MemoryArguments, chosen, named_as_arguments
from ..plan.draft_choice import SeenDrafts, chance_of, expected
from ..plan.draft_cost import AUTO, MTP, NGRAM, NONE, Draft
from ..plan.joint_plan import Planned
from ..plan.planner import resident_budget
from .prefix_cache import NO_BLOCKS, prefix_cache
from .preparation import Preparation, prepare
from .speculative.acceptance import AcceptanceStats
from .speculative.choices import to_write
from .speculative.drafting import Drafting, HeadDrafts, head_drafts
from .speculative.self_draft import load_self_draft, make_self_draft, self_draft

__all__ = ["load", "load_model"]


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    progress: Progress | None = None,
    **options: Unpack[MemoryArguments],
) -> Any:
    """Load a model and its tokenizer so that the model runs within a memory budget.

    Args:
        path_or_hf_repo, tokenizer_config, model_config, adapter_path, lazy, return_config, revision, trust_remote_code:
            as in ``mlx_lm.load``.
        progress: called with what is being done, bytes done and bytes in all.
        options: fields of ``outcore.LoadOptions``, which tells of them: memory, resident, context, draft and others.

    Returns:
        ``(model, tokenizer)``, or with ``return_config`` ``(model, tokenizer, config)``. The model works in mlx-lm's
        functions unchanged; ``model.outcore`` holds the plan, the metrics and ``close()``.

    Raises:
        BudgetError: the budget is too small (says the smallest that works) or larger than the machine.
        CheckpointError: the model folder is not whole, or mlx-lm does not know the model.
        UsageError: an option cannot be meant.
    """
    refuse_unknown(options, signature(load).parameters)
    asked = LoadOptions(
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        trust_remote_code=trust_remote_code,
        **options,
    )
    folder = resolve_model(path_or_hf_repo, revision)
    model, tokenizer, config = load_with_tokenizer(folder, asked, tokenizer_config, progress)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_with_tokenizer(
    folder: Path,
    options: LoadOptions,
    tokenizer_config: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its tokenizer and its config, from a local folder; as ``load``."""
    model, config = load_model(folder, options, progress=progress)
    try:
        extra = {"trust_remote_code": options.trust_remote_code, **(tokenizer_config or {})}
        tokenizer = load_tokenizer(folder, extra, eos=config.get("eos_token_id"))
    except BaseException:
        model.outcore.close()
        raise
    return model, tokenizer, config


def load_model(
    model_path: str | Path,
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    **arguments: Unpack[LoadArguments],
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model from a local folder so that it runs within a memory budget.

    Args:
        options: or ``arguments``, its fields.
        progress: called with what is being done, bytes done and bytes in all.

    Returns:
        The model and its config. ``model.outcore`` is a ``Session``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError, ReadError: see their docstrings.
    """
    o = chosen(options, arguments)
    with named_as_arguments(o):
        return _load_model(model_path, o, progress or (lambda *_: None))


def _load_model(model_path: str | Path, o: LoadOptions, report: Progress) -> tuple[nn.Module, dict[str, Any]]:
    try:
        return _loaded(model_path, o, report)
    except StoreSpaceError as error:
        if o.draft != AUTO or o.ranks is not None:
            raise
        # Nobody asked for what filled the disk. Without room for what the model itself needs it fails again.
        model, config = _loaded(model_path, replace(o, draft=NONE), report)
        model.outcore.note(f"nothing drafts: {error}")
        return model, config


def _loaded(model_path: str | Path, o: LoadOptions, report: Progress) -> tuple[nn.Module, dict[str, Any]]:
    if o.ranks is not None:
        o = o.ranks.options(o)
    prepared = prepare(model_path, o)
    profile, calibration = prepared.profile, prepared.calibration
    reading = Folders(o.io, o.threads or calibration.threads, calibration.chunk, report, o.kv_dir, prepared.mirrors)
    if o.io == "auto" and calibration.io != "auto":
        reading = replace(reading, io=calibration.io)
    _tell_first(prepared, report)
    keep_kernels()
    check_machine(profile.lazy.checkpoint.files, reading.io, profile.lazy.checkpoint.check)
    if prepared.mirrors is not None:
        prepared.mirrors.compare(partial(check_machine, io=reading.io), report)
    head = _head(prepared)
    drafting = None if head is not None else _other_model(prepared.draft, o, report)
    with contextlib.ExitStack() as unless:
        if drafting is not None and drafting.model is not None:
            unless.callback(drafting.model.outcore.close)
        prefix = prefix_cache(profile.lazy, o)
        notes = prepared.notes
        if prefix is None and o.prefix_cache != "off":
            notes += (NO_BLOCKS.format(name=o.name("prefix_cache"), step=o.prefill_step_size),)
        session = Session(
            prepared.plan,
            profile,
            calibration,
            reading,
            cpu_streams=prepared.cpu_streams,
            govern=o.govern,
            lazy=o.lazy,
            prefill_step_size=o.prefill_step_size,
            notes=notes,
            prefix=prefix,
            experience=_expectations(prepared),
            random_after=profile.lazy.random_after,
        )
        try:
            high_bits = None
            if prepared.draft is not None and prepared.draft.bits is not None:
                drafting, high_bits = _own_copy(prepared, prepared.draft, session, o, report)
            if head is not None:
                drafting = _by_head(session, profile.lazy.model, head)
            session.draft_with(drafting, _droppable(session, drafting, prepared, o.kv_disk, high_bits))
            # The first rank may write for long what drafts, which is no fault of its: nothing is due meanwhile.
            session.transport.numbers(list)
        except BaseException:
            session.close()
            raise
        unless.pop_all()
    profile.lazy.model.outcore = session
    return profile.lazy.model, profile.lazy.config


def _expectations(prepared: Preparation) -> AcceptanceStats | None:
    """What the first text's drafts begin with: what is expected of what drafts."""
    draft, profile, choice = prepared.draft, prepared.profile, prepared.choice
    if draft is None or draft.kind == NGRAM or not prepared.plan.streams:
        return None
    if choice is None and profile.share is None:
        planned = Planned(prepared.plan, profile.size, draft)
        choice = expected(planned, prepared.calibration, draft.name, prepared.planning.blocks)
    found = AcceptanceStats()
    if choice is not None and choice.planned is not None:
        found.expect(draft.kind, chance_of(draft, SeenDrafts()), choice.drafted)
    return found


def _tell_first(prepared: Preparation, report: Progress) -> None:
    """Say what is written before the first answer, once, and how long that may take: it is read twice, for what is
    streamed and what drafts, and cut."""
    draft, checkpoint, rates = prepared.draft, prepared.profile.lazy.checkpoint, prepared.calibration
    if draft is None or draft.bits is None or not (first := to_write(prepared.profile, prepared.plan, draft.bits)):
        return
    rate = min(rates.read_gbps, rates.weight_gbps) * 1e9
    seconds = max(1, round((2 * checkpoint.nbytes + first) / rate))
    report(f"writing what {draft.name} needs to the cache, once, for about {seconds} s", 0, first)


def _with_options(function: Any) -> None:
    """Have ``help`` and editors that ask at run time show each option."""
    own = signature(function).parameters.values()
    named = [p for p in own if p.kind is not Parameter.VAR_KEYWORD]
    known = {p.name for p in named} | {"flags", "ranks"}
    asked = signature(LoadOptions).parameters.values()
    function.__signature__ = signature(function).replace(
        parameters=[*named, *(p for p in asked if p.name not in known)]
    )


for _function in (load, load_model):
    _with_options(_function)


def _other_model(draft: Draft | None, o: LoadOptions, progress: Progress) -> Drafting | None:
    """What drafts, but for a copy of the model itself: another model is loaded, all of it."""
    if draft is None or draft.bits is not None:
        return None
    if draft.folder is None:
        return Drafting(draft.kind, draft.name)
    its = LoadOptions(dtype=o.dtype, cpu_streams=o.cpu_streams, draft=NONE, govern=False, flags=o.flags)
    size = prepare(draft.folder, its).profile.size
    model, _ = load_model(draft.folder, replace(its, memory=resident_budget(size)), progress=progress)
    return Drafting(draft.kind, draft.name, model)


def _own_copy(
    prepared: Preparation, draft: Draft, session: Session, o: LoadOptions, progress: Progress
) -> tuple[Drafting, dict[str, TensorInfo] | None]:
    """A low-bit copy of the model, made if it is not there yet, in memory; and where the high bits of its layers lie,
    if the model shares them."""
    assert draft.bits is not None
    copy = self_draft(prepared.profile, draft.bits)
    try:
        make_self_draft(prepared.profile, copy, progress)
    except StoreSpaceError as error:
        if o.draft != AUTO or session.transport.alone:
            raise
        # Other ranks have planned already, so all goes on without what nobody asked for.
        session.note(f"nothing drafts but the text's own repetitions: {error}")
        return Drafting(NGRAM, NGRAM), None
    model = load_self_draft(prepared.profile, copy, session.plan.head_streamed, prepared.cpu_streams)
    session.transport.fill(model)
    share_high_bits(prepared.profile.lazy.model, model)
    if not prepared.profile.lazy.high:
        return Drafting(draft.kind, draft.name, model), None
    # Of layers that are not cut the copy has tensors of its own, which are named as the model's are.
    cut = {path for path, _ in nested_modules(prepared.profile.lazy.model)}
    tensors = {**open_packed(copy.folder).tensors, **copy.elsewhere}
    shared = {path: tensor for path, tensor in tensors.items() if path.rpartition(".")[0] in cut}
    return Drafting(draft.kind, draft.name, model), shared


def _head(prepared: Preparation) -> nn.Module | None:
    """The model's multi-token-prediction head, in memory, if that is what drafts: read first, while nothing else is."""
    draft, profile = prepared.draft, prepared.profile
    if draft is None or draft.kind != MTP:
        return None
    return cast(HeadDrafts, head_drafts()).load_head(profile, draft.folder, prepared.cpu_streams)


def _by_head(session: Session, model: nn.Module, head: nn.Module) -> Drafting:
    if session.plan.head_streamed:
        session.note("the model's head is not in memory, so nothing drafts with it but the text's own repetitions")
        return Drafting(NGRAM, NGRAM)
    return Drafting(MTP, MTP, head, cast(HeadDrafts, head_drafts()).shared_with(model))


def _droppable(
    session: Session,
    drafting: Drafting | None,
    prepared: Preparation,
    kv_disk: str,
    high_bits: dict[str, TensorInfo] | None,
) -> DroppableDraft | None:
    """How what drafts is given up where memory is short, if it is in memory."""
    draft = prepared.draft
    if draft is None or drafting is None or drafting.model is None:
        return None
    of = weakref.ref(session)

    def end() -> None:
        own = getattr(drafting.model, "outcore", None)
        drafting.give_up()
        if (session := of()) is not None:
            session.transport.fill(None)
        if own is not None:
            own.close()
        if (session := of()) is not None:
            session.draft_with(Drafting(NGRAM, NGRAM))

    found = high_bits or {}
    return DroppableDraft(draft, prepared.profile.size.context, kv_disk, end, found, file_stamps(found))
