"""What a measurement leaves behind: one JSON document a run, with the machine it ran on. Schema: docs/bench.md.

Plain dataclasses of numbers and strings. Sizes are bytes, times seconds, rates GB/s of 1e9 bytes or tokens per second,
shares fractions of 1. What was not measured is None, never 0.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.text import one_line

SCHEMA = "outcore-bench/1"

BUSY = "other programs used"
"""How a row's note begins where it was measured on a busy machine: such numbers are not worth quoting."""


class DocumentError(OutcoreError):
    """A file that is no result of this schema."""


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
    calibration: dict[str, Any] | None = None


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


@dataclass(frozen=True)
class TimelineBar:
    """One read or computation of one sweep; seconds from the sweep's beginning, where what began before is cut off."""

    kind: str
    unit: str
    begin: float
    end: float


@dataclass
class BenchRow:
    """One mode at one budget, measured in a process of its own.

    Attributes:
        mode: ``mlx-lm`` (its own loop, everything resident), ``plain`` (the plain way), ``outcore``; loops that come
            later add their own.
        label: what a table calls it, e.g. ``outcore, 50 % resident``.
        memory: the budget as it was asked for.
        threads: reads in flight, as they were asked for.
        cache: ``bypassed`` (direct reads), ``cold`` (cached reads, files dropped from the page cache before) or
            ``warm`` (files read once before).
        tokens_per_sweep: generated tokens per pass over the streamed weights; None where nothing streams.
        engine_bytes_per_token: bytes that the engine read into slots, a token.
        device_bytes_per_token, cached_bytes_per_token: bytes that the process read from the device, and from the page
            cache, a token (``/proc/self/io``).
        read_gbps: bytes a second while a read was under way. ``disk_gbps``: a plain parallel reader on the same files,
            mean of before and after.
        stall_share: of the time per token, waiting for a read. ``io_share``: with a read under way.
            ``compute_share``: the resident model's time per token over this one's.
        ceiling_s: max(disk time, compute time) a token; ``efficiency``: that over the measured time.
        ranks: of machines that share the model, what each has (``RanksPlan.record``); all else is the first one's.
        parts: planned bytes by part: weights, slots, cache, activations, allocator.
        energy_j: joules a token, where ``energy_source`` reports them.
        same_tokens: whether the tokens are those of mlx-lm in this document, None where it did not run.
        timeline: the reads and computations of one sweep.
        error: why there are no numbers, e.g. ``killed for memory``.
    """

    mode: str
    label: str
    command: str
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
    s_per_token: Stat | None = None
    decode_tps: Stat | None = None
    prompt_tps: Stat | None = None
    ttft_s: Stat | None = None
    tokens_per_sweep: float | None = None
    engine_bytes_per_token: float | None = None
    device_bytes_per_token: float | None = None
    cached_bytes_per_token: float | None = None
    read_gbps: float | None = None
    disk_gbps: float | None = None
    disk_share: float | None = None
    stall_share: float | None = None
    io_share: float | None = None
    compute_share: float | None = None
    disk_s: float | None = None
    compute_s: float | None = None
    ceiling_s: float | None = None
    efficiency: float | None = None
    ranks: list[dict[str, Any]] | None = None
    parts: dict[str, int] | None = None
    planned_peak_bytes: int | None = None
    predicted_tps: float | None = None
    predicted_ttft_s: float | None = None
    peak_memory_bytes: int | None = None
    peak_rss_bytes: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    tokens: list[int] | None = None
    same_tokens: bool | None = None
    seconds: list[float] | None = None
    timeline: list[TimelineBar] | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def busy(self) -> bool:
        """Whether other programs used the machine right before."""
        return any(note.startswith(BUSY) for note in self.notes)

    @staticmethod
    def of(raw: dict[str, Any]) -> BenchRow:
        """A row from its JSON object.

        Raises:
            TypeError: a field that rows do not have, or one that they must have is not there.
        """
        stats = {name: Stat(**raw[name]) for name in _STATS if raw.get(name) is not None}
        timeline = None if raw.get("timeline") is None else [TimelineBar(**bar) for bar in raw["timeline"]]
        return BenchRow(**(raw | stats | {"timeline": timeline}))


_STATS = [f.name for f in fields(BenchRow) if "Stat" in str(f.type)]


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

    def write(self, path: Path) -> None:
        path.write_text(self.json(indent=1) + "\n", encoding="utf-8")

    def json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    @staticmethod
    def read(path: Path) -> Document:
        """A document from its file.

        Raises:
            DocumentError: it is not there, no JSON, or of another schema.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise DocumentError(f"{path}: cannot be read as a result: {one_line(e)}") from e
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise DocumentError(f"{path}: not a result of schema {SCHEMA}; measure again with outcore bench")
        try:
            rows = [BenchRow.of(r) for r in raw["rows"]]
            return Document(
                **(raw | {"rows": rows, "machine": Machine(**raw["machine"]), "model": Model(**raw["model"])})
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise DocumentError(f"{path}: not a whole result of schema {SCHEMA}: {one_line(e)}") from e
