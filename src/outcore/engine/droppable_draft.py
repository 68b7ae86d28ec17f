"""What drafts for a running model, and what the model is without it: where memory is short the draft goes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..checkpoint.checkpoint import TensorInfo
from ..plan.draft_cost import Draft
from ..plan.model_size import ModelSize
from ..sizes import held_bytes
from .model_profile import ModelProfile
from .undrafted import high_bits_streamed


@dataclass(frozen=True)
class DroppableDraft:
    """A model in memory that drafts.

    Attributes:
        draft: as it was planned, beside a context of so many tokens.
        kv_disk: whether keys and values may lie on disk without it.
        end: lets go of it, and of the guesses under way.
        high_bits: of a nested draft the tensors on disk that the model's layers share, by their paths in the model.
        check: raises a StoreError if these are not what they were when they were read.
    """

    draft: Draft
    context: int
    kv_disk: str
    end: Callable[[], None]
    high_bits: Mapping[str, TensorInfo] = field(default_factory=dict)
    check: Callable[[], object] = lambda: None

    def size_without(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """The model's size, which counts the draft, without it."""
        draft = self.draft
        states = draft.cache - held_bytes(draft.growing, self.context)
        return replace(
            size,
            non_layer=size.non_layer - draft.weights - (draft.head if head_streamed else 0),
            cache=size.cache - states - held_bytes(draft.growing, size.context),
            growing=size.growing[: len(size.growing) - len(draft.growing)],
            kv_disk=self.kv_disk,
            drafted=0,
        )

    def profile_without(self, profile: ModelProfile, head_streamed: bool) -> ModelProfile:
        """The profile of the model, which counts the draft, without it."""
        if self.high_bits:
            profile = high_bits_streamed(profile, self.high_bits)
        return replace(profile, size=self.size_without(profile.size, head_streamed))
