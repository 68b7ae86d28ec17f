"""Result files as the report takes them: known schemas checked to the last field, unknown ones set aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outcore.errors import UsageError
from outcore.machine.small_files import INDEX_BYTES, parse_json, read_small
from outcore.text import one_line

from ..document import SCHEMA, Document, DocumentError, validated
from ..matrix_summary import SCHEMA as MATRIX_SCHEMA
from ..matrix_summary import GridSummary

PERPLEXITY_SCHEMA = "outcore-perplexity/1"


@dataclass(frozen=True)
class PerplexityRow:
    """One model at one width: ``bits`` None is not quantized, ``streamed_ppl`` the same text with streamed weights.
    ``tokens_per_second`` and ``peak_memory_bytes`` are of generating."""

    model: str
    bits: int | None = None
    dtype: str | None = None
    ppl: float | None = None
    ppl_error: float | None = None
    tokens_per_second: float | None = None
    weight_bytes: int | None = None
    peak_memory_bytes: int | None = None
    streamed_ppl: float | None = None
    equal: bool | None = None


@dataclass(frozen=True)
class Perplexities:
    """What ``outcore perplexity --json`` prints. ``machine`` is what it says of its own, named as in a bench result."""

    created: str
    machine: dict[str, Any]
    rows: tuple[PerplexityRow, ...]


@dataclass(frozen=True)
class Inputs:
    """Everything that was read; ``skipped`` has one line for each file that was not.

    The best row of each budget of a matrix is among the documents, too.
    """

    documents: list[Document] = field(default_factory=list)
    matrices: list[GridSummary] = field(default_factory=list)
    perplexities: list[Perplexities] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read result files, in order.

    Raises:
        DocumentError: a file is not there, no JSON object with a schema, or not whole. A whole file of a schema that
            is not known here is no error: it is named in ``skipped``.
    """
    inputs = Inputs()
    for path in paths:
        schema = _schema(path)
        try:
            if schema == SCHEMA:
                inputs.documents.append(Document.read(path))
            elif schema == PERPLEXITY_SCHEMA:
                inputs.perplexities.append(_perplexities(parse_json(read_small(path, INDEX_BYTES))))
            elif schema == MATRIX_SCHEMA:
                matrix = GridSummary.of(parse_json(read_small(path, INDEX_BYTES)))
                inputs.matrices.append(matrix)
                if (best := matrix.by_budget()) is not None:
                    inputs.documents.append(best)
            else:
                known = f"{SCHEMA}, {MATRIX_SCHEMA} and {PERPLEXITY_SCHEMA}"
                inputs.skipped.append(f"{path}: skipped, as the report knows {known}, not {schema[:60]!r}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, UsageError) as e:
            raise DocumentError(f"{path}: not a whole result of schema {schema}: {one_line(e)}") from e
    return inputs


def _schema(path: Path) -> str:
    try:
        raw = parse_json(read_small(path, INDEX_BYTES))
    except (OSError, ValueError) as e:
        raise DocumentError(f"{path}: cannot be read as a result: {e}") from e
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str):
        raise DocumentError(
            f"{path}: names no schema; the report knows results of outcore bench and outcore matrix, and what "
            "outcore perplexity --json prints"
        )
    return schema


def _perplexities(raw: dict[str, Any]) -> Perplexities:
    known = {f.name for f in fields(PerplexityRow)}
    machine = raw.get("machine") or {}
    rows = tuple(validated(PerplexityRow, {k: v for k, v in row.items() if k in known}) for row in raw["rows"])
    return Perplexities(str(raw["created"]), machine if isinstance(machine, dict) else {"cpu": str(machine)}, rows)
