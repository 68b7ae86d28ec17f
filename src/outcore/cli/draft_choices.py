"""Ways to draft side by side, as ``outcore plan`` shows what ``--draft auto`` chose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plan.draft_choice import Choice
from ..plan.draft_cost import NONE
from ..plan.plan import Plan
from ..sizes import format_size


def choice_records(choices: Sequence[Choice], taken: Choice | None) -> list[dict[str, Any]]:
    """What there is to say of each way to draft, and that one of them is taken; bytes, tokens a second."""
    plain = next((c.planned.plan for c in choices if c.name == NONE and c.planned is not None), None)
    return [_record(choice, choice is taken, plain) for choice in choices]


def _record(choice: Choice, chosen: bool, plain: Plan | None) -> dict[str, Any]:
    planned = choice.planned
    if planned is None:
        return {"draft": choice.name, "chosen": False, "reason": choice.reason}
    plan, draft = planned.plan, planned.draft
    return {
        "draft": choice.name,
        "chosen": chosen,
        "predicted_tps": 1 / choice.token_s,
        "tokens_per_sweep": choice.tokens,
        "drafted": choice.drafted,
        "draft_bytes": draft.weights if draft is not None else 0,
        # Caches of what drafts, states to go back to, and what several tokens of a pass take more than one.
        "beside_bytes": max(0, _not_weights(plan) - _not_weights(plain)) if plain is not None else 0,
        "resident_units": len(plan.resident),
        "bytes_per_sweep": plan.bytes_per_token,
        "first_bytes": choice.first,
        "reason": None,
    }


def _not_weights(plan: Plan) -> int:
    return plan.cache_bytes + plan.activation_bytes


def draft_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each way to draft, and why others cannot be; what is the first time only, last."""
    yield "Drafts (--draft):"
    for row in rows:
        if row["reason"] is not None:
            yield f"  {row['draft']}: {row['reason']}"
            continue
        takes = row["draft_bytes"] + row["beside_bytes"]
        yield (
            f"  {row['draft']}: {row['predicted_tps']:.2f} tokens/s, {row['tokens_per_sweep']:.1f} of each pass; "
            f"{row['resident_units']} whole layers, {format_size(row['bytes_per_sweep'])} read a pass"
            + (f", takes {format_size(takes)}" if takes else "")
            + (" ← this plan" if row["chosen"] else "")
        )
        if row["chosen"] and row["first_bytes"]:
            yield f"  Before its first answer {format_size(row['first_bytes'])} are written to the cache, once."
