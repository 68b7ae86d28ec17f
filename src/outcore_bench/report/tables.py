"""Makes tables of text from result documents, for the page, Markdown and the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outcore.checks import parse_size
from outcore.sizes import format_size

from ..document import BUSY, TIE, BenchRow, Document, Machine, Perplexities, Stat

NOTHING = ""
LEGEND = (
    "Layers: resident + streamed. Tokens/s: median (lowest–highest of the repeats). Ceiling: the most that the disk or "
    "the computation, whichever is slower, allows. Stall: share of the time spent waiting for reads. SSD: rate while "
    "reading (as a share of plain parallel reads)."
)
BUSY_LEGEND = (
    " *: other programs used the machine right before: stop them and measure again; reports leave such rows out."
)


@dataclass(frozen=True)
class Line:
    """A row of a table. ``kind``: ``group`` (a heading), ``error`` (its cells are a label and an error) or empty."""

    cells: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table. ``text``: which columns have text, besides the first; all others have numbers."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    text: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple("text" if i == 0 or c in self.text else "number" for i, c in enumerate(self.columns))

    def without_empty_columns(self) -> ReportTable:
        full = [line for line in self.lines if line.kind not in ("group", "error")]
        keep = [i for i in range(len(self.columns)) if i == 0 or any(line.cells[i] for line in full)]
        lines = tuple(
            Line(tuple(line.cells[i] for i in keep), line.kind) if line in full else line for line in self.lines
        )
        return ReportTable(tuple(self.columns[i] for i in keep), lines, self.text)


def number(value: float | None) -> str:
    """Formats a number with three significant digits, without an exponent: 1234, 68.3, 1.70, 0.0312."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.2e}".split("e")[1])
    return f"{value:.{min(max(0, 2 - exponent), 12)}f}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def size(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else format_size(round(nbytes))


def spread(stat: Stat | None) -> str:
    if stat is None:
        return NOTHING
    median = number(stat.median)
    return median if stat.n < 2 else f"{median} ({number(stat.least)}–{number(stat.most)})"


def speed(row: BenchRow) -> float | None:
    return row.speed.decode_tps.median if row.speed.decode_tps else None


def ceiling(row: BenchRow) -> float | None:
    return 1 / row.ceiling.ceiling_s if row.ceiling.ceiling_s else None


def resident_share(row: BenchRow) -> float | None:
    resident, streamed = row.setting.resident_units, row.setting.streamed_units
    if resident is not None and streamed is not None:
        return resident / (resident + streamed) if resident + streamed else None
    return {"mlx-lm": 1.0, "plain": 0.0}.get(row.mode)


def streams(row: BenchRow) -> bool:
    share = resident_share(row)
    return share is not None and share < 1


def machine_name(machine: Machine) -> str:
    if machine.gpu and "gpu" in machine.device.lower():
        return machine.gpu
    cpu = re.sub(r"\((R|TM)\)", "", machine.cpu)
    return f"{cpu}, {machine.cores} cores"


def document_name(document: Document, documents: Sequence[Document]) -> str:
    names = (document.model.name, machine_name(document.machine), document.created[:16].replace("T", " "))
    return " · ".join(names if len(documents) > 1 else names[:1])


def machines_table(documents: Sequence[Document]) -> ReportTable | None:
    groups: dict[tuple[object, ...], list[Document]] = {}
    for d in documents:
        m = d.machine
        groups.setdefault((m.cpu, m.cores, m.gpu, m.device, m.memory_bytes, m.filesystem, m.kernel), []).append(d)
    lines = []
    for group in groups.values():
        m = group[0].machine
        rates = [r.reading.disk_gbps for d in group for r in d.rows if r.reading.disk_gbps is not None]
        versions = (f"{name} {m.versions[name]}" for name in ("mlx", "mlx-lm", "outcore") if name in m.versions)
        cells = (
            machine_name(m),
            size(m.memory_bytes),
            "–".join(dict.fromkeys(map(number, (min(rates), max(rates))))) + " GB/s" if rates else NOTHING,
            m.filesystem,
            ", ".join((m.kernel, f"Python {m.python}", *versions)),
            m.git_commit[:10] + (f" + {m.git_changed_files} changed files" if m.git_changed_files else ""),
        )
        lines.append(Line(cells))
    columns = ("Machine", "Memory", "Disk", "File system", "Software", "Commit")
    return ReportTable(columns, tuple(lines), text=columns[3:]).without_empty_columns() if lines else None


def budget(row: BenchRow) -> str:
    setting = row.setting
    if setting.memory == "auto":
        return f"auto ({size(setting.budget_bytes)})" if setting.budget_bytes else "auto"
    return setting.memory or (f"limit {size(setting.limit_bytes)}" if setting.limit_bytes is not None else NOTHING)


def notes(documents: Sequence[Document]) -> tuple[str, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for d in documents:
        heading = f"{document_name(d, documents)}, " if len(documents) > 1 else ""
        for row in d.rows:
            for note in row.notes:
                found.setdefault((heading, note), []).append(row.label)
    return tuple(f"{heading}{'; '.join(which)}: {note}" for (heading, note), which in found.items())


def left_out(documents: Sequence[Document]) -> tuple[str, ...]:
    """For each document, which rows of a busy machine a report leaves out, why, and how to measure them again."""
    lines = []
    for d in documents:
        said = [line for line in notes([d]) if f": {BUSY}" in line]
        heading = f"{document_name(d, documents)}: " * (len(documents) > 1)
        lines += [f"{heading}{'. '.join(said)}. Stop them, then measure again: {d.command}"] * bool(said)
    return tuple(lines)


def main_table(documents: Sequence[Document]) -> ReportTable | None:
    lines: list[Line] = []
    for d in documents:
        if d.rows and len(documents) > 1:
            lines.append(Line((document_name(d, documents),), "group"))
        for row in d.rows:
            if row.error is not None:
                lines.append(Line((row.label, row.error), "error"))
            else:
                lines.append(Line((row.label + " *" * row.busy, *(cell(row) for cell in _MAIN.values()))))
    return ReportTable(("", *_MAIN), tuple(lines), text=("Tokens",)).without_empty_columns() if lines else None


def _layers(row: BenchRow) -> str:
    layers = (row.setting.resident_units, row.setting.streamed_units)
    return NOTHING if None in layers else f"{layers[0]}+{layers[1]}"


def _rate(row: BenchRow) -> str:
    rate, share = row.reading.read_gbps, row.reading.disk_share
    return f"{number(rate)} ({percent(share)})" if share else number(rate)


_MAIN: dict[str, Callable[[BenchRow], str]] = {
    "Memory": budget,
    "Layers": _layers,
    "Tokens/s": lambda row: spread(row.speed.decode_tps),
    "TTFT": lambda row: f"{number(row.speed.ttft_s.median)} s" if row.speed.ttft_s else NOTHING,
    "Predicted": lambda row: number(row.speed.predicted_tps),
    "Ceiling": lambda row: number(ceiling(row)),
    "Efficiency": lambda row: percent(row.ceiling.efficiency),
    "Stall": lambda row: percent(row.reading.stall_share),
    "SSD GB/s": _rate,
    "Peak": lambda row: size(row.use.peak_memory_bytes),
    "Tokens": lambda row: {True: "= mlx-lm", False: "DIFFERENT", None: NOTHING}[row.same_tokens],
}


def perplexity_table(perplexities: Sequence[Perplexities]) -> ReportTable | None:
    lines = []
    for p in perplexities:
        for row in p.rows:
            error = NOTHING if row.ppl_error is None else f" ± {row.ppl_error:.3f}"
            cells = (
                row.model,
                f"{row.bits} bit" if row.bits else row.dtype or "not quantized",
                NOTHING if row.ppl is None else f"{row.ppl:.3f}{error}",
                NOTHING if row.streamed_ppl is None else f"{row.streamed_ppl:.3f}{error if row.ppl is None else ''}",
                size(row.weight_bytes),
            )
            lines.append(Line(cells))
    columns = ("Model", "Weights in", "Perplexity", "Streamed", "Weights")
    return ReportTable(columns, tuple(lines), text=("Weights in",)).without_empty_columns() if lines else None


def start(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Returns, of the rows within ``TIE`` of the fastest, the one with the least memory, then slots; rows of
    a busy machine do not count."""
    measured = [r for r in rows if r.error is None and r.speed.s_per_token is not None and not r.busy]
    limit = (1 + TIE) * min(map(_seconds, measured), default=0.0)
    fast = [r for r in measured if _seconds(r) <= limit]
    return min(fast, key=lambda r: (_memory(r), r.setting.slots or 0), default=None)


def by_budget(rows: Sequence[BenchRow]) -> list[BenchRow]:
    budgets = sorted({_memory(r) for r in rows})
    found = (start([r for r in rows if _memory(r) == budget]) for budget in budgets)
    return [r for r in found if r is not None]


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    lines, first = [], start(rows)
    if first is not None:
        peak = first.use.peak_memory_bytes
        best = f"Best: {first.label}: {1 / _seconds(first):.3g} tokens/s, {_seconds(first):.3g} s per token"
        best += f", peak {format_size(peak)}" if peak is not None else ""
        same = sum(r is not first and r.error is None and not r.busy and _as_fast(r, first) for r in rows)
        lines.append(
            best + (f"; {same} more are as fast (within {100 * TIE:.0f} %, or their repeats overlap)" if same else "")
        )
    if errors := [r for r in rows if r.error is not None]:
        lines.append(f"No numbers: {len(errors)} of {len(rows)} rows; {errors[0].label}: {errors[0].error}")
    if busy := sum(r.busy for r in rows):
        lines.append(f"Note: {busy} of {len(rows)} rows ran on a busy machine and do not count: measure again")
    return lines


def place(row: BenchRow) -> tuple[int, str]:
    return _memory(row), row.label


def _memory(row: BenchRow) -> int:
    return parse_size(row.setting.memory) if row.setting.memory else 0


def _seconds(row: BenchRow) -> float:
    assert row.speed.s_per_token is not None
    return row.speed.s_per_token.median


def _as_fast(row: BenchRow, best: BenchRow) -> bool:
    a, b = row.speed.s_per_token, best.speed.s_per_token
    return a is not None and b is not None and (a.median <= (1 + TIE) * b.median or a.least <= b.most)
