"""The paper's tables 2 to 9, with rows of ours beside theirs where a result has the same model and residency."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..devices import published_data
from ..document import BenchRow, Document
from .inputs import Inputs
from .tables import NOTHING, Line, ReportTable, machine_name, number, percent, resident_share, size, speed

# Layers resident may differ by this share and still be the same row: a model of 32 layers against one of 32.
_SAME_SHARE = 0.01

_MAC, _PAD, _PHONE = "M2 Ultra, tokens/s", "iPad M3, tokens/s", "iPhone A17, tokens/s"
_COLUMNS = ("", "Perplexity", _MAC, _PAD, _PHONE, "Ours, tokens/s", "Resident", "Memory", "I/O share", "Source")

_TABLES = (
    (2, "everything resident, Mac Studio", "full_resident_mac_studio", None, 1.0),
    (3, "memory with no layer resident", "memory_reduction_at_0_resident", None, 0.0),
    (4, "Qwen3.5-9B-8bit by layers resident, Mac Studio", "mac_studio_9b_8bit", "Qwen3.5-9B-8bit", None),
    (5, "everything resident on 8 GB devices", "device_baseline", None, 1.0),
    (6, "no layer resident on 8 GB devices", "device_streaming", None, 0.0),
    (7, "Qwen3.5-9B-6bit by budget", "hybrid_9b_6bit", "Qwen3.5-9B-6bit", None),
    (8, "Qwen3.5-9B-6bit with adaptive residency, iPad", "adaptive_9b_6bit_ipad", "Qwen3.5-9B-6bit", None),
    (9, "Qwen3.5-4B-4bit by layers resident", "sweep_4b_4bit", "Qwen3.5-4B-4bit", None),
)
"""Number, title and key of each; the model and the share of layers that are resident, where a row does not say them."""


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
    elif bits:
        kind = f"{bits}bit"
    else:
        kind = {"bfloat16": "bf16", None: "?"}.get(dtype, str(dtype))
    return f"qwen3.5-{model[1]}-{kind}"


def published_tables(inputs: Inputs) -> list[PublishedTable]:
    """All tables, in the paper's order."""
    tables = []
    for of, title, key, model, share in _TABLES:
        lines: list[Line] = []
        for raw in published_data()[key]:
            lines.append(_theirs(of, raw))
            lines += _ours(inputs, of, raw, raw.get("model", model), _share(raw) if share is None else share)
        table = ReportTable(_COLUMNS, tuple(lines), text=("Source",)).without_empty_columns()
        tables.append(PublishedTable(of, title, table, sum(line.kind == "ours" for line in lines)))
    return tables


def _share(raw: dict[str, Any]) -> float:
    return raw["resident"] / raw.get("layers", 32) if isinstance(raw["resident"], int) else 1.0


def _theirs(of: int, raw: dict[str, Any]) -> Line:
    resident = f"{raw.get('resident')} of {raw.get('layers', 32)} layers"
    name = str(raw.get("model") or (resident if isinstance(raw["resident"], int) else raw["resident"]))
    if of == 7:
        name = f"{raw['budget_gb'] or 'no'} {'GB' if raw['budget_gb'] else 'budget'}: {name}"
    tps = {_MAC: None if of == 8 else raw.get("tps"), _PAD: raw.get("ipad_tps"), _PHONE: raw.get("iphone_tps")}
    if of == 8:
        name, tps[_PAD] = f"{raw['mode']}: {name}", raw["tps"]
    peak = raw.get("mem_gb", raw.get("streaming_gb"))
    cells: dict[str, Any] = {column: NOTHING if value is None else str(value) for column, value in tps.items()}
    cells |= {
        "": name,
        "Perplexity": f"{raw['ppl']:.3f}" if "ppl" in raw else NOTHING,
        "Resident": f"{raw['normal_gb']:.2f} GB" if "normal_gb" in raw else NOTHING,
        "Memory": f"{peak:.2f} GB" if peak is not None else f"{raw['mem_mb']} MB",
        "I/O share": percent(raw["io_pct"] / 100) if "io_pct" in raw else NOTHING,
        "Source": "published" + ": M2 Ultra" * (of in (2, 4)) + (f"; {raw['note']}" if "note" in raw else ""),
    }
    return Line(tuple(cells.get(column, NOTHING) for column in _COLUMNS))


def _ours(inputs: Inputs, of: int, raw: dict[str, Any], model: str, share: float) -> Iterator[Line]:
    key = model_key(model)
    if of == 2:
        for p in inputs.perplexities:
            for told in p.rows:
                if told.ppl is not None and model_key(told.model, told.bits, told.dtype or "bfloat16") == key:
                    where = f"measured on {p.machine.get('cpu') or 'some machine'}"
                    yield _line({"": "ours: perplexity", "Perplexity": f"{told.ppl:.3f}", "Source": where})
    for d in inputs.documents:
        bits = (d.model.quantization or {}).get("bits")
        if model_key(d.model.name, bits if isinstance(bits, int) else None, d.model.dtype) != key:
            continue
        for row in d.rows:
            if _is_same(row, share, of, raw):
                whole = next((r for r in d.rows if of == 3 and resident_share(r) == 1 and not r.error), None)
                yield _line(_cells(d, row, whole))


def _is_same(row: BenchRow, share: float, of: int, raw: dict[str, Any]) -> bool:
    """Whether a row has that share of its layers resident, in this project's loop or, with all of them, mlx-lm's."""
    found = resident_share(row)
    modes = ("outcore", "mlx-lm") if share == 1 else ("outcore",)
    if of == 9 and share == 1:
        modes = ("outcore",) if isinstance(raw["resident"], int) else ("mlx-lm",)
    told = speed(row) is not None or row.speed.predicted_tps is not None
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


def _line(cells: dict[str, str]) -> Line:
    return Line(tuple(cells.get(column, NOTHING) for column in _COLUMNS), "ours")
