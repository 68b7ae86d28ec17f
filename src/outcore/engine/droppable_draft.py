"""A drafter as the engine sees it, and the model's size without it: when memory is short, the draft goes first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..plan.draft_cost import Draft
from ..plan.model_size import ModelSize
from ..sizes import held_bytes
from .model_profile import ModelProfile

if TYPE_CHECKING:
    from .session import Session


class Drafter(Protocol):
    """Proposes tokens for a model (``decode.speculative.drafting``).

    Attributes:
        kind: ``ngram``, or the kind of the draft source that made it.
        holds_head: it uses the model's own head, which therefore has to stay in memory.
        intact: it can be given up without changing the model's weights.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def holds_head(self) -> bool: ...

    @property
    def intact(self) -> bool: ...

    def hidden(self) -> Any:
        """Returns an object that collects a text's hidden states for the drafter; None if it does not need them."""

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        """Returns the model's profile without this drafter, except for its size. Changes nothing."""

    def give_up(self, session: Session) -> Drafter:
        """Frees the drafter's memory, also that of running texts, and returns the drafter that replaces it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class DroppableDraft:
    """A draft in memory that can be given up, with the context and ``kv_disk`` that the model was planned with."""

    draft: Draft
    context: int
    kv_disk: str
    drafter: Drafter

    def size_without(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """Returns the model's size without the draft that it includes."""
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
        profile = self.drafter.profile_without(profile)
        return replace(profile, size=self.size_without(profile.size, head_streamed))
