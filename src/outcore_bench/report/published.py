"""The paper's tables 2 to 9, with rows of ours beside theirs where a result has the same model and residency."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..devices import DEVICES, PublishedRow, published_data, published_rows
from ..document import BenchRow, Document
from .inputs import Inputs
from .tables import NOTHING, Line, ReportTable, machine_name, number, percent, resident_share, size, speed

# Layers resident may differ by this share and still be the same row: a model of 32 layers against one of 32.
_SAME_SHARE = 0.01
_WITH_PERPLEXITY, _OF_WHOLE_MEMORY = 2, 3
"""Tables that show perplexities, and memory with everything resident."""

_SPEEDS = {d.name: f"{d.name}, tokens/s" for d in DEVICES}
_COLUMNS = ("", "Perplexity", *_SPEEDS.values(), "Ours, tokens/s", "Resident", "Memory", "I/O share", "Source")


@dataclass(frozen=True)
class PublishedTable:
    """One table; ``ours`` counts its rows that come from results."""

    number: int
    title: str
    table: ReportTable
    ours: int


def model_key(name: str, bits: int | None = None, dtype: str | None = None) -> str:
    """A name as it can be compared: ``mlx-community/Qwen3.5-9B-MLX-8bit`` is ``qwen3.5-9b-8bit``.

    Args:
        name: a folder, a Hub name, or a name in the paper.
        bits: of the quantization, for names that do not tell.
        dtype: of weights that are not quantized, likewise.
    """
    text = name.lower().replace("_", "-").rstrip("/").rsplit("/", 1)[-1]
    model = re.search(r"qwen-?3\.?5-?(\d+(?:\.\d+)?b)(?![a-z0-9])", text)
    if model is None or re.search(r"-a\d+(?:\.\d+)?b", text):
        return text
    width = re.search(r"(?<!\d)(\d+)-?bits?(?![a-z0-9])", text)
    if width:
        kind = f"{width[1]}bit"
    elif "bf16" in text or "bfloat16" in text:
        kind = "bf16"
    else:
        kind = f"{bits}bit" if bits else {"bfloat16": "bf16", None: "?"}.get(dtype, str(dtype))
    return f"qwen3.5-{model[1]}-{kind}"


def published_tables(inputs: Inputs) -> list[PublishedTable]:
    """All tables, in the paper's order."""
    tables = []
    for raw in published_data()["tables"]:
        lines: list[Line] = []
        for row in published_rows():
            if row.table == raw["number"]:
                lines += [_theirs(row), *_ours(inputs, row)]
        table = ReportTable(_COLUMNS, tuple(lines), text=("Source",)).without_empty_columns()
        tables.append(PublishedTable(raw["number"], raw["title"], table, sum(line.kind == "ours" for line in lines)))
    return tables


def _theirs(row: PublishedRow) -> Line:
    cells = {_SPEEDS[name]: str(tps) for name, tps in row.tps.items()}
    cells |= {
        "": f"{row.label}{': ' * bool(row.label)}{row.model}, {row.resident} of {row.layers} layers",
        "Perplexity": f"{row.ppl:.3f}" if row.ppl is not None else NOTHING,
        "Resident": size(row.whole_mb * 1e6) if row.whole_mb is not None else NOTHING,
        "Memory": size(row.memory_mb * 1e6) if row.memory_mb is not None else NOTHING,
        "I/O share": percent(row.io_share),
        "Source": "published" + (f"; {row.note}" if row.note else ""),
    }
    return _line(cells)


def _ours(inputs: Inputs, theirs: PublishedRow) -> Iterator[Line]:
    key, share = model_key(theirs.model), theirs.resident / theirs.layers
    for p in inputs.perplexities if theirs.table == _WITH_PERPLEXITY else ():
        for told in p.rows:
            if told.ppl is not None and model_key(told.model, told.bits, told.dtype or "bfloat16") == key:
                where = f"measured on {p.machine.get('cpu') or 'some machine'}"
                yield _line({"": "ours: perplexity", "Perplexity": f"{told.ppl:.3f}", "Source": where}, "ours")
    for d in inputs.documents:
        bits = (d.model.quantization or {}).get("bits")
        if model_key(d.model.name, bits if isinstance(bits, int) else None, d.model.dtype) != key:
            continue
        whole = next((r for r in d.rows if resident_share(r) == 1 and not r.error), None)
        for row in d.rows:
            if _is_same(row, share):
                yield _line(_cells(d, row, whole if theirs.table == _OF_WHOLE_MEMORY else None), "ours")


def _is_same(row: BenchRow, share: float) -> bool:
    """Whether a row has that share of its layers resident, in this project's loop or, with all of them, mlx-lm's."""
    found = resident_share(row)
    told = speed(row) is not None or row.speed.predicted_tps is not None
    modes = ("outcore", "mlx-lm") if share == 1 else ("outcore",)
    return row.error is None and told and row.mode in modes and found is not None and abs(found - share) <= _SAME_SHARE


def _cells(d: Document, row: BenchRow, whole: BenchRow | None) -> dict[str, str]:
    measured = speed(row)
    return {
        "": f"ours: {row.label}",
        "Ours, tokens/s": number(row.speed.predicted_tps if measured is None else measured),
        "Resident": size(whole.use.peak_memory_bytes) if whole is not None else NOTHING,
        "Memory": size(row.use.peak_memory_bytes),
        "I/O share": percent(row.reading.io_share),
        "Source": f"{'predicted for' if measured is None else 'measured on'} {machine_name(d.machine)}",
    }


def _line(cells: dict[str, str], kind: str = "") -> Line:
    return Line(tuple(cells.get(column, NOTHING) for column in _COLUMNS), kind)
