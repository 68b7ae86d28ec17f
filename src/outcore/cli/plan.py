"""``outcore plan``: what a budget buys before anything is loaded, and speed against memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ..calibration.calibrate import calibrated
from ..checkpoint.find_model import name_of, resolve_model
from ..errors import BudgetError
from ..loading.draft_choices import what_it_gives
from ..loading.preparation import Preparation, prepare
from ..machine.memory import last_resort
from ..options import AUTO
from ..plan.draft_cost import NONE
from ..plan.joint_plan import Planned, computing_from, knee, speed_curve
from ..plan.machine_profile import Calibration
from ..plan.plan import Plan
from ..sizes import format_size
from ..text import counted
from .arguments import engine_options
from .console import console
from .draft_choices import choice_records, draft_lines
from .engine import measuring, progress_bar
from .output import tell

FEWER_TOKENS = "; fewer tokens need less (--context, --prompt-tokens)"
"""For those whose budget is too small for what these flags say."""

BAR, LEAST_BAR = 30, 8
"""Characters of the longest bar, and of the longest where there is little room."""


@dataclass(frozen=True)
class Compared:
    """A plan among those for other budgets.

    Attributes:
        plans: by budget, this one among them.
        best: the recommended one; None: none fits.
        device: whose speeds are predicted; None: this machine's.
    """

    prepared: Preparation
    calibration: Calibration
    plan: Plan
    plans: list[Plan]
    best: Plan | None
    device: str | None = None

    def known(self, plan: Plan) -> bool:
        """Whether it is known how fast it is."""
        return self.device is not None or plan.foretold

    @property
    def title(self) -> str:
        """The model and the device."""
        name = name_of(Path(self.prepared.given))
        return f"{name} on {self.device}" if self.device else name


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
    """
    prepared, notes = _prepare(args)
    show(args, compare(prepared, prepared.calibration, prepared.plan, last_resort()), notes)


def compare(
    prepared: Preparation, calibration: Calibration, plan: Plan, available: int, device: str | None = None
) -> Compared:
    """A plan beside those for other budgets; ``available``: bytes that the recommended one may have."""
    plans = speed_curve(prepared.planning, calibration, also=[plan.budget_bytes])
    plans = [plan if p.budget_bytes == plan.budget_bytes else p for p in plans]
    return Compared(prepared, calibration, plan, plans, knee(plans, available), device)


def plan_options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as arguments of ``prepare``."""
    wanted = {"context": args.context, "prompt": args.prompt_tokens, "draft": args.draft or AUTO}
    return engine_options(args) | wanted | {"trust_remote_code": args.trust_remote_code}


def _prepare(args: argparse.Namespace) -> tuple[Preparation, list[str]]:
    """The model, opened and planned for; and notes."""
    folder, options = resolve_model(args.model, args.revision), plan_options(args)
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        tell(line)

    if not args.no_calibrate:
        opened = prepare(folder, **options, least=True)
        if opened.refused is not None:  # before anything is measured, which takes a while
            raise BudgetError(f"{opened.refused}{FEWER_TOKENS}", opened.planning.smallest)
        with progress_bar() as bar:
            calibrated(opened.profile, folder, opened.cpu_streams, progress=measuring(bar), note=note)
    try:
        prepared = prepare(folder, **options)
    except BudgetError as e:
        raise BudgetError(f"{e}{FEWER_TOKENS}", e.smallest) from e
    if prepared.draft is not None and not prepared.choices and prepared.plan.streams:
        prepared = _beside_none(prepared, folder, options)
    notes += prepared.notes
    if not prepared.plan.calibrated:
        notes.append("predicted from assumptions: this machine was not measured for this model (outcore calibrate)")
    return prepared, notes


def _beside_none(prepared: Preparation, folder: Path, options: dict[str, Any]) -> Preparation:
    """A draft that was asked for by its name, and what there would be without."""
    plain = prepare(folder, **(options | {"draft": NONE}))
    dtype = options.get("dtype")
    none, asked = (
        what_it_gives(p.profile, Planned(p.plan, p.profile.size, p.draft), p.calibration, p.planning.blocks, dtype)
        for p in (plain, prepared)
    )
    return replace(prepared, choices=(none, asked), choice=asked)


def show(args: argparse.Namespace, compared: Compared, notes: list[str]) -> None:
    """Print the plan with these notes; its JSON is the result's record."""
    args.result.record = _record(compared, notes)
    _print(compared, args.result.record)


def _record(compared: Compared, notes: list[str]) -> dict[str, Any]:
    """What there is to say of the plan; bytes, seconds, tokens a second; None: how fast it is is not known."""
    prepared, plan, computing = compared.prepared, compared.plan, computing_from(compared.plans)
    return {
        "model": name_of(Path(prepared.given)),
        "title": compared.title,
        "device": compared.device,
        "predicted_tps": 1 / plan.token_s if compared.known(plan) else None,
        "predicted_tps_low": None if compared.device or not plan.foretold else 1 / plan.token_range_s[1],
        "predicted_tps_high": None if compared.device or not plan.foretold else 1 / plan.token_range_s[0],
        "predicted_ttft_s": plan.ttft_s if compared.known(plan) else None,
        "predicted_peak_bytes": plan.peak_bytes,
        "calibrated": plan.calibrated,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "budget_bytes": plan.budget_bytes,
        "resident_units": len(plan.resident),
        "streamed_units": len(plan.streamed),
        "kept_pieces": sum(len(pieces) for _, pieces in plan.kept),
        "units_per_sweep": len(plan.parts),
        "head_streamed": plan.head_streamed,
        "slots": plan.slots,
        "expert_slots": sum(n for _, n in plan.pools),
        "experts": plan.experts,
        "slot_bytes": plan.slot_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "prefill_step": plan.prefill_step,
        "context": plan.context,
        "prompt": prepared.profile.size.prompt,
        "draft": prepared.draft.name if prepared.draft is not None else None,
        "mirrors": [str(mirror.folder) for mirror in prepared.mirrors],
        "read_gbps": compared.calibration.read_gbps,
        "drafts": choice_records(prepared.choices, prepared.choice),
        "items": _items(plan),
        "curve": [
            {
                "budget_bytes": p.budget_bytes,
                "tps": 1 / p.token_s if compared.known(p) else None,
                "ttft_s": p.ttft_s if compared.known(p) else None,
                "peak_bytes": p.peak_bytes,
                "resident_units": len(p.resident),
                "slots": p.slots,
                "expert_slots": sum(n for _, n in p.pools),
                "bytes_per_token": p.bytes_per_token,
            }
            for p in compared.plans
        ],
        "recommended_budget_bytes": compared.best.budget_bytes if compared.best is not None else None,
        "computing_limits_from_bytes": computing.budget_bytes if computing else None,
        "notes": notes,
    }


def _items(plan: Plan) -> dict[str, int]:
    """Where the bytes go."""
    return {
        "weights in memory": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        **({"experts": plan.pool_bytes} if plan.pools else {}),
        "context": plan.cache_bytes,
        "activations": plan.activation_bytes,
        "allocator": plan.allocator_bytes,
    }


def _print(compared: Compared, record: dict[str, Any]) -> None:
    out = console()
    plan, plans, best = compared.plan, compared.plans, compared.best
    kind = "Predicted, not measured" if compared.device else "Predicted"
    speed = (
        f"{kind}: {1 / plan.token_s:.2f} tokens a second{_range(record)}, {plan.ttft_s:.1f} s to the first "
        f"(behind a prompt of {record['prompt']} tokens)"
        if compared.known(plan)
        else "Its speed is not known, as nothing was measured"
    )
    out.print(
        f"{record['title']} with {format_size(plan.budget_bytes)}: {held(plan)}. {speed}; "
        f"{format_size(plan.peak_bytes)} at most.",
        markup=False,
    )
    if record["mirrors"]:
        folders = 1 + len(record["mirrors"])
        out.print(f"Read from {folders} folders at once, and predicted by the first one's disk alone.")
    items = Table(show_header=False, box=None, pad_edge=False)
    items.add_column(style="bold")
    items.add_column(justify="right")
    for name, nbytes in record["items"].items():
        items.add_row(name, format_size(nbytes))
    items.add_row("together", format_size(plan.peak_bytes))
    out.print(items)
    limited = computing_from(plans) if all(map(compared.known, plans)) else None
    if len(plans) > 1:
        # Rows that are all about as fast say nothing.
        few = [p for p in plans if p in (plans[0], plan, best, plans[-1])]
        shown = few if limited is plans[0] else plans
        out.print(_curve_table(shown, plan, best, out.width, compared.device is not None))
    if limited is not None:
        where = (
            "At every budget" if limited is plans[0] else f"From {format_size(limited.budget_bytes, round_up=True)} on"
        )
        out.print(
            f"{where} computing is the limit, not the disk: with everything in memory it is "
            f"{1 / plans[-1].token_s:.2f} tokens a second, and with "
            f"{format_size(limited.budget_bytes, round_up=True)} {1 / limited.token_s:.2f}."
        )
    if best is not None:
        memory = format_size(best.budget_bytes, round_up=True).replace(" ", "")
        gained = f"({1 / best.token_s:.2f} tokens a second): more memory buys less than one part in twenty"
        why = gained if compared.known(best) else "(everything fits into it)"
        out.print(f"Recommended: --memory {memory} {why}.")
    else:
        out.print("None of these budgets fits into what is free now.")
    if record["drafts"] and compared.device is None:
        out.print("\n".join(draft_lines(record["drafts"])))
    for note in record["notes"]:
        out.print(f"Note: {note}")


def _range(record: dict[str, Any]) -> str:
    low, high = record["predicted_tps_low"], record["predicted_tps_high"]
    return "" if low is None else f" ({low:.2f} to {high:.2f})"


def held(plan: Plan) -> str:
    """What a plan keeps in memory and what it streams, in words."""
    if not plan.streams:
        return "everything resident"
    if plan.pools:
        return f"{plan.held} resident, the others one by one, {format_size(plan.bytes_per_token)} read a token"
    kept = sum(len(pieces) for _, pieces in plan.kept)
    text = f"{counted(len(plan.resident), 'layer')} resident"
    text += f" and {kept} projection{'s' * (kept != 1)} of others" if kept else ""
    text += f", {len(plan.streamed)} streamed" + (f" in {len(plan.parts)} parts" if plan.split else "")
    text += " and the head" if plan.head_streamed else ""
    return f"{text} through {plan.slots} slots, {format_size(plan.bytes_per_token)} read a token"


def _curve_table(plans: Sequence[Plan], plan: Plan, best: Plan | None, width: int, foretold: bool) -> Table:
    """A row for each budget, in so many characters: bars are as long as there is room.

    Args:
        foretold: of every plan it is known how fast it is.
    """
    known = [foretold or p.foretold for p in plans]
    rows = [
        [
            format_size(p.budget_bytes, round_up=True),
            f"{sum(n for _, n in p.pools)} of {p.experts} experts" if p.pools else p.held,
            format_size(p.bytes_per_token) if p.streams else "-",
            f"{p.ttft_s:.1f} s" if fast else "-",
            f"{1 / p.token_s:.2f}" if fast else "-",
        ]
        for p, fast in zip(plans, known, strict=True)
    ]
    marks = [_marks(p, plan, best) for p in plans]
    table = Table(box=None, pad_edge=False)
    wide = 0
    for head, *cells in zip(("memory", "resident", "read\na token", "first\ntoken", "tokens/s"), *rows, strict=True):
        table.add_column(head, justify="right", no_wrap=True)
        wide += 2 + max(len(line) for cell in (head, *cells) for line in cell.split("\n"))
    table.add_column("", no_wrap=True)
    bar = min(BAR, width - wide - max(map(len, marks)) - 1)
    fastest = max((1 / p.token_s for p, fast in zip(plans, known, strict=True) if fast), default=0.0)
    for p, row, mark, fast in zip(plans, rows, marks, known, strict=True):
        drawn = "█" * max(1, round(bar / p.token_s / fastest)) if fast and bar >= LEAST_BAR else ""
        table.add_row(*row, f"{drawn} {mark}".strip())
    return table


def _marks(p: Plan, plan: Plan, best: Plan | None) -> str:
    said = ["this plan"] if p.budget_bytes == plan.budget_bytes else []
    said += ["recommended"] if best is not None and p.budget_bytes == best.budget_bytes else []
    return " ".join(f"← {word}" for word in said)
