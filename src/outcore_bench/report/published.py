"""The paper's tables 2 to 9, with rows of ours beside theirs where a result has the same model and residency."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices import published_data
from ..document import BenchRow, Document
from .inputs import Inputs
from .tables import NOTHING, Line, ReportTable, machine_name, number, percent, resident_share, size, speed

# Layers resident may differ by this share and still be the same row: a model of 32 layers against one of 32.
_SAME_SHARE = 0.01


@dataclass(frozen=True)
class PublishedTable:
    """One table; ``ours`` counts its rows that come from results."""

    number: int
    title: str
    table: ReportTable
    ours: int


def source() -> str:
    """Where the published numbers come from."""
    return str(published_data()["source"])


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
    data, ours = published_data(), _Ours(inputs)
    return [
        _full_resident(data, ours),
        _memory_reduction(data, ours),
        _mac_studio(data, ours),
        _device_baseline(data, ours),
        _device_streaming(data, ours),
        _hybrid(data, ours),
        _adaptive(data, ours),
        _sweep(data, ours),
    ]


class _Ours:
    """Rows of results, found by model and residency."""

    def __init__(self, inputs: Inputs) -> None:
        self.documents = inputs.documents
        self._perplexity = {
            model_key(row.model, row.bits, row.dtype or "bfloat16"): (
                row.ppl,
                str(p.machine.get("cpu") or "some machine"),
            )
            for p in inputs.perplexities
            for row in p.rows
            if row.ppl is not None
        }

    def perplexity(self, model: str) -> tuple[float, str] | None:
        """Of that model, and the machine that it was measured on."""
        return self._perplexity.get(model_key(model))

    def of_model(self, model: str) -> Iterator[Document]:
        for d in self.documents:
            bits = (d.model.quantization or {}).get("bits")
            if model_key(d.model.name, bits if isinstance(bits, int) else None, d.model.dtype) == model_key(model):
                yield d

    def rows(self, model: str, share: float, *, streaming: bool = False) -> Iterator[tuple[Document, BenchRow]]:
        """Rows of that model with that share of its layers resident, in this project's loop or, at 1, mlx-lm's."""
        for d in self.of_model(model):
            for row in d.rows:
                found = resident_share(row)
                wanted = row.mode == "outcore" if share < 1 or streaming else row.mode in ("outcore", "mlx-lm")
                has = speed(row) is not None or row.predicted_tps is not None
                if wanted and has and row.error is None and found is not None and abs(found - share) <= _SAME_SHARE:
                    yield d, row


def _source_of(d: Document, row: BenchRow) -> str:
    verb = "measured on" if speed(row) is not None else "predicted for"
    return f"{verb} {machine_name(d.machine)}"


def _tps(row: BenchRow) -> str:
    value = speed(row)
    return number(row.predicted_tps if value is None else value)


def _printed(value: float | None) -> str:
    """A number of theirs with the digits that they gave it."""
    return NOTHING if value is None else str(value)


def _memory(raw: dict[str, Any]) -> str:
    return f"{raw['mem_gb']:.2f} GB" if "mem_gb" in raw else f"{raw['mem_mb']} MB"


def _name(row: BenchRow) -> str:
    return f"ours: {row.label}"


def _table(
    of: int, title: str, columns: Sequence[str], lines: Sequence[Line], text: Sequence[str] = ()
) -> PublishedTable:
    table = ReportTable(tuple(columns), tuple(lines), text=(*text, "Source")).without_empty_columns()
    return PublishedTable(of, title, table, sum(line.kind == "ours" for line in lines))


def _with_ours(
    theirs: Sequence[dict[str, Any]],
    published: Callable[[dict[str, Any]], tuple[str, ...]],
    found: Callable[[dict[str, Any]], Iterator[tuple[Document, BenchRow]]],
    ours: Callable[[Document, BenchRow], tuple[str, ...]],
) -> list[Line]:
    """Each published row, and below it what was found for it."""
    lines: list[Line] = []
    for raw in theirs:
        lines.append(Line(published(raw)))
        lines += [Line(ours(d, row), "ours") for d, row in found(raw)]
    return lines


def _full_resident(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines: list[Line] = []
    for raw in data["full_resident_mac_studio"]:
        theirs = f"{raw['ppl']:.3f}"
        lines.append(Line((raw["model"], theirs, _printed(raw["tps"]), _memory(raw), "published: M2 Ultra")))
        rows = [
            Line((_name(row), NOTHING, _tps(row), size(row.peak_memory_bytes), _source_of(d, row)), "ours")
            for d, row in ours.rows(raw["model"], 1.0)
        ]
        if (measured := ours.perplexity(raw["model"])) is not None:
            ppl, machine = measured
            rows.insert(0, Line(("ours: perplexity", f"{ppl:.3f}", NOTHING, NOTHING, f"measured on {machine}"), "ours"))
        lines += rows
    columns = ("Model", "Perplexity", "Tokens/s", "Memory", "Source")
    return _table(2, "everything resident, Mac Studio", columns, lines)


def _memory_reduction(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines: list[Line] = []
    for raw in data["memory_reduction_at_0_resident"]:
        normal, streamed = raw["normal_gb"], raw["streaming_gb"]
        source = "published; share from their sizes"
        cells = (raw["model"], f"{normal:.2f} GB", f"{streamed:.2f} GB", percent(1 - streamed / normal), source)
        lines.append(Line(cells))
        for d, row in ours.rows(raw["model"], 0.0):
            full = next((r for e, r in ours.rows(raw["model"], 1.0) if e is d and r.peak_memory_bytes), None)
            whole, peak = full.peak_memory_bytes if full else None, row.peak_memory_bytes
            if peak is not None:
                less = percent(1 - peak / whole) if whole else NOTHING
                lines.append(Line((_name(row), size(whole), size(peak), less, _source_of(d, row)), "ours"))
    columns = ("Model", "Resident", "Streamed", "Less", "Source")
    return _table(3, "memory with no layer resident", columns, lines)


def _mac_studio(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines = _with_ours(
        data["mac_studio_9b_8bit"],
        lambda r: (
            f"{r['resident']} of {r['layers']} layers",
            _printed(r["tps"]),
            _memory(r),
            percent(r["io_pct"] / 100),
            "published: M2 Ultra",
        ),
        lambda r: ours.rows("Qwen3.5-9B-8bit", r["resident"] / r["layers"]),
        lambda d, row: (
            _name(row),
            _tps(row),
            size(row.peak_memory_bytes),
            percent(row.io_share),
            _source_of(d, row),
        ),
    )
    columns = ("Resident", "Tokens/s", "Memory", "I/O share", "Source")
    return _table(4, "Qwen3.5-9B-8bit by layers resident, Mac Studio", columns, lines)


# Tables 5 to 9 have two devices: one column each, and ours where theirs are beside them.
_DEVICES = ("iPad M3, tokens/s", "iPhone A17, tokens/s", "Ours, tokens/s", "Memory", "Source")


def _devices(raw: dict[str, Any], first: str) -> tuple[str, ...]:
    ipad, iphone = raw.get("ipad_tps", raw.get("tps")), raw.get("iphone_tps")
    note = f"published; {raw['note']}" if "note" in raw else "published"
    return (first, _printed(ipad), _printed(iphone), NOTHING, _memory(raw), note)


def _ours_beside_devices(d: Document, row: BenchRow) -> tuple[str, ...]:
    return (_name(row), NOTHING, NOTHING, _tps(row), size(row.peak_memory_bytes), _source_of(d, row))


def _device_baseline(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines = _with_ours(
        data["device_baseline"],
        lambda r: _devices(r, r["model"]),
        lambda r: ours.rows(r["model"], 1.0),
        _ours_beside_devices,
    )
    return _table(5, "everything resident on 8 GB devices", ("Model", *_DEVICES), lines)


def _device_streaming(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines = _with_ours(
        data["device_streaming"],
        lambda r: _devices(r, r["model"]),
        lambda r: ours.rows(r["model"], 0.0),
        _ours_beside_devices,
    )
    return _table(6, "no layer resident on 8 GB devices", ("Model", *_DEVICES), lines)


def _hybrid(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    def first(r: dict[str, Any]) -> str:
        budget = f"{r['budget_gb']:.1f} GB" if r["budget_gb"] else "no budget"
        return f"{budget}: {r['resident']} of {r['layers']} layers"

    lines = _with_ours(
        data["hybrid_9b_6bit"],
        lambda r: _devices(r, first(r)),
        lambda r: ours.rows("Qwen3.5-9B-6bit", r["resident"] / r["layers"]),
        _ours_beside_devices,
    )
    return _table(7, "Qwen3.5-9B-6bit by budget", ("Budget, resident", *_DEVICES), lines)


def _adaptive(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    lines = _with_ours(
        data["adaptive_9b_6bit_ipad"],
        lambda r: _devices(r, f"{r['mode']}: {r['resident']} of 32 layers"),
        lambda r: ours.rows("Qwen3.5-9B-6bit", r["resident"] / 32),
        _ours_beside_devices,
    )
    return _table(8, "Qwen3.5-9B-6bit with adaptive residency, iPad", ("Mode, resident", *_DEVICES), lines)


def _sweep(data: dict[str, Any], ours: _Ours) -> PublishedTable:
    def found(r: dict[str, Any]) -> Iterator[tuple[Document, BenchRow]]:
        if r["resident"] == "no streaming":
            return (pair for pair in ours.rows("Qwen3.5-4B-4bit", 1.0) if pair[1].mode == "mlx-lm")
        return ours.rows("Qwen3.5-4B-4bit", r["resident"] / r["layers"], streaming=True)

    lines = _with_ours(
        data["sweep_4b_4bit"],
        lambda r: _devices(
            r, r["resident"] if isinstance(r["resident"], str) else f"{r['resident']} of {r['layers']} layers"
        ),
        found,
        _ours_beside_devices,
    )
    return _table(9, "Qwen3.5-4B-4bit by layers resident", ("Resident", *_DEVICES), lines)
