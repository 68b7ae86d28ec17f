"""``outcore plan --device``: plans for a published device instead of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.cli import plan
from outcore.cli.arguments import loading_options
from outcore.cli.commands import parser_of
from outcore.cli.console import console, table
from outcore.decode.budget import given_budget
from outcore.decode.preparation import prepare
from outcore.errors import UsageError
from outcore.sizes import format_size

from .devices import Device, PublishedRow, device


def run(args: argparse.Namespace) -> None:
    if args.device is None:
        plan.run(args)
        return
    where, defaults = device(args.device), parser_of("plan")
    for name in ("io", "cpu_streams", "mirror"):
        if getattr(args, name) != defaults.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is about this machine, --device {args.device} about another; leave one out")
    rows = where.published()
    args.result.record = {"device": where.name}
    if args.model is not None:
        folder, options = resolve_model(args.model, args.revision), loading_options(args)
        # No budget, as one for the device may be too large for this machine.
        prepared = prepare(folder, **(options | {"memory": None}), least=True)
        calibration = where.calibration()
        best = prepared.planning.at(given_budget(args.memory, of=where.usable_bytes), calibration).plan
        args.result.record = plan.show(prepared, calibration, best, where.usable_bytes, device=where.name)
        name = Path(args.model).name.lower().replace("_", "-")
        rows = [r for r in rows if r.model.lower().replace("_", "-") in name]
    if rows:
        _show(where, rows)
    args.result.record["published"] = [asdict(r) | {"tps": r.tps[where.name]} for r in rows]


def _show(where: Device, rows: Sequence[PublishedRow]) -> None:
    title = f"Published results on {where.name}, by the paper's own system"
    lines = []
    for r in rows:
        swaps = "thrashes" if where.name in r.swaps else ""
        lines.append([str(r.table), r.model, f"{r.resident} of {r.layers}", f"{r.tps[where.name]:.2f}", swaps])
    out = console()
    out.print(table([">table", "model", ">resident", ">tokens/s", ""], lines, title))
    out.print(f"A process may use {format_size(where.usable_bytes)} there ({where.usable_source}).")
