"""Finds a model's sizes for given load options, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.lazy_model import LazyModel
from ..engine.extensions import kv_disk
from ..engine.model_profile import ModelProfile
from ..engine.whole_profile import check_experts, profile_of
from ..errors import called
from ..machine.device import COMPUTE_DTYPES
from ..options import LoadOptions
from ..packages import modules
from ..plan.cache_size import STATES
from ..plan.machine_profile import Calibration
from ..plan.model_size import LOGITS_SHARE, ModelSize
from ..sizes import held_bytes


def options_for(folder: Path, o: LoadOptions) -> LoadOptions:
    """Returns the options as packages of the group ``model_types`` change them for this model (``load_options``)."""
    for package in modules("model_types").values():
        o = getattr(package, "load_options", lambda _, given: given)(folder, o)
    return o


@dataclass(frozen=True)
class Opening:
    """A model's folder as it was named, the load options, and the machine's calibration, if any."""

    folder: Path
    options: LoadOptions
    known: Calibration | None

    def measured(self, lazy: LazyModel) -> ModelProfile:
        """Returns the model's profile, with sizes for the context and the use that the options name."""
        o, known = self.options, self.known
        compute = COMPUTE_DTYPES[o.dtype] if o.dtype is not None else None
        # Units need not be aligned to disk blocks where the calibrated disk is read through the page cache.
        direct = (known.io if known is not None and o.io == "auto" else o.io) != "cached"
        check_experts(lazy, compute)
        profile = profile_of(
            lazy, context=o.context, prompt=o.prompt, dtype=compute, direct=direct, together=o.most_sequences > 1
        )
        size = profile.size
        if o.resumable:
            size = replace(size, kept=size.states + held_bytes([g for g in size.growing if g[1]], size.context))
        if o.batch is not None:
            size = _in_batches(size, o.batch, o.context or size.context)
        if o.reserved is not None and o.reserved < size.context:
            # Reserve room for a prompt of known length before the first pass.
            size = size.at_context(max(o.reserved, min(o.prompt or 0, size.context)))
        if o.sequences == 1 and o.batch is None and size.kept_apart:
            size = replace(size, kv_disk=kv_disk(o.kv_disk, called("kv_disk")))
        resized = getattr(lazy.model, "outcore_sized", None)  # a package's model that passes otherwise than a text
        return replace(profile, size=size if resized is None else resized(size, o))


def _in_batches(size: ModelSize, sequences: int, length: int) -> ModelSize:
    """Returns the size with room for calls over ``sequences`` sequences of ``length`` tokens, without caches and with
    the logits of every token, as mlx-lm's perplexity makes them."""
    tokens = sequences * length
    whole = replace(size, prompt=tokens, logits=tokens * size.logits // LOGITS_SHARE)
    more = whole.activations(tokens) - size.activations(min(length, size.prompt))
    return replace(size, batches=more + (sequences - 1) * STATES * size.state)
