"""Rows of ours beside those of the paper's tables that have the same model and residency."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..devices import PublishedRow, published_rows
from ..document import BenchRow, Document
from .tables import Line, ReportTable, machine_name, number, resident_share, size, speed

# Layers resident may differ by this share and still be the same row: a model of 32 layers against one of 32.
_SAME_SHARE = 0.01

_COLUMNS = ("", "Tokens/s", "Memory", "Published", "Tokens/s there", "Memory there")


def published_table(documents: Sequence[Document]) -> ReportTable | None:
    """A line for each row of ours that has a row of theirs, in the paper's order."""
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
    """Whether a row has that share of its layers resident, in this project's loop or, with all of them, mlx-lm's."""
    found = resident_share(row)
    modes = ("outcore", "mlx-lm") if share == 1 else ("outcore",)
    measured = row.error is None and speed(row) is not None
    return measured and row.mode in modes and found is not None and abs(found - share) <= _SAME_SHARE


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
