"""A document as a table for the terminal, readable in 100 columns, and in 80 in rows of two lines."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outcore.sizes import format_size

from .document import BUSY, BenchRow, Document, Stat

WIDTH = 100
"""Characters of a line, and from which on a measurement's row takes one."""
NOTHING = "-"
_CACHED = {
    "cold": "read through the page cache; the files were dropped from it before every token",
    "warm": "read through the page cache; the files were read once before",
}
COLUMNS = ("", "memory", "layers¹", "tok/s (spread)", "TTFT", "GB/tok", "SSD GB/s²", "stall", "eff.³", "peak")
LEGEND = (
    "¹ resident + streamed. ² While reading, and that over what a plain reader gets.\n"
    "³ max(disk time, compute time) over the measured time a token."
)


def show(document: Document, console: Console) -> None:
    """Print the machine, a row a measurement, and what there is to note."""
    m, model, disk = document.machine, document.model, document.disk
    computes_on = f"{m.gpu}, {m.cpu}" if m.gpu else m.cpu
    rates = [r["best_gbps"] for r in disk.get("measurements", []) if not r["warm"]]
    measured = f"; disk alone {_range(rates)} GB/s" if rates else ""
    lines = [
        f"{model.name}: {model.model_type}, {format_size(model.nbytes)}, {model.layers} layers",
        f"{computes_on}, {m.cores} cores, {format_size(m.memory_bytes)}; {m.filesystem}{measured}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table(document, console.width))
    for line in LEGEND.splitlines():
        console.print(line, markup=False, highlight=False)
    for note, labels in _notes(document).items():
        which = "" if len(labels) == len(document.rows) else f"{'; '.join(labels)}: "
        console.print(f"Note: {which}{note}", markup=False, highlight=False, soft_wrap=True)


def table(document: Document, width: int = WIDTH) -> Table:
    """One row a measurement."""
    narrow = width < WIDTH
    shown = Table(box=box.SIMPLE_HEAD, padding=0, width=min(width, WIDTH), show_edge=not narrow)
    for i, name in enumerate(COLUMNS):
        head = _in_two_lines(name) if narrow else name
        shown.add_column(head, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for row in document.rows:
        if row.error is not None:
            shown.add_row(Text(row.label), _memory(row), *[NOTHING] * (len(COLUMNS) - 2))
            continue
        shown.add_row(
            Text(row.label),
            _memory(row),
            NOTHING if row.resident_units is None else f"{row.resident_units}+{row.streamed_units}",
            _in_two_lines(_spread(row.decode_tps)) if narrow else _spread(row.decode_tps),
            NOTHING if row.ttft_s is None else _seconds(row.ttft_s.median),
            _gigabytes(row),
            _ssd(row),
            _percent(row.stall_share),
            _percent(row.efficiency),
            NOTHING if row.peak_memory_bytes is None else format_size(row.peak_memory_bytes),
        )
    return shown


def _notes(document: Document) -> dict[str, list[str]]:
    """What to say below the table → the rows that it is said of."""
    found: dict[str, list[str]] = {}
    for row in document.rows:
        notes = list(row.notes)
        if row.error is not None:
            notes.append(row.error)
        if row.same_tokens is False:
            notes.append("other tokens than mlx-lm's")
        if row.cache in ("cold", "warm"):
            notes.append(_CACHED[row.cache])
        if row.limit_bytes is not None:
            notes.append(f"run under a limit of {format_size(row.limit_bytes)}, page cache counted")
        for note in notes:
            note = "the machine was busy; quote no number of this" if note.startswith(BUSY) else note
            found.setdefault(note, []).append(row.label)
    return found


def _memory(row: BenchRow) -> str:
    # Where the layers to keep were given, the budget is only what was free.
    return NOTHING if row.memory is None or row.budget_bytes is None else format_size(row.budget_bytes)


def _spread(stat: Stat | None) -> str:
    if stat is None:
        return NOTHING
    digits = max(0, 2 - len(str(int(stat.median)))) + (1 if stat.median < 10 else 0)
    least, most = (f"{x:.{digits}f}" for x in (stat.least, stat.most))
    return f"{stat.median:.{digits}f}" + (f" ({least}-{most})" if stat.n > 1 else "")


def _in_two_lines(text: str) -> str:
    """What stands before a bracket, or a unit, and the rest below it."""
    return text.replace(" (", "\n(").replace("/tok", "/\ntok").replace("SSD ", "SSD\n")


def _seconds(s: float) -> str:
    return f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.2f} s"


def _gigabytes(row: BenchRow) -> str:
    nbytes = row.engine_bytes_per_token
    if nbytes is None and row.device_bytes_per_token is not None and row.io != "none":
        nbytes = row.device_bytes_per_token + (row.cached_bytes_per_token or 0)
    if nbytes is None:
        return NOTHING
    return f"{nbytes / 1e9:.{3 if nbytes < 1e8 else 2}f}"


def _ssd(row: BenchRow) -> str:
    if row.read_gbps is None:
        return NOTHING
    share = f" {100 * row.disk_share:.0f}%" if row.disk_share is not None else ""
    return f"{row.read_gbps:.2f}{share}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}%"


def _range(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least}-{most}"
