"""Gives a draft's memory to layers, in mid-text, where the draft does not pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plan.plan import Plan
from .resident_layers import ResidentLayers, another


def plan_without_draft(layers: ResidentLayers, resident: int | None = None) -> Plan:
    """Returns a plan in which layers have the draft's memory; ``resident``: how many stay in memory."""
    session, plan, draft = layers.session, layers.session.plan, layers.draft
    size = session.size if draft is None else draft.profile_without(session.profile, plan.head_streamed).size
    how: dict[str, Any] = {"resident": resident, "prefill_step": plan.prefill_step}
    how["slots"] = plan.slots if draft is None else None  # without a draft model, none read ahead
    return another(session, replace(size, drafted=0), plan.budget_bytes, undrafted=True, **how)


def give_back(layers: ResidentLayers) -> None:
    """Gives up the draft, or n-grams' room, so that layers come back with the next pass."""
    session, layers.adapts = layers.session, False
    if layers.draft is not None:
        layers.give_up_draft()
    else:
        smaller = plan_without_draft(layers, resident=0)
        session.resize(replace(session.size, drafted=0))
        layers.shed_layers = {i for i, part in enumerate(session.profile.parts) if part.unit is not None}
        session.stream(smaller)
    layers.regrow(len(layers.shed_layers))
    session.note("the draft did not pay: layers have its memory")
