"""``outcore plan`` on several machines: what each of them has and does, and what all take together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from outcore.calibration.calibrate import calibrated
from outcore.checkpoint.find_model import name_of
from outcore.cli.console import PlainConsole
from outcore.cli.engine import model_folder, progress_bar
from outcore.cli.output import tell
from outcore.cli.plan import FEWER_TOKENS, plan_options
from outcore.errors import BudgetError
from outcore.loading.preparation import Preparation, prepare
from outcore.sizes import format_size
from outcore_cluster.link_times import MOST
from outcore_cluster.rank_share import RankShare
from outcore_cluster.ranks_plan import RankPart, RanksPlan

from .alone import SingleMachine, all_alone, beside

WIDTH, WIDE = 120, 110
"""Characters of a line where standard output is no terminal, and from which on a machine's row takes one."""


def run(args: argparse.Namespace) -> None:
    """Measure each machine where it is not known, have each make its plan, and show all of them on the first.

    Raises:
        BudgetError: a budget is too small.
    """
    folder = model_folder(args)
    options = plan_options(args)
    prepared = _prepared(folder, options, measure=not args.no_calibrate)
    forecast = _forecast(prepared)
    assert forecast is not None  # there are ranks
    alone = all_alone(args.ranks.link, folder, options)
    name = name_of(folder)
    console = PlainConsole(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    for line in (
        _together(name, forecast),
        beside(forecast, alone),
        _layout(forecast),
    ):
        console.print(line, markup=False)
    console.print(ranks_table(forecast, alone, console.width))
    notes = _notes(prepared)
    for note in notes:
        console.print(f"Note: {note}", markup=False)
    args.result.record = {
        "model": name,
        **forecast.record(),
        "alone": [asdict(each) for each in alone],
        "notes": notes,
    }
    sys.stdout.flush()


TURNS = 2
"""Which layers are a machine's depends on what was measured, so some may be of a kind that was not."""


def _prepared(folder: Path, options: dict[str, Any], *, measure: bool) -> Preparation:
    """Opened and planned for; all ranks measure, or none does, so that they ask each other the same."""
    for _ in range(TURNS if measure else 0):
        opened = prepare(folder, **options, least=True)
        if (forecast := _forecast(opened)) is not None and forecast.calibrated:
            break
        with progress_bar() as bar:
            calibrated(opened.profile, folder, opened.cpu_streams, progress=bar.measuring, note=tell)
    try:
        return prepare(folder, **options)
    except BudgetError as e:
        raise BudgetError(f"{e}{FEWER_TOKENS}", e.smallest) from e


def _forecast(prepared: Preparation) -> RanksPlan | None:
    share = prepared.profile.share
    return share.forecast if isinstance(share, RankShare) else None


def _together(name: str, shared: RanksPlan) -> str:
    link = shared.link
    slowest = f"{1000 * max(link.latency_s):.2g} ms"
    if (rate := min(link.rate)) < MOST:
        slowest += f" and {format_size(round(rate))}/s"
    slowest += " to the slowest of them"
    return (
        f"{name} on {len(shared.parts)} machines: predicted {1 / shared.token_s:.3g} tokens a second "
        f"({shared.token_s:.3g} s a token), {shared.ttft_s:.3g} s to the first (behind a prompt of {shared.prompt} "
        f"tokens, nothing read yet); {slowest}."
    )


def _layout(shared: RanksPlan) -> str:
    return {
        "in turn": "Layers lie in turn: each machine reads its next one while another computes.",
        "in blocks": "Layers lie in blocks: each machine's follow each other, so that little goes between them.",
    }.get(shared.layout, "All layers are on one machine.")


def ranks_table(shared: RanksPlan, alone: Sequence[SingleMachine], width: int = WIDTH) -> Table:
    """A row for each machine; in less than ``WIDE`` characters, rows of two lines."""
    narrow = width < WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for title in ("rank", "host", "layers", "resident", "read a token", "disk", "memory", "alone", ""):
        head = title.replace("read a ", "read a\n") if narrow else title
        table.add_column(
            head,
            justify="left" if title in ("host", "") else "right",
            no_wrap=title != "host",
            overflow="fold",
        )
    for rank, part in enumerate(shared.parts):
        disk = f"{format_size(round(part.read_gbps * 1e9))}/s"
        memory = f"{format_size(part.peak_bytes)} of {format_size(part.budget_bytes)}"
        read = format_size(part.bytes_per_token) if part.bytes_per_token else "-"
        by_itself, basis = alone[rank].short, _basis(part)
        if narrow:
            disk, memory = disk.replace(" ", "\n"), memory.replace(" of ", " of\n")
            by_itself, basis = by_itself.replace("needs ", "needs\n"), basis.replace(" ", "\n", 1)
        table.add_row(str(rank), part.host, str(part.layers), str(part.resident), read, disk, memory, by_itself, basis)
    return table


def _basis(part: RankPart) -> str:
    return "" if part.calibrated else "not measured"


def _notes(prepared: Preparation) -> list[str]:
    shared = _forecast(prepared)
    notes = list(prepared.notes)
    if shared is None or not shared.calibrated:
        notes.append("predicted from assumptions: not all machines were measured for this model (outcore calibrate)")
    return notes
