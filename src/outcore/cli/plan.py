"""``outcore plan``: predicts a model's speed and memory at each budget, without loading it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ..calibration.calibration_file import measuring
from ..checkpoint.find_model import name_of, no_text, resolve_model
from ..decode.preparation import Preparation, prepare
from ..errors import BudgetError
from ..machine.memory import last_resort
from ..packages import modules
from ..plan.joint_plan import NONE, Choice, Draft, computing_from, expected, knee, speed_curve
from ..plan.machine_profile import Calibration
from ..plan.plan import Plan
from ..sizes import format_size
from ..text import counted
from .console import console, listing, table
from .engine import ProgressBar
from .flags import loading_options
from .output import tell

# Factors by which the real time per token may differ from the prediction, on a measured machine and on one that was
# not. Source: every run in predictions-cpu.json and predictions-qwen3.5-9b-8bit-h200.json lay within the first.
SPREAD, ASSUMED_SPREAD = 1.25, 2.0


def counted_by(prepared: Preparation) -> tuple[str, str]:
    """Returns what a model's reading is told for, a pass over texts if it writes none, and that it reads images."""
    folder, config = prepared.profile.lazy.checkpoint.folder, prepared.profile.lazy.config
    images = any(package.takes(folder, config) for package in modules("parts").values())
    return ("pass", "") if no_text(folder) else ("token", "reads images, too (--image)" * images)


def run(args: argparse.Namespace) -> None:
    prepared, notes = _prepare(args)
    args.result.record = show(prepared, prepared.calibration, prepared.plan, last_resort(), notes, quiet=args.quiet)


def _prepare(args: argparse.Namespace) -> tuple[Preparation, list[str]]:
    """Measures this machine unless that was done or is not wanted, and plans. Also returns notes for the user."""
    folder, options = resolve_model(args.model, args.revision), loading_options(args)
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        tell(line)

    if not args.no_calibrate:
        opened = prepare(folder, **options, least=True)
        if opened.refused is not None:  # raised before measuring, which takes a while
            raise BudgetError(opened.refused, opened.planning.smallest)
        with ProgressBar() as bar:
            measuring().calibrated(opened.profile, folder, opened.cpu_streams, progress=bar.measuring, note=note)
    prepared = prepare(folder, **options)
    if prepared.draft is not None and not prepared.choices and prepared.plan.predicted:
        plain = prepare(folder, **(options | {"draft": NONE, "draft_bits": None}))
        prepared = compared(prepared, plain, prepared.plan.budget_bytes, prepared.calibration)
    notes += prepared.notes
    if not prepared.plan.calibrated:
        notes.append("predicted from assumptions; run outcore calibrate to measure this machine for this model")
    return prepared, notes


def compared(prepared: Preparation, plain: Preparation, budget: int, calibration: Calibration) -> Preparation:
    """Returns the preparation with two choices: no draft, as in ``plain``, and the draft that the user named."""

    def choice(p: Preparation) -> Choice:
        planned = p.planning.at(budget, calibration)
        planned = replace(planned, size=replace(planned.size, on_disk=bool(planned.plan.kv_slot)))
        return expected(planned, calibration, p.draft.name if p.draft is not None else NONE, p.planning.blocks)

    without, named = choice(plain), choice(prepared)
    return replace(prepared, choices=(without, named), choice=named)


def show(
    prepared: Preparation,
    calibration: Calibration,
    plan: Plan,
    available: int,
    notes: Sequence[str] = (),
    *,
    device: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Prints a plan and the table of other budgets, and returns the JSON document.

    Args:
        available: bytes that the recommended budget may use.
        device: the device or disk that the plan is for; None: this machine.
        quiet: print the first line only.
    """
    plans, (each, images) = speed_curve(prepared.planning, calibration, also=[plan.budget_bytes]), counted_by(prepared)
    if each == "pass":  # of as many tokens as a prompt
        plan, *plans = (replace(p, token_s=p.ttft_s / prepared.profile.size.prompt) for p in (plan, *plans))
    plans = [plan if p.budget_bytes == plan.budget_bytes else p for p in plans]
    rising = _rising(plans, plan)
    best, computing = knee(rising, available), computing_from(plans)
    row, name, out = _row(plan, device is not None), name_of(Path(prepared.given)), console()
    spread = (SPREAD if plan.calibrated else ASSUMED_SPREAD) if plan.predicted and device is None else None
    record = facts(plan) | {
        "model": name,
        "title": f"{name} on {device}" if device else name,
        "device": device,
        "predicted_tps": row["tps"],
        "predicted_tps_low": row["tps"] / spread if spread else None,
        "predicted_tps_high": row["tps"] * spread if spread else None,
        "predicted_ttft_s": row["ttft_s"],
        "predicted_peak_bytes": plan.peak_bytes,
        **{key: row[key] for key in ("resident_units", "expert_slots")},
        "streamed_units": len(plan.streamed),
        "kept_pieces": sum(len(pieces) for _, pieces in plan.kept),
        "units_per_sweep": len(plan.parts),
        "experts": plan.experts,
        "slot_bytes": plan.slot_bytes,
        "context": plan.context,
        "prompt": prepared.profile.size.prompt,
        "draft": prepared.draft.name if prepared.draft is not None else None,
        "mirrors": [] if prepared.mirrors is None else [str(mirror.folder) for mirror in prepared.mirrors.all[1:]],
        "read_gbps": calibration.read_gbps,
        "drafts": _drafts(prepared.choices, prepared.choice),
        "items": _items(plan),
        "curve": [_row(p, device is not None) for p in plans],
        "recommended_budget_bytes": best.budget_bytes if best is not None else None,
        "computing_limits_from_bytes": computing and computing.budget_bytes,
        "notes": list(notes),
    }
    out.print(_headline(record, plan, each, images and f"; it {images}"))
    if quiet:
        return record
    items = [(f"{k} of {plan.context}" if k == "context" else k, format_size(n)) for k, n in record["items"].items()]
    out.print(listing([*items, ("together", format_size(plan.peak_bytes))], "right"))
    if len(rising) > 1:
        # If computing is the limit everywhere, all rows are about as fast: a few are enough.
        few = [p for p in rising if p in (plans[0], plan, best, plans[-1])]
        out.print(_curve_table(few if computing is plans[0] else rising, plan, best, device is not None, each))
    for line in _sentences(record, plans, best, computing):
        out.print(line)
    return record


def _rising(plans: Sequence[Plan], plan: Plan) -> list[Plan]:
    """Leaves out budgets with fewer layers resident than a smaller one, which are as fast by larger slots or chunks;
    ``plan`` itself stays."""

    def resident(p: Plan) -> tuple[bool, int, int]:
        return not p.streams, sum(n for _, n in p.pools), len(p.resident)

    found: list[Plan] = []
    for p in plans:
        if p is plan:
            found = [smaller for smaller in found if resident(smaller) <= resident(p)]
        if not found or resident(p) >= resident(found[-1]):
            found.append(p)
    return found


def about(number: float) -> str:
    """Returns a predicted number in two digits, as more are not known."""
    return f"{float(f'{number:.2g}'):g}"


def facts(plan: Plan) -> dict[str, Any]:
    sizes = "budget_bytes", "smallest_budget_bytes", "bytes_per_token"
    return {name: getattr(plan, name) for name in (*sizes, "slots", "head_streamed", "prefill_step", "calibrated")}


def _row(p: Plan, device: bool) -> dict[str, Any]:
    known = device or p.predicted
    return {
        "budget_bytes": p.budget_bytes,
        "tps": 1 / p.token_s if known else None,
        "ttft_s": p.ttft_s if known else None,
        "peak_bytes": p.peak_bytes,
        "resident_units": len(p.resident),
        "slots": p.slots,
        "expert_slots": sum(n for _, n in p.pools),
        "bytes_per_token": p.bytes_per_token,
    }


def _items(plan: Plan) -> dict[str, int]:
    return {
        "weights in memory": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        **({"experts": plan.pool_bytes} if plan.pools else {}),
        "context": plan.cache_bytes,
        "activations": plan.activation_bytes,
        "allocator": plan.allocator_bytes,
    }


def _drafts(choices: Sequence[Choice], taken: Choice | None) -> list[dict[str, Any]]:
    plain = next((c.planned.plan for c in choices if c.name == NONE and c.planned is not None), None)
    records: list[dict[str, Any]] = []
    for choice in choices:
        if choice.planned is None:
            records.append({"draft": choice.name, "chosen": False, "reason": choice.reason})
            continue
        plan, draft = choice.planned.plan, choice.planned.draft
        records.append({
            "draft": choice.name,
            "chosen": choice is taken,
            "predicted_tps": 1 / choice.token_s,
            "tokens_per_sweep": choice.tokens,
            "drafted": choice.drafted,
            "draft_bytes": draft.weights if draft is not None else 0,
            # The drafter's caches, snapshots for rollback, and the activations of several tokens instead of one.
            "beside_bytes": 0 if plain is None else max(
                0, plan.cache_bytes + plan.activation_bytes - plain.cache_bytes - plain.activation_bytes),
            "resident_units": len(plan.resident),
            "bytes_per_sweep": plan.bytes_per_token,
            "first_bytes": choice.first,
            "assumed": draft.assumed if draft is not None else "",
            "assumed_tps": _ends(draft, 1 / choice.token_s) if draft is not None and choice.drafted else [],
            "reason": None,
        })  # fmt: skip
    return records


def _ends(draft: Draft, tps: float) -> list[float]:
    """Returns tokens a second by the least and the most tokens a pass that were published; ``tps``: by the middle."""
    least, most, _ = draft.published
    return [tps * 2 * tokens / (least + most) for tokens in (least, most)] if least < most else []


def _headline(record: dict[str, Any], plan: Plan, each: str, images: str) -> str:
    speed, tps, low = "Speed unknown, as nothing was measured", record["predicted_tps"], record["predicted_tps_low"]
    if tps is not None:
        between = "" if low is None else f" ({about(low)} to {about(record['predicted_tps_high'])})"
        first = (
            f"{about(plan.ttft_s)} s to the first token if the prompt has {record['prompt']} tokens (--prompt-tokens)"
        )
        speed = f"Predicted{', not measured' if record['device'] else ''}: about {about(tps)} tokens/s{between}"
        speed += " of texts" if each == "pass" else f", and {first}"
    budget, peak = format_size(plan.budget_bytes), format_size(plan.peak_bytes)
    return f"{record['title']} with {budget}: {held(plan, each)}. {speed}; peak {peak}{images}."


def _sentences(
    record: dict[str, Any], plans: Sequence[Plan], best: Plan | None, computing: Plan | None
) -> Iterator[str]:
    if folders := len(record["mirrors"]):
        yield f"Read from {folders + 1} folders at once; the prediction counts the first one's disk only."
    if computing is not None and all(row["tps"] is not None for row in record["curve"]):
        there = format_size(computing.budget_bytes, round_up=True)
        where = "At every budget" if computing is plans[0] else f"From {there} on"
        yield (
            f"{where} computing is the limit, not the disk: everything in memory gives "
            f"about {about(1 / plans[-1].token_s)} tokens/s, {there} gives {about(1 / computing.token_s)}."
        )
    if best is None:
        yield "None of these budgets fits in the memory that is free now."
    else:
        memory = format_size(best.budget_bytes, round_up=True).replace(" ", "")
        why = "(everything fits)"
        if record["device"] or best.predicted:
            why = f"(about {about(1 / best.token_s)} tokens/s); more memory gains less than 5 %"
        yield f"Recommended: --memory {memory} {why}."
    yield from _draft_lines(record["drafts"])
    yield from (f"Note: {note}" for note in record["notes"])


def _draft_lines(rows: Collection[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield "Drafts (--draft):"
    for row in rows:
        if row["reason"] is not None:
            yield f"  {row['draft']}: {row['reason']}"
            continue
        takes = row["draft_bytes"] + row["beside_bytes"]
        yield (
            f"  {row['draft']}: about {about(row['predicted_tps'])} tokens/s, {row['tokens_per_sweep']:.1f} per pass; "
            f"{row['resident_units']} layers resident, {format_size(row['bytes_per_sweep'])} read per pass"
            + (f", takes {format_size(takes)}" if takes else "")
            + (" ← this plan" if row["chosen"] else "")
        )
        if row["assumed"]:
            ends = [about(tps) for tps in row["assumed_tps"]]
            yield f"  {row['draft']}: {row['assumed']}" + (f": {' to '.join(ends)} tokens/s" if ends else "")
        if row["chosen"] and row["first_bytes"]:
            yield f"  Its first use writes {format_size(row['first_bytes'])} to the cache."


def held(plan: Plan, each: str = "token") -> str:
    if not plan.streams:
        return "everything resident"
    if plan.pools:
        return f"{plan.held} resident, the others streamed, {format_size(plan.bytes_per_token)} read per {each}"
    kept = sum(len(pieces) for _, pieces in plan.kept)
    text = counted(len(plan.resident), "layer") + (f" and {counted(kept, 'projection')} of others" if kept else "")
    text += f" resident, {len(plan.streamed)} streamed" + (f" in {len(plan.parts)} parts" if plan.split else "")
    text += " and the head" if plan.head_streamed else ""
    return f"{text} through {plan.slots} slots, {format_size(plan.bytes_per_token)} read per {each}"


def _curve_table(plans: Sequence[Plan], plan: Plan, best: Plan | None, predicted: bool, each: str = "token") -> Table:
    rows = []
    for p in plans:
        marks = ["← this plan"] * (p.budget_bytes == plan.budget_bytes)
        marks += ["← recommended"] * (best is not None and p.budget_bytes == best.budget_bytes)
        known = predicted or p.predicted
        rows.append([
            format_size(p.budget_bytes, round_up=True),
            f"{sum(n for _, n in p.pools)} of {p.experts} experts" if p.pools else p.held,
            format_size(p.bytes_per_token) if p.streams else "-",
            f"{about(p.ttft_s)} s" if known else "-",
            about(1 / p.token_s) if known else "-",
            " ".join(marks),
        ])  # fmt: skip
    return table([">memory", ">resident", f">read/\n{each}", f">first\n{each}", ">tokens/s", ""], rows)
