"""``outcore plan --device``: a plan for a published device, and how well its system's own speeds are explained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outcore.checkpoint.find_model import resolve_model
from outcore.cli import plan
from outcore.cli.console import console
from outcore.errors import UsageError
from outcore.loading.preparation import prepare
from outcore.machine.memory import given_budget
from outcore.sizes import format_size

from ..devices import ComparedRow, Device, device, mean_error, published_comparison


def run(args: argparse.Namespace) -> None:
    """Run ``outcore plan``.

    Raises:
        UsageError: an unknown device, or flags that are about this machine.
    """
    if args.device is None:
        plan.run(args)
        return
    where, out = device(args.device), console()
    for name in ("io", "cpu_streams", "mirror"):
        if getattr(args, name) not in (None, "auto"):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, and --device {args.device} about another: leave one out")
    rows = [r for r in published_comparison() if r.device == where.name]
    record: dict[str, Any] = {"device": where.name}
    if args.model is not None:
        rows = [r for r in rows if _same(r.model, args.model)]
        # Its memory is not this machine's, so no budget can be refused here.
        options = plan.plan_options(args) | {"memory": None}
        prepared = prepare(resolve_model(args.model, args.revision), **options, least=True)
        found = prepared.planning.at(given_budget(args.memory, of=where.usable_bytes), where.calibration()).plan
        record = plan.show(prepared, where.calibration(), found, where.usable_bytes, [], where.name)
    if rows:
        _show_published(out, where, rows)
    args.result.record = record | {"published": [{**vars(r), "predicted": True} for r in rows]}


def _same(published: str, model: str) -> bool:
    return published.lower().replace("_", "-") in Path(model).name.lower().replace("_", "-")


def _show_published(out: Console, where: Device, rows: Sequence[ComparedRow]) -> None:
    title = f"The published system on {where.name}: predicted, not measured, from two rows of each table"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("table", "model", "resident", "published tok/s", "predicted", "error", ""):
        table.add_column(name, justify="left" if name in ("model", "") else "right", no_wrap=True)
    for r in rows:
        said = ["calibration"] if r.used_for_calibration else []
        said += ["thrashes"] if r.thrashing_published else []
        said += ["above the cliff"] if r.above_cliff_predicted else []
        beyond = r.thrashing_published or r.above_cliff_predicted
        table.add_row(
            str(r.table),
            r.model,
            f"{r.resident} of {r.resident + r.streamed}",
            f"{r.published_tps:.2f}",
            "-" if beyond else f"{r.predicted_tps:.2f}",
            f"{100 * r.error:+.0f} %" if r.judged else "-",
            ", ".join(said),
        )
    out.print(table)
    error = mean_error(rows)
    if error is not None:
        out.print(f"Mean error of the rows that were not used: {100 * error:.1f} %.")
    out.print(f"A process may use {format_size(where.usable_bytes)} there ({where.usable_source}).")
