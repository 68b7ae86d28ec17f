"""Moves memory between drafts and layers, between two passes of a text."""

from __future__ import annotations

from dataclasses import replace

from ..plan.candidate import replanned_bytes
from .resident_layers import ResidentLayers


def bytes_moved(layers: ResidentLayers, drafted: int = 0) -> int:
    """Returns how many bytes a pass would read less (below 0: more) if no draft but n-grams had memory, for ``drafted``
    drafted tokens, and layers the rest."""
    session, plan, draft = layers.session, layers.session.plan, layers.draft
    size = session.size if draft is None else draft.profile_without(session.profile, plan.head_streamed).size
    room = plan.budget_bytes - replanned_bytes(replace(size, drafted=drafted), plan, plan.resident)
    count = min(room // max(layer.resident for layer in size.layers), len(plan.streamed) - 1)
    return count * max(layer.read for layer in size.layers)


def give_back(layers: ResidentLayers) -> None:
    """Gives up the draft, or n-grams' room, so that layers come back with the next pass."""
    session = layers.session
    if layers.draft is not None:
        layers.give_up_draft()
    session.resize(replace(session.size, drafted=0))
    layers.replan(session.plan.resident)
    pieces, parts = dict(session.plan.kept), session.profile.parts
    layers.shed_layers |= {i for i in session.plan.streamed if parts[i].unit is not None and i not in pieces}
    layers.regrow(len(layers.shed_layers))
    session.note("the draft did not pay: layers have its memory")


def take(layers: ResidentLayers, drafted: int) -> None:
    """Makes room for drafted tokens, which layers had. Raises BudgetError if there is none."""
    session = layers.session
    size = replace(session.size, drafted=drafted)
    session.residency.accommodate(size, [session.plan.prefill_step], keep_draft=True)
