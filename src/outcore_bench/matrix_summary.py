"""What a matrix leaves behind beside its runs: ``matrix.json``. Schema: docs/bench.md."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outcore.machine.small_files import INDEX_BYTES, parse_json, read_small

from .document import BenchRow, Document, validated
from .matrix import Cell, Grid, GridPoint, size_text
from .runner import compare
from .verdict import Verdict, sentences, verdict

SCHEMA = "outcore-matrix/1"
SUMMARY = "matrix.json"
_OF_ROW = (
    "s_per_token", "decode_tps", "ttft_s", "resident_units", "streamed_units", "engine_bytes_per_token", "ceiling_s",
    "efficiency", "read_gbps", "disk_gbps", "disk_share", "stall_share", "io_share", "compute_share",
    "planned_peak_bytes", "peak_memory_bytes", "peak_rss_bytes", "cache", "notes",
)  # fmt: skip
"""What is kept of a row."""


@dataclass
class GridSummary:
    """A grid with what is known of it.

    Attributes:
        blank: a document with the machine, the model and the settings, without rows.
        chosen: the budgets were chosen from the model, not asked for.
    """

    blank: Document
    grid: Grid
    chosen: bool
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(raw: dict[str, Any]) -> GridSummary:
        """A summary from its JSON object; of the rows, what it keeps of them.

        Raises:
            KeyError, TypeError, ValueError, UsageError: it is not whole.
        """
        kept = {name: raw[name] for name in ("created", "command", "machine", "model", "settings")}
        blank = validated(Document, kept | {"disk": {"measurements": []}})
        grid = Grid(**{k: tuple(raw["grid"][k]) for k in ("memory", "io", "slots", "threads")})
        cells = [_cell(point) for point in raw["points"]]
        return GridSummary(blank, grid, raw["grid"]["memory_chosen"], cells, validated(list[str], raw["notes"]))

    def by_budget(self) -> Document | None:
        """The best row of each budget, as a document; None where nothing was measured."""
        found = self.verdict()
        if found is None:
            return None
        rows = [replace(c.row, label=c.point.label) for c in found.by_budget if c.row is not None]
        return replace(self.blank, rows=rows)

    def verdict(self) -> Verdict | None:
        """What the points measured so far say."""
        return verdict(self.cells)

    def lines(self) -> list[str]:
        """The verdict and what is to note, a sentence a line."""
        found = self.verdict()
        said = sentences(found, self.cells) if found is not None else []
        if unfit := [c for c in self.cells if c.state == "unfit"]:
            first = f"{unfit[0].point.label}: {unfit[0].unfit}"
            said.append(f"Not run: {len(unfit)} of {len(self.cells)} points do not fit; {first}")
        failures: dict[str | None, list[Cell]] = {}
        for cell in self.cells:
            if cell.state == "failed":
                failures.setdefault(cell.why, []).append(cell)
        for error, cells in failures.items():
            others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            said.append(f"Failed: {cells[0].point.label}{others}: {error}")
        if busy := sum(c.busy for c in self.cells):
            runs = len(self.cells) - len(unfit)
            said.append(f"Note: {busy} of {runs} runs met a busy machine; quote no number of them")
        return said + [f"Note: {note}" for note in self.notes]

    def compared(self) -> GridSummary:
        """The same with the ceilings and efficiency that take several rows."""
        # Copies, since what is said of a row depends on which others are there yet.
        cells = [c if c.row is None else replace(c, row=BenchRow.of(c.row.record())) for c in self.cells]
        rows = [c.row for c in cells if c.row is not None]
        rates = [
            {"best_gbps": r.reading.disk_gbps, "warm": r.setting.cache == "warm"} for r in rows if r.reading.disk_gbps
        ]
        blank = replace(self.blank, disk={"measurements": rates})
        compare(replace(blank, rows=rows))
        return replace(self, blank=blank, cells=cells)

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        whole = self.compared()
        document, found, axes = whole.blank, whole.verdict(), asdict(self.grid)
        return {
            "schema": SCHEMA,
            "created": document.created,
            "command": document.command,
            "machine": asdict(document.machine),
            "model": asdict(document.model),
            "settings": {k: v for k, v in document.settings.items() if k not in ("modes", *axes)},
            "grid": axes | {"memory_chosen": self.chosen},
            "disk": _rates(document, warm=False) | {f"warm_{k}": v for k, v in _rates(document, warm=True).items()},
            "points": [_point(c) for c in whole.cells],
            "verdict": None if found is None else _verdict(found),
            "notes": self.notes,
        }


def budgets_chosen(path: Path) -> tuple[int, ...] | None:
    """The budgets that were chosen from the model for the matrix whose summary this is; None if there is none."""
    try:
        raw = parse_json(read_small(path, INDEX_BYTES))
        grid = raw["grid"] if raw["schema"] == SCHEMA else {}
        memory = grid["memory"] if grid["memory_chosen"] else []
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = isinstance(memory, list) and all(type(n) is int and n > 0 for n in memory)
    return tuple(memory) or None if whole else None


def _rates(document: Document, *, warm: bool) -> dict[str, float]:
    rates = [m["best_gbps"] for m in document.disk["measurements"] if m["warm"] == warm]
    return {"gbps": statistics.median(rates), "least_gbps": min(rates), "most_gbps": max(rates)} if rates else {}


def _point(cell: Cell) -> dict[str, Any]:
    point, row = cell.point, cell.row
    record: dict[str, Any] = {
        "memory": size_text(point.memory),
        "memory_bytes": point.memory,
        "io": point.io,
        "slots": point.slots or None,
        "threads": point.threads or None,
        "state": cell.state,
        "why": cell.why,
        "file": point.file if row is not None else None,
    }
    if row is None or row.error is not None:
        return record
    kept = row.record()
    return record | {name: kept[name] for name in _OF_ROW}


def _cell(raw: dict[str, Any]) -> Cell:
    place = {"memory": raw["memory_bytes"], "io": raw["io"], "slots": raw["slots"] or 0, "threads": raw["threads"] or 0}
    point = validated(GridPoint, place)
    state, why = raw["state"], raw["why"]
    if state in ("unfit", "missing"):
        return Cell(point, unfit=why)
    row = {"mode": "outcore", "label": point.setting, "command": "", "budget_bytes": point.memory, "error": why}
    row |= {name: raw[name] for name in ("memory", "io", "slots", "threads")}
    row |= {name: raw[name] for name in _OF_ROW} if state == "measured" else {}
    cell = Cell(point, BenchRow.of(row))
    if cell.state != state or (cell.s_per_token is not None and not cell.s_per_token > 1e-12):
        raise ValueError(f"a point that is {state}, with {cell.s_per_token} seconds per token")
    return cell


def _verdict(found: Verdict) -> dict[str, Any]:
    return {
        "best": _point(found.best) if found.best is not None else None,
        "equals": [_point(c) for c in found.equals],
        "by_budget": [_point(c) for c in found.by_budget],
        "streamed_equals": [_point(c) for c in found.streamed_equals],
        "falls": [asdict(f) for f in found.falls],
    }
