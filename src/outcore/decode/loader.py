"""``load``: loads a model so that it runs within a budget, with mlx-lm's arguments and results."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..calibration.first_use import check_machine
from ..checkpoint.find_model import no_text, require_tokenizer, resolve_model
from ..checkpoint.tokenizer import load_tokenizer
from ..checks import refuse_unknown
from ..engine.binding import Progress
from ..engine.model_profile import Rounding
from ..engine.resident_layers import DroppableDraft
from ..engine.session import Folders, Session, closed_sessions
from ..errors import StoreSpaceError, UnsupportedModelError
from ..machine.allocator import clear_cache
from ..machine.device import on_cpu
from ..modules.mlx_lm_compat import MODEL_TYPES
from ..options import LoadOptions, chosen
from ..plan.joint_plan import AUTO, NGRAM, NONE
from .media import media_reader
from .prefix_cache import prefix_cache
from .preparation import Preparation, prepare
from .speculative.drafting import Drafting
from .speculative.sources import draft_source

__all__ = ["load", "load_model"]


def load(
    path_or_hf_repo: str | os.PathLike[str],
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Loads a model and its tokenizer so that the model runs within a memory budget.

    Args:
        path_or_hf_repo, tokenizer_config, model_config, adapter_path, lazy, return_config, revision, trust_remote_code:
            as in ``mlx_lm.load``.
        progress: called with a description, the bytes done and all bytes.
        options: fields of ``outcore.LoadOptions``, which documents them: memory, resident, context, draft and others.

    Returns:
        ``(model, tokenizer)``, or with ``return_config`` ``(model, tokenizer, config)``. The model works in mlx-lm's
            functions unchanged; ``model.outcore`` holds the plan, the metrics and ``close()``.

    Raises:
        BudgetError: the budget is too small (the error names the smallest that works), or larger than the machine's
            memory.
        CheckpointError: the model folder is incomplete, or mlx-lm does not know the model.
        UsageError: an option is invalid.
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
    require_tokenizer(folder)  # before the weights are read
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
    **arguments: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Loads a model from a local folder so that it runs within a memory budget.

    Args:
        options: load options; or, instead, ``arguments`` with fields of ``LoadOptions``.
        progress: called with a description, the bytes done and all bytes. Default: a bar in a notebook.

    Returns:
        The model and its config. ``model.outcore`` is a ``Session``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError, ReadError: see their docstrings.
    """
    o, report = chosen(options, arguments), progress or notebook_bar()
    if closed_sessions:
        gc.collect()  # the weights of closed models would stay in memory next to this one's
        clear_cache()
    try:
        return _loaded(model_path, o, report)
    except KeyboardInterrupt as e:
        raise e.with_traceback(None) from None
    except StoreSpaceError as error:
        if o.draft != AUTO or o.ranks is not None:
            raise
        # The automatic draft filled the disk. If the model's own files have no room either, this fails again.
        model, config = _loaded(model_path, replace(o, draft=NONE), report)
        model.outcore.note(f"nothing drafts: {error}")
        return model, config


def notebook_bar() -> Progress:
    """Returns a progress bar in a notebook, a widget where ipywidgets is installed; elsewhere it shows nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return lambda *_: None
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # mlx-lm's own dependencies bring it

    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        for other in [name for name in bars if name != what]:
            bars.pop(other).close()
        if what not in bars:
            bars[what] = tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False)
        bars[what].update(done - bars[what].n)
        if done >= total:
            bars.pop(what).close()

    return show


def _loaded(model_path: str | Path, o: LoadOptions, report: Progress) -> tuple[nn.Module, dict[str, Any]]:
    if MODEL_TYPES not in (o.model_config or {}) and (why := no_text(Path(model_path))):
        raise UnsupportedModelError(f"{model_path}: {why}")
    if o.ranks is not None:
        o = o.ranks.options(o)
    prepared = prepare(model_path, o)
    profile, calibration = prepared.profile, prepared.calibration
    reading = Folders(o.io, o.threads or calibration.threads, calibration.chunk, report, o.kv_dir, prepared.mirrors)
    if o.io == "auto" and calibration.io != "auto":
        reading = replace(reading, io=calibration.io)
    check_machine(profile.lazy.checkpoint.files, reading.io, profile.lazy.checkpoint.check)
    if prepared.mirrors is not None:
        prepared.mirrors.compare(partial(check_machine, io=reading.io), report)
    drafting = _drafting(prepared, report)
    with contextlib.ExitStack() as unless:
        if drafting is not None:
            unless.callback(drafting.close)
        prefix, notes = prefix_cache(profile.lazy, o)
        rounding = Rounding(not (on_cpu() or prepared.planning.blocks), o.exact_batch)
        session = Session(
            prepared.plan,
            replace(profile, rounding=rounding),
            calibration,
            reading,
            cpu_streams=prepared.cpu_streams,
            govern=o.govern,
            lazy=o.lazy,
            prefill_step_size=o.prefill_step_size,
            notes=(*prepared.notes, *notes),
            prefix=prefix,
            media=media_reader(profile.lazy.checkpoint.folder, profile.lazy.config, o.ranks),
        )
        try:
            session.residency.layers.adapts = o.draft == AUTO and o.ranks is None and o.most_sequences <= 1
            if drafting is not None and prepared.draft is not None:
                joined = drafting.join(session)
                droppable = DroppableDraft(prepared.draft, profile.size.context, o.kv_disk, joined)
                session.draft_with(joined, droppable if joined.kind != NGRAM else None)
            # Rank 0 may spend minutes writing its draft copy; waiting here suspends the stall timeout.
            session.transport.numbers(list)
        except BaseException:
            session.close()
            raise
        unless.pop_all()
    profile.lazy.model.outcore = session
    return profile.lazy.model, profile.lazy.config


def _drafting(prepared: Preparation, report: Progress) -> Drafting | None:
    """Loads the draft's weights. If its files have to be written first, reports how long that takes: the model is read
    twice, for its own packed weights and for the draft."""
    draft, profile, rates = prepared.draft, prepared.profile, prepared.calibration
    if draft is None or draft.kind == NGRAM:
        return None if draft is None else Drafting(draft.name)
    source = draft_source(draft.kind)
    if first := source.to_write(profile, prepared.plan, draft)[0]:
        rate = min(rates.read_gbps, rates.weight_gbps) * 1e9
        seconds = max(1, round((2 * profile.lazy.checkpoint.nbytes + first) / rate))
        report(f"writing what {draft.name} needs to the cache, once, for about {seconds} s", 0, first)
    return source.load(draft, profile, prepared.opening, report)


def _with_options(function: Any) -> None:
    """Makes ``help`` and editors show each option."""
    own = signature(function).parameters.values()
    named = [p for p in own if p.kind is not Parameter.VAR_KEYWORD]
    known = {p.name for p in named} | {"ranks"}
    asked = signature(LoadOptions).parameters.values()
    function.__signature__ = signature(function).replace(
        parameters=[*named, *(p for p in asked if p.name not in known)]
    )


for _function in (load, load_model):
    _with_options(_function)
