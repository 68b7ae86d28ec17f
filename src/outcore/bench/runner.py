"""Runs the rows of a bench, each in a process of its own, between two looks at the disk; then says what share of the
ceiling each has reached."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ..checkpoint import open_checkpoint
from ..errors import BudgetError, OutcoreError
from ..loader import Preparation, prepare
from ..memory import last_resort
from ..plan import resident_budget
from ..sizes import format_size
from . import fingerprint
from .cgroup import Cgroup
from .disk import DiskRate
from .document import BUSY, Document, Row
from .jobs import Settings, make_jobs
from .modes import MODES, Job
from .page_cache import drop_page_cache

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rows done, and rows in all."""

KILLED = "killed for memory"
BUSY_PERCENT = 10  # of all cores, by others, right before a row
DISK_BYTES = 2_000_000_000  # of one pass at most, of six: a large model would take longer to calibrate than to run
PACKAGE = str(Path(__file__).parents[2])


class ChildError(OutcoreError):
    """A measurement that gave no result: it was killed, or ended with an error."""


class Runner:
    """One run of ``outcore bench``.

    Args:
        folder: of the model; ``name``: what the document calls it.
        on_row: called with the document after each row, so that what is there can be kept.

    Raises:
        CheckpointError, UsageError, BudgetError: the model or the settings cannot be used.
        CgroupError: a limit was asked for where none can be set.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Settings,
        command: str,
        progress: Progress = lambda *_: None,
        on_row: Callable[[Document], None] = lambda _: None,
    ) -> None:
        self.folder, self.name, self.settings = folder, name, settings
        self.progress, self.on_row = progress, on_row
        self.files = open_checkpoint(folder).files
        prepared, fits = self._prepare()
        size = prepared.survey.size
        self.layers = len(size.layers)
        self.resident_bytes = resident_budget(size)
        config = prepared.survey.lazy.config
        text = config.get("text_config")
        vocabulary = config.get("vocab_size") or (text or {}).get("vocab_size") or 128
        self.jobs = make_jobs(
            settings,
            str(folder),
            self.layers,
            fits=fits,
            vocabulary=int(vocabulary),
            longest=prepared.survey.max_context,
        )
        if settings.limit is not None:
            with Cgroup(_group_name(), settings.limit):
                pass
        self._rate: tuple[bool, float] | None = None  # warm, GB/s: measured with nothing run since
        self.document = Document(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            machine=fingerprint.machine(folder),
            model=fingerprint.describe(name, prepared),
            settings=asdict(settings),
            disk={"measurements": []},
        )

    def _prepare(self) -> tuple[Preparation, bool]:
        """The model, opened, and whether all of it fits into memory."""
        options: dict[str, Any] = {"context": self.settings.context, "dtype": self.settings.dtype}
        try:
            prepared = prepare(self.folder, **options)
            return prepared, prepared.plan.slots == 0
        except BudgetError as e:
            if e.smallest is None:
                raise
            return prepare(self.folder, memory=e.smallest, **options), False

    def run(self) -> Document:
        """Measure all rows, one after the other."""
        for i, job in enumerate(self.jobs):
            self.progress(job.label, i, len(self.jobs))
            row = self._measure(job)
            row.command = job.command(self.name)
            self.document.rows.append(row)
            compare(self.document)
            self.on_row(self.document)
        return self.document

    def _measure(self, job: Job) -> Row:
        mode = MODES[job.mode]
        if not mode.budgeted and not mode.streams and job.limit is None and self.resident_bytes > last_resort():
            wanted, free = format_size(self.resident_bytes), format_size(last_resort())
            return _failed(job, f"not run: everything resident takes {wanted}, {free} are free")
        streams = mode.streams and job.resident != self.layers
        warm = job.cache == "warm" and (job.io == "cached" or not mode.budgeted)
        before = self._disk(warm) if streams else None
        self._rate = None
        if job.cache == "cold":
            drop_page_cache(self.files)
        others = psutil.cpu_percent(interval=0.3)  # nothing of ours runs now
        try:
            row = Row.of(self._child("row", asdict(job), job.limit))
        except ChildError as e:
            return _failed(job, str(e))
        if others > BUSY_PERCENT:
            row.notes.append(f"{BUSY} {others:.0f} % of the cores right before")
        if streams and row.io != "none":
            is_warm = row.cache == "warm"
            after = self._disk(is_warm)
            rates = [r for r in (before if is_warm == warm else None, after) if r is not None]
            row.disk_gbps = statistics.mean(rates) if rates else None
        row.notes = [_names_only(note) for note in row.notes]
        return row

    def _disk(self, warm: bool) -> float | None:
        """GB/s of a reader that does nothing else; what was measured last counts if nothing has run since."""
        if self._rate is not None and self._rate[0] == warm:
            return self._rate[1]
        arguments = {"files": [str(f) for f in self.files], "most": DISK_BYTES, "warm": warm}
        try:
            rate = DiskRate(**self._child("disk", arguments, None))
        except ChildError:
            return None
        measured = asdict(rate) | {"warm": warm, "before_row": len(self.document.rows)}
        disk = self.document.disk
        disk["measurements"].append(measured)
        same = [m["best_gbps"] for m in disk["measurements"] if m["warm"] == warm]
        disk["warm_gbps" if warm else "gbps"] = statistics.median(same)
        self._rate = (warm, rate.best_gbps)
        return rate.best_gbps

    def _child(self, kind: str, arguments: dict[str, Any], limit: int | None) -> dict[str, Any]:
        path = os.pathsep.join(p for p in (PACKAGE, os.environ.get("PYTHONPATH")) if p)
        command = [sys.executable, "-m", "outcore.bench.child", kind, json.dumps(arguments)]
        with ExitStack() as stack:
            group = stack.enter_context(Cgroup(_group_name(), limit)) if limit is not None else None
            done = subprocess.run(
                group.wrap(command) if group else command,
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            # Without a group of ours it is the machine's, or a group above us, that ran out.
            killed = group.kills > 0 if group else done.returncode == -9
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise ChildError(KILLED if killed else _names_only(lines[-1]))
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result


def compare(document: Document) -> None:
    """Fill in what takes several rows: ceilings, shares of them, and whether tokens are mlx-lm's."""
    good = [row for row in document.rows if row.error is None]
    resident = {r.batch: r for r in good if r.mode == "outcore" and r.io == "none" and r.limit_bytes is None}
    reference = {r.batch: r.tokens for r in good if r.mode == "mlx-lm"}
    for row in good:
        if row.mode != "mlx-lm" and row.batch in reference:
            row.same_tokens = row.tokens == reference[row.batch]
        if row.io in (None, "none") or row.s_per_token is None:
            continue
        measured = row.s_per_token.median
        nbytes = _bytes_per_token(row, document.model.layer_bytes)
        if row.disk_gbps is not None:
            row.disk_s = nbytes / row.disk_gbps / 1e9
            row.disk_share = row.read_gbps / row.disk_gbps if row.read_gbps is not None else None
        base = resident[row.batch].s_per_token if row.batch in resident else None
        # Other work on the machine can only slow it down, and must not lift the ceiling.
        row.compute_s = base.least if base is not None else None
        row.compute_share = row.compute_s / measured if row.compute_s is not None else None
        known = [s for s in (row.disk_s, row.compute_s) if s is not None]
        row.ceiling_s = max(known) if known else None
        row.efficiency = row.ceiling_s / measured if row.ceiling_s is not None else None
        note = "ceiling is disk time alone: nothing was measured with everything resident"
        if row.compute_s is None and note not in row.notes:
            row.notes.append(note)


def _bytes_per_token(row: Row, layer_bytes: int) -> float:
    """What had to be read for a token: the engine knows; else all layers, once for every sequence's next token."""
    # What the system counted is no measure of that: it includes what the kernel read ahead in vain.
    return layer_bytes / row.batch if row.engine_bytes_per_token is None else row.engine_bytes_per_token


def _failed(job: Job, why: str) -> Row:
    return Row(
        mode=job.mode,
        label=job.label,
        command="",
        memory=job.memory,
        batch=job.batch,
        limit_bytes=job.limit,
        error=why,
    )


def _group_name() -> str:
    return f"outcore-bench-{os.getpid()}"


def _names_only(text: str) -> str:
    """Absolute paths cut to their last parts: results are shared, and where things lie is nobody's business."""
    return re.sub(r"(?<![\w.:/])(?:/[^\s/:'\",]+)+/([^\s/:'\",]+)", r"\1", text)


def shown_command(argv: Sequence[str], names: dict[str, str]) -> list[str]:
    """A command line with paths replaced by names, in ``--flag=path`` too."""
    shown = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if equals and flag.startswith("-") and value in names:
            argument = f"{flag}={names[value]}"
        shown.append(names.get(argument, argument))
    return shown
