"""What drafts for a running model, as the engine sees it, and what the model is without it: where memory is short the
draft goes first."""

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
    """What drafts tokens for a model (``decode.speculative.drafting``).

    Attributes:
        kind: ``ngram``, or that of the source that brought it; ``name`` for people.
        holds_head: it drafts with the model's own head: as long as that is in memory, it has to stay.
        intact: whether it can be given up without harm.
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
        """What keeps a text's hidden states for it; None where it does not draft from them."""

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        """The model's profile once it is given up, but for its size; nothing is changed."""

    def give_up(self, session: Session) -> Drafter:
        """Let go of what it has in memory, also of texts under way; returns what drafts instead."""

    def close(self) -> None:
        """The model is closed."""


@dataclass(frozen=True)
class DroppableDraft:
    """A draft in memory that can be given up.

    Attributes:
        draft: as it was planned, beside a context of so many tokens.
        kv_disk: whether keys and values may lie on disk without it.
        drafter: that has it.
    """

    draft: Draft
    context: int
    kv_disk: str
    drafter: Drafter

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
        profile = self.drafter.profile_without(profile)
        return replace(profile, size=self.size_without(profile.size, head_streamed))
