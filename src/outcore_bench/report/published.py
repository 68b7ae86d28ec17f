"""Compares measured rows with the paper's rows of the same model and residency."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..devices import PublishedRow, published_rows
from ..document import BenchRow, Document
from .tables import Line, ReportTable, machine_name, number, resident_share, size, speed

# Largest difference of the shares of resident layers between rows that are compared.
_SAME_SHARE = 0.01

_COLUMNS = ("", "Tokens/s", "Memory", "Published", "Tokens/s there", "Memory there")


def published_table(documents: Sequence[Document]) -> ReportTable | None:
    """Returns a line for each pair of rows, in the paper's order."""
    lines = []
    for theirs in published_rows():
        key, share = model_key(theirs.model), theirs.resident / theirs.layers
        for d in documents:
            bits = (d.model.quantization or {}).get("bits")
            if model_key(d.model.name, bits if isinstance(bits, int) else None, d.model.dtype) == key:
                for row in d.rows:
                    if _is_same(row, share):
                        where = f"{row.label}, {machine_name(d.machine)}"
                        lines.append(_line(theirs, where, number(speed(row)), size(row.use.peak_memory_bytes)))
    text = ("Published", "Tokens/s there")
    return ReportTable(_COLUMNS, tuple(lines), text).without_empty_columns() if lines else None


def _line(theirs: PublishedRow, ours: str, tps: str, memory: str) -> Line:
    published = f"table {theirs.table}: {theirs.model}, {theirs.resident} of {theirs.layers} layers"
    speeds = ", ".join(f"{tps} {device}" for device, tps in theirs.tps.items())
    their_memory = size(theirs.memory_mb * 1e6 if theirs.memory_mb is not None else None)
    return Line((ours, tps, memory, published, speeds, their_memory))


def _is_same(row: BenchRow, share: float) -> bool:
    """Tells whether a row was measured with that share of its layers resident; mlx-lm's rows have all resident."""
    own_share = resident_share(row)
    modes = ("outcore", "mlx-lm") if share == 1 else ("outcore",)
    measured = row.error is None and speed(row) is not None
    return measured and row.mode in modes and own_share is not None and abs(own_share - share) <= _SAME_SHARE


def model_key(name: str, bits: int | None = None, dtype: str | None = None) -> str:
    """Normalizes a model's name: ``mlx-community/Qwen3.5-9B-MLX-8bit`` becomes ``qwen3.5-9b-8bit``.

    Args:
        bits, dtype: the quantization or dtype, for names that do not contain it.
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
