"""Result files as the report takes them: known schemas checked, unknown ones set aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..document import SCHEMA, Document, read_record, validated

PERPLEXITY_SCHEMA = "outcore-perplexity/1"


@dataclass(frozen=True)
class PerplexityRow:
    """One model at one width: ``bits`` None is not quantized, ``streamed_ppl`` the same text with streamed weights."""

    model: str
    bits: int | None = None
    dtype: str | None = None
    ppl: float | None = None
    ppl_error: float | None = None
    weight_bytes: int | None = None
    streamed_ppl: float | None = None


@dataclass(frozen=True)
class Perplexities:
    """What ``outcore perplexity --json`` prints. ``machine`` is what it says of its own, named as in a bench result."""

    created: str
    machine: dict[str, Any]
    rows: tuple[PerplexityRow, ...]


@dataclass(frozen=True)
class Inputs:
    """Everything that was read."""

    documents: list[Document] = field(default_factory=list)
    perplexities: list[Perplexities] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Read result files, in order.

    Raises:
        DocumentError: a file is not there, no JSON object, of a schema that is not known, or not whole.
    """
    inputs = Inputs()
    known: dict[str, Any] = {SCHEMA: Document.of, PERPLEXITY_SCHEMA: lambda raw: validated(Perplexities, raw)}
    for path in paths:
        found: Any = read_record(path, known)
        (inputs.perplexities if isinstance(found, Perplexities) else inputs.documents).append(found)
    return inputs
