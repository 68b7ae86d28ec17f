"""What a measurement leaves behind: one JSON document a run, with the machine it ran on. Schema: docs/bench.md.

Plain dataclasses of numbers and strings. Sizes are bytes, times seconds, rates GB/s of 1e9 bytes or tokens per second,
shares fractions of 1. What was not measured is None, never 0.
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

SCHEMA = "outcore-bench/1"

BUSY = "other programs used"
"""How a row's note begins where it was measured on a busy machine: such numbers are not worth quoting."""


T = TypeVar("T")


class DocumentError(OutcoreError):
    """A file that is no whole result."""


@dataclass(frozen=True)
class Stat:
    """Median and spread of ``n`` repeats."""

    median: float
    least: float
    most: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Stat:
        return Stat(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Machine:
    """Where a run was measured."""

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
    """What was measured. ``nbytes`` are all weights on disk, ``layer_bytes`` those of its layers together."""

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
    """Under which conditions a row was measured.

    Attributes:
        memory: the budget as it was asked for.
        threads: reads in flight, as they were asked for.
        cache: ``bypassed`` (direct reads) or ``cold`` (cached reads, files dropped from the page cache before); in
            older results ``warm``, too.
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
    """``tokens_per_sweep``: generated tokens per pass over the streamed weights; None where nothing streams."""

    s_per_token: Stat | None = None
    decode_tps: Stat | None = None
    prompt_tps: Stat | None = None
    ttft_s: Stat | None = None
    tokens_per_sweep: float | None = None
    predicted_tps: float | None = None
    predicted_ttft_s: float | None = None


@dataclass
class Reading:
    """What was read while decoding.

    Attributes:
        engine_bytes_per_token: bytes that the engine read into slots, a token.
        read_gbps: bytes a second while a read was under way. ``disk_gbps``: a plain parallel reader on the same files,
            mean of before and after.
        stall_share: of the time per token, waiting for a read. ``io_share``: with a read under way.
    """

    engine_bytes_per_token: float | None = None
    read_gbps: float | None = None
    disk_gbps: float | None = None
    disk_share: float | None = None
    stall_share: float | None = None
    io_share: float | None = None


@dataclass
class Ceiling:
    """``ceiling_s`` is max(disk time, compute time) a token, and ``efficiency`` that over the measured time."""

    disk_s: float | None = None
    compute_s: float | None = None
    ceiling_s: float | None = None
    efficiency: float | None = None


@dataclass
class Use:
    """Memory, planned (``parts``: weights, slots, cache, activations, allocator) and used."""

    parts: dict[str, int] | None = None
    planned_peak_bytes: int | None = None
    peak_memory_bytes: int | None = None
    peak_rss_bytes: int | None = None


@dataclass
class BenchRow:
    """One mode at one budget, measured in a process of its own. In JSON the fields of its parts are its own.

    Attributes:
        mode: ``mlx-lm`` (its own loop, everything resident), ``plain`` (the plain way), ``outcore``; loops that come
            later add their own.
        label: what a table calls it, e.g. ``outcore, 50 % resident``. ``command``: of older results.
        same_tokens: whether the tokens are those of mlx-lm in this document, None where it did not run.
        error: why there are no numbers, e.g. ``killed for memory``.
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
        """Whether other programs used the machine right before."""
        return any(note.startswith(BUSY) for note in self.notes)

    @staticmethod
    def of(raw: Mapping[str, Any]) -> BenchRow:
        """A row from its JSON object, whose further fields (older results have some) are left out.

        Raises:
            ValueError: it is not whole.
        """
        return validated(BenchRow, {**raw, **dict.fromkeys(_PARTS, raw)})

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        raw = asdict(self)
        for name in _PARTS:
            raw |= raw.pop(name)
        return raw


_PARTS = ("setting", "speed", "reading", "ceiling", "use")


@dataclass
class Document:
    """One run of ``outcore bench``."""

    created: str
    command: str
    machine: Machine
    model: Model
    settings: dict[str, Any]
    disk: dict[str, Any]
    rows: list[BenchRow] = field(default_factory=list)
    schema: str = SCHEMA

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(replace(self, rows=[])) | {"rows": [row.record() for row in self.rows]}

    @staticmethod
    def of(raw: Mapping[str, Any]) -> Document:
        """A document from its JSON object.

        Raises:
            KeyError, TypeError, ValueError: it is not whole.
        """
        rows = [BenchRow.of(row) for row in raw["rows"]]
        return replace(validated(Document, {**raw, "rows": []}), rows=rows)


def writable(path: Path) -> Path:
    """The path, if a file can be there.

    Raises:
        UsageError: there is a folder, or none to put it into.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: {'a folder; name a file' if path.is_dir() else 'no such folder'}")
    return path


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, whole or not at all.

    Raises:
        OutcoreError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise OutcoreError(f"--output {path}: cannot be written: {e.strerror or e}") from e


def read_record(path: Path, of: Mapping[str, Callable[[dict[str, Any]], T]]) -> T:
    """A result from its file.

    Args:
        of: known schemas, and what makes a result of a JSON object of each.

    Raises:
        DocumentError: it is not there, no JSON object, of another schema, or not whole.
    """
    try:
        raw = parse_json(read_small(path, INDEX_BYTES))
    except (OSError, ValueError) as e:
        raise DocumentError(f"{path}: cannot be read as a result: {one_line(e)}") from e
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or schema not in of:
        named = "names no schema" if schema is None else f"is of schema {schema!r:.60}"
        raise DocumentError(f"{path}: no result that is known here: it {named}, and known are {', '.join(of)}")
    try:
        return of[schema](raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OutcoreError) as e:
        raise DocumentError(f"{path}: not a whole result of schema {schema}: {one_line(e)}") from e


def validated(kind: type[T], raw: Any) -> T:
    """What a JSON object says, by a dataclass's annotations.

    Raises:
        ValueError: a value of another type, a field that is not there, a number that is not finite.
    """
    found: T = _adapter(kind).validate_json(json.dumps([raw], default=asdict))[0]  # type: ignore[arg-type]
    return found


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    # In a list, for the configuration goes to dataclasses within others alone.
    return TypeAdapter(list[kind], config=ConfigDict(strict=True, allow_inf_nan=False))  # type: ignore[valid-type]
