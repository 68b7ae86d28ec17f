"""What a matrix leaves behind beside its runs: ``matrix.json``. Schema: docs/bench.md."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from outcore.machine.small_files import INDEX_BYTES, parse_json, read_small

from .document import BenchRow, Document, Machine, Model
from .matrix import Cell, Grid, GridPoint, size_text
from .runner import compare
from .verdict import Verdict, verdict

SCHEMA = "outcore-matrix/1"
SUMMARY = "matrix.json"
_NUMBERS = ("resident_units", "streamed_units", "engine_bytes_per_token", "ceiling_s", "efficiency")
_RATES = ("read_gbps", "disk_gbps", "disk_share", "stall_share", "io_share", "compute_share")
_MEMORY = ("planned_peak_bytes", "peak_memory_bytes", "peak_rss_bytes")
_STATS = ("s_per_token", "decode_tps", "ttft_s")
_OF_ROW = (*_NUMBERS, *_RATES, *_MEMORY, "cache", "notes")


@dataclass
class GridSummary:
    """A grid with what is known of it.

    Attributes:
        blank: a document with the machine, the model and the settings, without rows.
        chosen: the budgets were chosen from the model, not asked for.
        heatmap: names of the files that it was drawn to.
    """

    blank: Document
    grid: Grid
    chosen: bool
    cells: list[Cell]
    heatmap: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(raw: dict[str, Any]) -> GridSummary:
        """A summary from its JSON object; of the rows, what it keeps of them.

        Raises:
            KeyError, TypeError, ValueError, UsageError: it is not whole.
        """
        blank = Document(
            raw["created"],
            raw["command"],
            Machine(**raw["machine"]),
            Model(**raw["model"]),
            raw["settings"],
            {"measurements": []},
        )
        axes = {k: tuple(raw["grid"][k]) for k in ("memory", "io", "slots", "threads")}
        cells = [_cell(point) for point in raw["points"]]
        return GridSummary(blank, Grid(**axes), raw["grid"]["memory_chosen"], cells, raw["heatmap"], raw["notes"])

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

    def compared(self) -> tuple[Document, list[Cell]]:
        """All rows in one document and in their cells, with the ceilings and efficiency that take several rows."""
        # Copies, since what is said of a row depends on which others are there yet.
        copies = {c.point: replace(c.row, notes=[*c.row.notes]) for c in self.cells if c.row is not None}
        rows = list(copies.values())
        rates = [{"best_gbps": r.disk_gbps, "warm": r.cache == "warm"} for r in rows if r.disk_gbps is not None]
        document = replace(self.blank, rows=rows, disk={"measurements": rates})
        compare(document)
        return document, [replace(c, row=copies.get(c.point)) for c in self.cells]

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        document, cells = self.compared()
        return {
            "schema": SCHEMA,
            "created": document.created,
            "command": document.command,
            "machine": asdict(document.machine),
            "model": asdict(document.model),
            "settings": {k: v for k, v in document.settings.items() if k not in ("modes", *asdict(self.grid))},
            "grid": asdict(self.grid) | {"memory_chosen": self.chosen},
            "disk": _rates(document, warm=False) | {f"warm_{k}": v for k, v in _rates(document, warm=True).items()},
            "points": [_point(c) for c in cells],
            "verdict": _verdict(verdict(cells)),
            "heatmap": self.heatmap,
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
    stats = {k: asdict(s) if (s := getattr(row, k)) is not None else None for k in _STATS}
    return record | stats | {k: getattr(row, k) for k in _OF_ROW}


def _cell(raw: dict[str, Any]) -> Cell:
    point = GridPoint(raw["memory_bytes"], raw["io"], raw["slots"] or 0, raw["threads"] or 0)
    state, why = raw["state"], raw["why"]
    if state in ("unfit", "missing"):
        return Cell(point, unfit=why)
    kept = {k: raw[k] for k in (*_STATS, *_OF_ROW)} if state == "measured" else {}
    row = BenchRow.of(
        {
            "mode": "outcore",
            "label": point.setting,
            "command": "",
            "memory": raw["memory"],
            "budget_bytes": point.memory,
            "slots": raw["slots"],
            "threads": raw["threads"],
            "io": point.io,
            "error": why,
            **kept,
        }
    )
    cell = Cell(point, row)
    if cell.state != state or (cell.s_per_token is not None and not cell.s_per_token > 1e-12):
        raise ValueError(f"a point that is {state}, with {cell.s_per_token} seconds per token")
    return cell


def _verdict(found: Verdict | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "best": _point(found.best) if found.best is not None else None,
        "equals": [_point(c) for c in found.equals],
        "by_budget": [_point(c) for c in found.by_budget],
        "streamed_equals": [_point(c) for c in found.streamed_equals],
        "falls": [asdict(f) for f in found.falls],
        "steepest": asdict(found.steepest) if found.steepest is not None else None,
        "defects": [asdict(d) for d in found.defects],
    }
