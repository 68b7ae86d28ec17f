"""Turns the settings of ``outcore bench`` into jobs, one for each row, and runs a job in a child process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.checks import choice, whole
from outcore.decode.budget import given_budget
from outcore.errors import OutcoreError, UsageError
from outcore.options import DTYPES, IO_MODES

from .commands import AUTO, OUTCORE, WAYS
from .disk import DiskRate, disk_rate, drop_page_cache
from .document import BUSY, BenchRow, RowSetting

RESIDENT = ("0%", "50%", "100%")
_LEAST = {"max_tokens": 1, "prompt_tokens": 1, "repeats": 1, "prefill_step_size": 1, "cpu_streams": 1, "slots": 2}


@dataclass(frozen=True)
class RunSettings:
    """How each row is measured. The constructor raises UsageError for invalid values.

    Attributes:
        max_tokens: how many tokens to time in each repeat and sequence, after the first one.
    """

    max_tokens: int = 16
    prompt_tokens: int = 32
    repeats: int = 3
    prefill_step_size: int | None = None
    quantize_activations: bool = False
    trust_remote_code: bool = False
    dtype: str | None = None
    cpu_streams: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            choice("--dtype", self.dtype, DTYPES)
        for name, least in _LEAST.items():
            if (number := getattr(self, name)) is not None:
                whole(f"--{name.replace('_', '-')}", number, least)

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.max_tokens + 1

    @property
    def model_config(self) -> dict[str, Any] | None:
        return {"quantize_activations": True} if self.quantize_activations else None


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``outcore bench``. The constructor raises UsageError for invalid values.

    Attributes:
        memory: sizes or ``auto``.
        resident: numbers of layers, or shares such as ``25%``.
    """

    modes: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    io: tuple[str, ...] = (AUTO,)
    batch: tuple[int, ...] = (1,)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        for mode in self.modes:
            choice("--modes", mode, WAYS)
        for io in self.io:
            choice("--io", io, IO_MODES)
        for n in self.batch:
            whole("--batch", n)
        for size in self.memory:
            if size != AUTO:
                given_budget(size)

    def record(self) -> dict[str, Any]:
        raw = asdict(self)
        return raw | raw.pop("run")


@dataclass(frozen=True)
class BenchJob:
    """One row to measure, sent to a child process as JSON.

    Attributes:
        vocabulary: prompts consist of token ids below this number.
        context: number of tokens to plan for.
    """

    mode: str
    folder: str
    label: str
    run: RunSettings
    context: int
    vocabulary: int
    batch: int = 1
    memory: str | None = None
    resident: int | None = None
    io: str = AUTO

    @staticmethod
    def of(raw: dict[str, Any]) -> BenchJob:
        return BenchJob(**(raw | {"run": RunSettings(**raw["run"])}))


def listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in listed(text))
    except ValueError:
        raise UsageError(f"{flag} {text}: give whole numbers, separated by commas") from None


def make_jobs(
    settings: BenchSettings, folder: str, layers: int, *, fits: bool, vocabulary: int = 128, longest: int | None = None
) -> list[BenchJob]:
    """Returns a job for each row, those with everything resident first.

    Args:
        layers: number of the model's layers.
        fits: whether everything fits in memory. If so, a row with everything resident is always measured, as the
            ceilings of the others need its compute time.
        longest: the model's maximum context, if known.
    """
    jobs = []
    for batch in settings.batch:
        context = settings.run.context
        if batch > 1:  # each sequence's cache grows by 256 tokens at a time
            context = min(batch * -(-context // 256) * 256, longest or 2**31)
        for name in settings.modes or WAYS:
            run = settings.run if name == OUTCORE else replace(settings.run, slots=None)  # the others have none
            job = BenchJob(name, folder, name, run, context, vocabulary, batch)
            jobs += _budgets(job, settings, layers, fits) if name == OUTCORE else [job]
    if settings.batch != (1,):
        jobs = [replace(j, label=f"{j.label}, batch {j.batch}") for j in jobs]
    # mlx-lm comes first, as all others are compared with it.
    return sorted(jobs, key=lambda j: (j.mode in (OUTCORE, "plain"), j.resident != layers))


def _budgets(job: BenchJob, settings: BenchSettings, layers: int, fits: bool) -> list[BenchJob]:
    resident = settings.resident or (RESIDENT if not settings.memory else ())
    whole = replace(job, resident=layers, label=f"{job.mode}, all resident")
    jobs = [whole] if fits else []
    for io in settings.io:
        how = f", {io}" if len(settings.io) > 1 else ""
        for size in settings.memory:
            label = f"{job.mode}, {size if size != AUTO else 'budget of its own choice'}{how}"
            jobs.append(replace(job, io=io, memory=size, label=label))
        for text in resident:
            count, shown = _layers(text, layers)
            if count < layers:
                jobs.append(replace(job, io=io, resident=count, label=f"{job.mode}, {shown} resident{how}"))
            elif whole not in jobs:  # nothing is read, so --io makes no difference
                jobs.append(whole)
    return jobs


def _layers(text: str, layers: int) -> tuple[int, str]:
    number = text.removesuffix("%").strip()
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        raise UsageError(f"--resident {text}: give numbers of layers or shares, such as 0,25%,50%") from None
    if text.endswith("%"):
        if not 0 <= value <= 100:
            raise UsageError(f"--resident {text}: a share is between 0% and 100%")
        return round(layers * value / 100), f"{number} %"
    if not 0 <= value <= layers:
        raise UsageError(f"--resident {text}: this model has {layers} layers")
    return int(value), f"{number} of {layers} layers"


KILLED = "killed for memory"
BUSY_PERCENT = 10  # if other programs use more of all cores right before a row, the row gets a note
DISK_BYTES = 2_000_000_000  # most bytes of a repeat of the disk's measurement; a large model would take long
PACKAGE = str(Path(__file__).parents[1])


class ChildError(OutcoreError):
    """A child process was killed or failed."""


def measure_row(job: BenchJob, files: Sequence[Path]) -> BenchRow:
    """Measures a row after dropping ``files`` from the page cache. Returns a row with an ``error`` if the job fails."""
    drop_page_cache(files)
    others = psutil.cpu_percent(interval=0.3)
    try:
        row = BenchRow.of(_child("row", asdict(job)))
    except ChildError as e:
        return failed(job, str(e))
    if others > BUSY_PERCENT:
        row.notes.append(f"{BUSY} {others:.0f} % of the cores right before")
    row.notes = [names_only(note) for note in row.notes]
    return row


def measure_disk(files: Sequence[Path]) -> DiskRate | None:
    arguments = {"files": [str(f) for f in files], "most": DISK_BYTES}
    try:
        return DiskRate(**_child("disk", arguments))
    except ChildError:
        return None


def failed(job: BenchJob, why: str) -> BenchRow:
    setting = RowSetting(memory=job.memory, batch=job.batch)
    setting.slots, setting.io = job.run.slots, job.io if job.io != AUTO else None
    return BenchRow(job.mode, job.label, setting=setting, error=why)


def _child(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join(p for p in (PACKAGE, os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, "-m", "outcore_bench.jobs", kind, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildError(KILLED if done.returncode == -9 else names_only(lines[-1]))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def names_only(text: str) -> str:
    """Cuts absolute paths in a text to their last parts, as results may be shared."""
    return re.sub(r"(?<![\w.:/])(?:/[^\s/:'\",]+)+/([^\s/:'\",]+)", r"\1", text)


def main(kind: str, text: str) -> int:
    arguments = json.loads(text)
    try:
        if kind == "row":
            from .measure import measure

            result = measure(BenchJob.of(arguments)).record()
        else:
            result = asdict(disk_rate([Path(file) for file in arguments.pop("files")], **arguments))
    except OutcoreError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
