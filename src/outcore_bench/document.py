"""Results as JSON documents, one for each run (schema: docs/bench.md).

Sizes are bytes, times seconds, rates GB/s of 1e9 bytes or tokens per second, shares fractions of 1. A value that was
not measured is None, never 0.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

from outcore.errors import OutcoreError, UsageError
from outcore.machine.small_files import INDEX_BYTES, parse_json, read_small
from outcore.text import one_line

from .commands import OUTCORE

SCHEMA = "outcore-bench/1"

# How a row's note begins if other programs kept the machine busy, so that its numbers are not reliable.
BUSY = "other programs used"

# Times count as equal if they differ by at most this fraction.
TIE = 0.02

T = TypeVar("T")


class DocumentError(OutcoreError):
    """A file is not a complete result."""


@dataclass(frozen=True)
class Stat:
    median: float
    least: float
    most: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Stat:
        return Stat(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    gpu: str | None
    device: str
    memory_bytes: int
    filesystem: str
    kernel: str
    python: str
    versions: dict[str, str]
    git_commit: str
    git_changed_files: int


@dataclass(frozen=True)
class Model:
    """The measured model. ``nbytes``: of all weights on disk; ``layer_bytes``: of all layers' weights."""

    name: str
    model_type: str
    nbytes: int
    layers: int
    layer_bytes: int
    non_layer_bytes: int
    quantization: dict[str, Any] | None
    dtype: str


@dataclass
class RowSetting:
    """The conditions of a row.

    Attributes:
        memory: as the user gave it; ``threads`` and ``limit_bytes``: in older results only.
        cache: ``bypassed`` (direct reads) or ``cold`` (cached reads after emptying the page cache); older results may
            have ``warm``.
    """

    memory: str | None = None
    budget_bytes: int | None = None
    resident_units: int | None = None
    streamed_units: int | None = None
    slots: int | None = None
    threads: int | None = None
    io: str | None = None
    cache: str | None = None
    batch: int = 1
    limit_bytes: int | None = None


@dataclass
class Speed:
    """A row's speed. ``tokens_per_sweep``: generated tokens per forward pass; None if nothing is streamed."""

    s_per_token: Stat | None = None
    decode_tps: Stat | None = None
    prompt_tps: Stat | None = None
    ttft_s: Stat | None = None
    tokens_per_sweep: float | None = None
    predicted_tps: float | None = None
    predicted_ttft_s: float | None = None


@dataclass
class Reading:
    """Reads while decoding.

    Attributes:
        engine_bytes_per_token: bytes read into slots per token.
        read_gbps: rate while a read was in flight.
        disk_gbps: rate of plain parallel reads of the same files: mean of one measurement before the row and one after.
        stall_share: share of the time in which the row waited for reads.
        io_share: share of the time with a read in flight.
    """

    engine_bytes_per_token: float | None = None
    read_gbps: float | None = None
    disk_gbps: float | None = None
    disk_share: float | None = None
    stall_share: float | None = None
    io_share: float | None = None


@dataclass
class Ceiling:
    """Least seconds per token: ``ceiling_s`` is max(disk_s, compute_s); ``efficiency`` is ``ceiling_s`` / measured
    time."""

    disk_s: float | None = None
    compute_s: float | None = None
    ceiling_s: float | None = None
    efficiency: float | None = None


@dataclass
class Use:
    """Memory in bytes: planned (``parts``: weights, slots, cache, activations, allocator) and measured."""

    parts: dict[str, int] | None = None
    planned_peak_bytes: int | None = None
    peak_memory_bytes: int | None = None
    peak_rss_bytes: int | None = None


@dataclass
class BenchRow:
    """One mode at one budget. In JSON, the fields of ``setting`` to ``use`` are the row's own fields.

    Attributes:
        mode: ``mlx-lm`` (its own loop, everything resident), ``plain`` (naive streaming) or ``outcore``.
        label: the row's name in tables, such as ``outcore, 50 % resident``.
        command: in older results only.
        same_tokens: whether the tokens equal mlx-lm's in this document; None if mlx-lm did not run.
        error: why there are no numbers, such as ``killed for memory``.
    """

    mode: str
    label: str
    command: str = ""
    setting: RowSetting = field(default_factory=RowSetting)
    speed: Speed = field(default_factory=Speed)
    reading: Reading = field(default_factory=Reading)
    ceiling: Ceiling = field(default_factory=Ceiling)
    use: Use = field(default_factory=Use)
    tokens: list[int] | None = None
    same_tokens: bool | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def busy(self) -> bool:
        return any(note.startswith(BUSY) for note in self.notes)

    @staticmethod
    def of(raw: Mapping[str, Any]) -> BenchRow:
        """Parses a row, ignoring fields of older versions; raises ValueError if it is incomplete."""
        return validated(BenchRow, {**raw, **dict.fromkeys(_PARTS, raw)})

    def record(self) -> dict[str, Any]:
        raw = asdict(self)
        for name in _PARTS:
            raw |= raw.pop(name)
        return raw


_PARTS = ("setting", "speed", "reading", "ceiling", "use")


@dataclass
class Document:
    created: str
    command: str
    machine: Machine
    model: Model
    settings: dict[str, Any]
    disk: dict[str, Any]
    rows: list[BenchRow] = field(default_factory=list)
    schema: str = SCHEMA

    def record(self) -> dict[str, Any]:
        return asdict(replace(self, rows=[])) | {"rows": [row.record() for row in self.rows]}

    @staticmethod
    def of(raw: Mapping[str, Any]) -> Document:
        """Parses a document; raises KeyError, TypeError or ValueError if it is incomplete."""
        rows = [BenchRow.of(row) for row in raw["rows"]]
        document = replace(validated(Document, {**raw, "rows": []}), rows=rows)
        set_ceilings(document)  # by today's rules: older files have efficiencies above 1
        return document


DISK_ALONE = "the ceiling counts disk time only: no row with everything resident was measured on a quiet machine"
OWN_RATE = "the row read faster than the disk's measurements around it, so its own rate is the ceiling"
BEATEN = (
    "the row was faster than its ceiling, which is left out: the machine was slower when the ceiling was measured, or "
    "the page cache helped; measure again with more repeats"
)


def set_ceilings(document: Document) -> None:
    """Fills in ceilings and efficiencies. A row of a busy machine has none, and is not the ceiling of others."""
    timed = [row for row in document.rows if row.error is None and row.speed.s_per_token is not None]
    quiet = [row for row in timed if (row.mode, row.setting.io) == (OUTCORE, "none") and not row.busy]
    resident = {row.setting.batch: row.speed.s_per_token for row in quiet}
    for row in timed:
        if row.setting.io in (None, "none") or row.speed.s_per_token is None:
            continue
        batch, reading, ceiling, notes = row.setting.batch, row.reading, row.ceiling, []
        measured, rate = row.speed.s_per_token.median, reading.disk_gbps
        if rate is not None:
            # Bytes that had to be read per token: counted by the engine, or else all layers once for a token of each
            # sequence. The system's count would include pages that the kernel reads ahead in vain.
            nbytes = reading.engine_bytes_per_token
            nbytes = document.model.layer_bytes / batch if nbytes is None else nbytes
            if reading.read_gbps is not None and reading.read_gbps > rate:
                rate, notes = reading.read_gbps, [OWN_RATE]
            ceiling.disk_s = nbytes / rate / 1e9
            reading.disk_share = reading.read_gbps / rate if reading.read_gbps is not None else None
        # The fastest repeat, because other programs can only slow repeats down and must not change the ceiling.
        base = resident.get(batch)
        ceiling.compute_s = base.least if base is not None else None
        notes += [DISK_ALONE] * (base is None)
        known = max((s for s in (ceiling.disk_s, ceiling.compute_s) if s is not None), default=None)
        if known is not None and known > (1 + TIE) * measured:
            known, notes = None, [BEATEN]
        ceiling.ceiling_s = None if row.busy or known is None else min(known, measured)
        ceiling.efficiency = None if ceiling.ceiling_s is None else ceiling.ceiling_s / measured
        row.notes = [note for note in row.notes if note not in (DISK_ALONE, OWN_RATE, BEATEN)]
        row.notes += [] if row.busy else notes


def writable(path: Path) -> Path:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: {'a folder; name a file' if path.is_dir() else 'no such folder'}")
    return path


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise OutcoreError(f"--output {path}: cannot write: {e.strerror or e}") from e


def read_record(path: Path, of: Mapping[str, Callable[[dict[str, Any]], T]]) -> T:
    """Reads a result file.

    Args:
        of: by schema, the function that parses the JSON object.

    Raises:
        DocumentError: the file does not exist, is not JSON, has an unknown schema, or is incomplete.
    """
    try:
        raw = parse_json(read_small(path, INDEX_BYTES))
    except (OSError, ValueError) as e:
        raise DocumentError(f"{path}: cannot read the result: {one_line(e)}") from e
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or schema not in of:
        found = "no schema" if schema is None else f"schema {schema!r:.60}"
        raise DocumentError(f"{path}: not a result of outcore: it has {found}; supported are {', '.join(of)}")
    try:
        return of[schema](raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OutcoreError) as e:
        raise DocumentError(f"{path}: incomplete result of schema {schema}: {one_line(e)}") from e


def validated(kind: type[T], raw: Any) -> T:
    """Parses a JSON object as a dataclass; raises ValueError for missing fields, wrong types and infinite numbers."""
    found: T = _adapter(kind).validate_json(json.dumps([raw], default=asdict))[0]  # type: ignore[arg-type]
    return found


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    # In a list, as pydantic applies the configuration to nested dataclasses only.
    return TypeAdapter(list[kind], config=ConfigDict(strict=True, allow_inf_nan=False))  # type: ignore[valid-type]


PERPLEXITY_SCHEMA = "outcore-perplexity/1"


@dataclass(frozen=True)
class PerplexityRow:
    """One model's perplexity. ``bits``: None if not quantized. ``streamed_ppl``: measured with streamed weights."""

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
    documents: list[Document] = field(default_factory=list)
    perplexities: list[Perplexities] = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    inputs = Inputs()
    parsers: dict[str, Any] = {SCHEMA: Document.of, PERPLEXITY_SCHEMA: lambda raw: validated(Perplexities, raw)}
    for path in paths:
        found: Any = read_record(path, parsers)
        (inputs.perplexities if isinstance(found, Perplexities) else inputs.documents).append(found)
    return inputs
