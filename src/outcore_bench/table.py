"""A document as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outcore.sizes import format_size

from .document import Document
from .report.tables import BUSY_LEGEND, LEGEND, ReportTable, main_table, notes

WIDTH = 100
"""Characters of a line where standard output is no terminal."""


def show(document: Document, console: Console) -> None:
    """Print the machine, a row a measurement, and what there is to note."""
    m, model = document.machine, document.model
    computes_on = f"{m.gpu}, {m.cpu}" if m.gpu else m.cpu
    rates = [f"{r['best_gbps']:.2f}" for r in document.disk.get("measurements", [])]
    measured = f"; disk alone {'-'.join(dict.fromkeys((min(rates), max(rates))))} GB/s" if rates else ""
    lines = [
        f"{model.name}: {model.model_type}, {format_size(model.nbytes)}, {model.layers} layers",
        f"{computes_on}, {m.cores} cores, {format_size(m.memory_bytes)}; {m.filesystem}{measured}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if (table := main_table([document])) is not None:
        console.print(rich_table(table, console.width))
    console.print(LEGEND + BUSY_LEGEND * any(row.busy for row in document.rows), markup=False, highlight=False)
    for note in notes([document]):
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def rich_table(table: ReportTable, width: int) -> Table:
    """A table of the report, in so many characters; what stands in brackets goes below the rest."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0, width=min(width, WIDTH), show_edge=False)
    for i, column in enumerate(table.columns):
        head = column.replace("Efficiency", "Eff.").replace(" ", "\n")
        shown.add_column(head, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for line in table.lines:
        cells = line.cells if line.kind != "error" else (f"{line.cells[0]}: {line.cells[1]}",)
        shown.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells))
    return shown
