"""``outcore plan --device``, for a published device instead of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from outcore.checkpoint.find_model import resolve_model
from outcore.cli import plan
from outcore.cli.commands import parser_of
from outcore.cli.console import console as plan_console
from outcore.errors import UsageError
from outcore.loading.preparation import prepare
from outcore.machine.memory import given_budget
from outcore.sizes import format_size

from ..devices import ComparedRow, Device, device, mean_error, published_comparison


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: an unknown device, flags that do not go together.
        BudgetError: the budget is too small; says the smallest that works.
    """
    if args.device is None:
        plan.run(args)
    else:
        _plan_there(args, device(args.device))


def _plan_there(args: argparse.Namespace, where: Device) -> None:
    """Plan for a device; without a model what is published is shown alone."""
    defaults = parser_of("plan")
    for name in ("io", "cpu_streams", "mirror"):
        if getattr(args, name) != defaults.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, and --device {args.device} about another: leave one out")
    rows = [r for r in published_comparison() if r.device == where.name]
    args.result.record = {"device": where.name}
    if args.model is not None:
        folder, options = resolve_model(args.model, args.revision), plan.plan_options(args)
        # Its memory is not this machine's, so no budget can be refused here.
        prepared = prepare(folder, **(options | {"memory": None}), least=True)
        calibration = where.calibration()
        best = prepared.planning.at(given_budget(args.memory, of=where.usable_bytes), calibration).plan
        compared = plan.compare(prepared, calibration, best, where.usable_bytes, where.name)
        plan.show(args, compared, [])
        asked = Path(args.model).name.lower().replace("_", "-")
        rows = [r for r in rows if r.model.lower().replace("_", "-") in asked]
    if rows:
        _show(where, rows)
    args.result.record["published"] = [{**vars(r), "predicted": True} for r in rows]


def _show(where: Device, rows: Sequence[ComparedRow]) -> None:
    title = f"The published system on {where.name}: predicted, not measured, from two rows of each table"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("table", "model", "resident", "published tok/s", "predicted", "error", ""):
        table.add_column(name, justify="left" if name in ("model", "") else "right", no_wrap=True)
    for r in rows:
        notes = {
            "calibration": r.used_for_calibration,
            "thrashes": r.thrashing_published,
            "above the cliff": r.above_cliff_predicted,
        }
        beyond = r.thrashing_published or r.above_cliff_predicted
        table.add_row(
            str(r.table),
            r.model,
            f"{r.resident} of {r.resident + r.streamed}",
            f"{r.published_tps:.2f}",
            "-" if beyond else f"{r.predicted_tps:.2f}",
            f"{100 * r.error:+.0f} %" if r.judged else "-",
            ", ".join(note for note, holds in notes.items() if holds),
        )
    console = plan_console()
    console.print(table)
    error = mean_error(rows)
    if error is not None:
        console.print(f"Mean error of the rows that were not used: {100 * error:.1f} %.")
    console.print(f"A process may use {format_size(where.usable_bytes)} there ({where.usable_source}).")
