"""The heads as the core asks for them (``outcore.decode.speculative.drafting.HeadDrafts``)."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outcore.engine.model_profile import ModelProfile
from outcore.machine.allocator import clear_cache
from outcore.machine.device import on_cpu
from outcore.modules.split_linear import split_rows
from outcore.plan.draft_cost import MTP, Draft
from outcore.sizes import held_bytes

from .head import SharedParts, has_mtp, head_bytes, kv_bytes, open_mtp
from .hidden_states import WINDOW, HiddenStates
from .source import MtpSource

has_head, shared_with, proposer = has_mtp, SharedParts, MtpSource


def draft_by_head(profile: ModelProfile, source: Path | None = None) -> Draft | None:
    """The model's multi-token-prediction head; None where it has none.

    Args:
        source: the folder that has its tensors; None: the model's own.

    Raises:
        UnsupportedModelError, CheckpointError, MissingFileError, HeaderError: as ``open_mtp``.
    """
    head = open_mtp(profile.lazy, source, profile.cast.target)
    if head is None:
        return None
    weight = head.norm.weight
    each = kv_bytes(head, weight.size, weight.dtype)
    return Draft(
        MTP,
        MTP,
        folder=source,
        weights=head_bytes(head),
        cache=WINDOW * weight.nbytes + held_bytes([(each, None)], profile.size.context),
        growing=((each, None),),
        uses_head=True,
    )


def hidden(shared: SharedParts) -> HiddenStates:
    """What keeps a text's last hidden states for the head."""
    return HiddenStates(shared.tap)


def load_head(profile: ModelProfile, source: Path | None, cpu_streams: int) -> nn.Module:
    """The model's head, in memory; read array by array: what quantizing takes beside it is one of them."""
    head = open_mtp(profile.lazy, source, profile.cast.target)
    assert head is not None
    for _, array in tree_flatten(head.parameters()):
        mx.eval(array)
    clear_cache()
    if on_cpu():
        split_rows(head, cpu_streams)
    return head
