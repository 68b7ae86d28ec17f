"""Ways to draft side by side, as ``outcore plan`` shows what ``--draft auto`` chose from, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

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


def drafts_table(rows: Sequence[Mapping[str, Any]]) -> Group:
    """One row for each; below it why others cannot be."""
    heads = ["it takes", "whole\nlayers", "read\na pass", "tokens\na pass", "tokens/s"]
    table = Table(box=None, pad_edge=False)
    table.add_column("draft", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        if row["reason"] is not None:
            continue
        table.add_row(
            row["draft"],
            format_size(takes) if (takes := row["draft_bytes"] + row["beside_bytes"]) else "-",
            str(row["resident_units"]),
            format_size(row["bytes_per_sweep"]),
            f"{row['tokens_per_sweep']:.1f}",
            f"{row['predicted_tps']:.2f}",
            "← this plan" if row["chosen"] else "",
        )
    others = [f"{row['draft']}: {row['reason']}" for row in rows if row["reason"] is not None]
    return Group(table, *others)


def why_drafted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why one of them was chosen, in a sentence or two."""
    chosen = next(r for r in rows if r["chosen"])
    plain = next(r for r in rows if r["draft"] == NONE)
    if chosen is plain:
        return "Nothing is drafted: none of the others is predicted to be faster by 3 %."
    if chosen["predicted_tps"] < plain["predicted_tps"]:
        return (
            f"Drafts: {chosen['draft']}, as asked; nothing at all is predicted to be faster. --draft auto would choose."
        )
    text = (
        f"Drafts: {chosen['draft']}, which is predicted to be {chosen['predicted_tps'] / plain['predicted_tps']:.1f} "
        f"times as fast as one token a pass, as {chosen['tokens_per_sweep']:.1f} tokens come of each."
    )
    if chosen["first_bytes"]:
        text += f" Before its first answer {format_size(chosen['first_bytes'])} are written to the cache, once."
    return text
