"""What drafting takes of a budget: weights and caches of what drafts, and the logits of what is drafted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .model_size import ModelSize

AUTO, NONE, NGRAM, SELF, MTP, MODEL = "auto", "none", "ngram", "self", "mtp", "model"

SHARE, FEW = 32, 8
"""Of the budget, one in so many bytes is for drafted tokens' logits; and tokens at least, if a draft is asked for."""

MOST = 32
"""Drafted tokens at most."""


@dataclass(frozen=True)
class Draft:
    """What is to draft for a model, before anything of it is read. Bytes.

    Attributes:
        kind: ``ngram``, ``self``, ``mtp`` or ``model``; ``name`` for people.
        bits: of a copy of the model itself. ``folder``: of another model, or with the tensors of a multi-token-
            prediction head, if not the model's own.
        weights: that it keeps in memory; ``head``: those besides, if the model's head is streamed.
        uses_head: it drafts with the model's own head, which has to stay in memory.
        cache, growing: as in ``ModelSize``.
    """

    kind: str
    name: str
    bits: int | None = None
    folder: Path | None = None
    weights: int = 0
    head: int = 0
    cache: int = 0
    growing: tuple[tuple[int, int | None], ...] = ()
    uses_head: bool = False

    def beside(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """The model's size with what drafts for it."""
        return size.beside(self.weights + (self.head if head_streamed else 0), self.cache, self.growing)


def drafted_tokens(size: ModelSize, budget: int, explicit: bool) -> int:
    """Tokens whose logits a sweep has room for beside its own: a small share of the budget, or if asked for a few."""
    room = budget // SHARE // max(1, size.logits_row)
    return min(MOST, max(room, FEW if explicit else 0))
