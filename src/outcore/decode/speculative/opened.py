"""A model and what drafts for it, opened and weighed for what was asked for; of neither anything has been read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...checkpoint.lazy_model import LazyModel
from ...checkpoint.manifest import PLANES
from ...checkpoint.nested import can_be_nested, with_nested_layers
from ...checkpoint.packed_store import open_again, open_copy, open_model
from ...engine.model_profile import ModelProfile
from ...engine.whole_profile import check_experts, profile_of
from ...errors import UnsupportedModelError, UsageError
from ...machine.device import COMPUTE_DTYPES
from ...options import LoadOptions
from ...plan.cache_size import STATES
from ...plan.draft_cost import MTP, NGRAM, NONE, Draft
from ...plan.machine_profile import Calibration
from ...plan.model_size import LOGITS_SHARE, ModelSize
from .draft_model import PROMPT_STEP
from .drafting import check_tokenizers, draft_by_model, draft_folder, draft_of_itself, head_drafts


def measured(lazy: LazyModel, o: LoadOptions, calibration: Calibration | None) -> ModelProfile:
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
        size = _in_batches(size, o.batch, o.context or size.context)
    if o.reserved is not None and o.reserved < size.context:
        # The prompt, if it is known, is there from the first sweep on.
        size = size.at_context(max(o.reserved, min(o.prompt or 0, size.context)))
    if o.sequences == 1 and o.batch is None and size.kept_apart:
        size = replace(size, kv_disk=o.kv_disk)
    return replace(profile, size=size)


def _in_batches(size: ModelSize, sequences: int, length: int) -> ModelSize:
    """The model with memory for calls of so many sequences of ``length`` tokens, without caches and with the logits of
    every token, as mlx-lm's perplexity makes them."""
    tokens = sequences * length
    whole = replace(size, prompt=tokens, logits=tokens * size.logits // LOGITS_SHARE)
    more = whole.activations(tokens) - size.activations(min(length, size.prompt))
    return replace(size, batches=more + (sequences - 1) * STATES * size.state)


def nested(profile: ModelProfile, high: int, folder: Path, o: LoadOptions, known: Calibration | None) -> ModelProfile:
    """The model with layers of which only low bits are read, where so many high bits of its own codes draft for it: not
    where experts can be read one by one, not where a layer's codes are looked at from outside, and not in float16. A
    copy in the cache that has these bits apart is taken (mirrors and ranks have the folder that was named)."""
    # Among float16's smallest numbers a draft's scales are rounded at other places than the model's.
    if o.dtype == "float16":
        return profile
    size = profile.size
    streamable = [each.streamable for each in size.layers]
    if not any(streamable) or any(each.experts is not None for each in size.layers) or profile.evaluates:
        return profile
    if not can_be_nested(profile.lazy, high):  # without opening it once more
        return profile
    apart = (
        None if o.mirrors or o.ranks is not None else open_copy(folder, f"{PLANES}:{high}", **profile.lazy.arguments)
    )
    lazy = with_nested_layers(apart or open_again(profile.lazy), high)
    if lazy is None:
        return profile
    try:
        found = measured(lazy, o, known)
    except UnsupportedModelError:  # an adapter's module (DoRA) looks at the weights of the one that it wraps
        return profile
    if [each.streamable for each in found.size.layers] != streamable:
        return profile
    layers = tuple(replace(n, kind=p.kind) for n, p in zip(found.size.layers, size.layers, strict=True))
    return replace(found, size=replace(found.size, layers=layers))


def draft_named(
    kind: str, which: int | str | None, profile: ModelProfile, folder: Path, dtype: str | None
) -> Draft | None:
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


def with_draft(
    profile: ModelProfile, kind: str, which: int | str | None, folder: Path, o: LoadOptions, known: Calibration | None
) -> tuple[ModelProfile, Draft | None]:
    """The model, and what is to draft for it.

    Raises:
        UsageError: a copy of the model would draft, and keys and values have to lie on disk; or the model has no
            multi-token-prediction head.
    """
    if isinstance(which, int):
        profile = nested(profile, which, folder, o, known)
    if kind == MTP:
        return profile, _head(which, profile, o)
    draft = draft_named(kind, which, profile, folder, o.dtype)
    if draft is not None and draft.bits is not None and profile.size.kv_disk != "off":
        if o.kv_disk == "on":
            raise UsageError(
                f"{o.name('kv_disk')} on and {o.name('draft')} {o.draft}: a copy of the model reads all keys and "
                f"values for every token that it drafts; with {o.name('draft')} ngram it need not"
            )
        profile = replace(profile, size=replace(profile.size, kv_disk="off"))
    return profile, draft


def _head(which: int | str | None, profile: ModelProfile, o: LoadOptions) -> Draft:
    """The model's multi-token-prediction head, opened and sized; nothing of it has been read."""
    asked, folder = f"{o.name('draft')} {o.draft}", profile.lazy.checkpoint.folder
    if o.head_resident is False and profile.size.head is not None:
        raise UsageError(f"{asked}: drafts with the model's head, which has to stay in memory; let it, or draft ngram")
    source = None
    if isinstance(which, str):
        # Of the original its one file with the head is enough.
        source = Path(which) if Path(which).is_dir() else draft_folder(which)
    if (heads := head_drafts()) is None:
        raise UsageError(f"{asked}: needs the package outcore_mtp, which is not there; install outcore whole")
    draft = heads.draft_by_head(profile, source)
    if draft is not None:
        return draft
    if source is not None:
        raise UsageError(f"{asked}: no multi-token-prediction head for this model there; give the model it was made of")
    raise UsageError(
        f"{asked}: {folder} has no multi-token-prediction head; conversions to MLX leave them out. Give the original "
        f"model's folder, or the one file of it that holds the head: {MTP}:FOLDER; or draft with ngram or self"
    )
