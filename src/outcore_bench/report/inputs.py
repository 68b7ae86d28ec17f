"""Reads and checks the result files of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..document import SCHEMA, Document, read_record, validated

PERPLEXITY_SCHEMA = "outcore-perplexity/1"


@dataclass(frozen=True)
class PerplexityRow:
    """One model's perplexity. ``bits`` None: not quantized; ``streamed_ppl``: with streamed weights."""

    model: str
    bits: int | None = None
    dtype: str | None = None
    ppl: float | None = None
    ppl_error: float | None = None
    weight_bytes: int | None = None
    streamed_ppl: float | None = None


@dataclass(frozen=True)
class Perplexities:
    """The result of ``outcore perplexity --json``; ``machine`` has the fields of ``document.Machine``."""

    created: str
    machine: dict[str, Any]
    rows: tuple[PerplexityRow, ...]


@dataclass(frozen=True)
class Inputs:
    """All results of a report."""

    documents: list[Document] = field(default_factory=list)
    perplexities: list[Perplexities] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Reads result files; raises DocumentError for one that is not a complete result."""
    inputs = Inputs()
    parsers: dict[str, Any] = {SCHEMA: Document.of, PERPLEXITY_SCHEMA: lambda raw: validated(Perplexities, raw)}
    for path in paths:
        found: Any = read_record(path, parsers)
        (inputs.perplexities if isinstance(found, Perplexities) else inputs.documents).append(found)
    return inputs
