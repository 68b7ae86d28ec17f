"""Runs the rows of a bench, each in a process of its own, between two looks at the disk; then says what share of the
ceiling each has reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outcore.errors import BudgetError
from outcore.loading.preparation import Preparation, prepare
from outcore.machine.memory import last_resort
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size

from . import fingerprint
from .cgroup import Cgroup
from .document import BenchRow, Document
from .jobs import BenchSettings, make_jobs
from .modes import MODES, BenchJob
from .page_cache import weight_files
from .processes import failed, group_name, measure_disk, measure_row

Progress = Callable[[str, int, int], None]
"""Called with what is being done, rows done, and rows in all."""


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
        settings: BenchSettings,
        command: str,
        progress: Progress = lambda *_: None,
        on_row: Callable[[Document], None] = lambda _: None,
    ) -> None:
        self.folder, self.name, self.settings = folder, name, settings
        self.progress, self.on_row = progress, on_row
        self.files = weight_files(folder)
        prepared, fits = open_and_plan(
            folder,
            context=settings.context,
            dtype=settings.dtype,
            prefill_step_size=settings.prefill_step_size,
            model_config={"quantize_activations": True} if settings.quantize_activations else None,
            trust_remote_code=settings.trust_remote_code,
        )
        size = prepared.profile.size
        self.layers = len(size.layers)
        self.resident_bytes = resident_budget(size)
        self.jobs = make_jobs(
            settings,
            str(folder),
            self.layers,
            fits=fits,
            vocabulary=vocabulary(prepared),
            longest=prepared.profile.max_context,
        )
        if settings.limit is not None:
            with Cgroup(group_name(), settings.limit):
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

    def _measure(self, job: BenchJob) -> BenchRow:
        mode = MODES[job.mode]
        if not mode.budgeted and not mode.streams and job.limit is None and self.resident_bytes > last_resort():
            wanted, free = format_size(self.resident_bytes), format_size(last_resort())
            return failed(job, f"not run: everything resident takes {wanted}, {free} are free")
        streams = mode.streams and job.resident != self.layers
        warm = job.cache == "warm" and (job.io == "cached" or not mode.budgeted)
        before = self._disk(warm) if streams else None
        self._rate = None
        row = measure_row(job, self.files)
        if streams and row.error is None and row.io != "none":
            is_warm = row.cache == "warm"
            after = self._disk(is_warm)
            rates = [r for r in (before if is_warm == warm else None, after) if r is not None]
            row.disk_gbps = statistics.mean(rates) if rates else None
        return row

    def _disk(self, warm: bool) -> float | None:
        """GB/s of a reader that does nothing else; what was measured last counts if nothing has run since."""
        if self._rate is not None and self._rate[0] == warm:
            return self._rate[1]
        rate = measure_disk(self.files, warm)
        if rate is None:
            return None
        measured = asdict(rate) | {"warm": warm, "before_row": len(self.document.rows)}
        disk = self.document.disk
        disk["measurements"].append(measured)
        same = [m["best_gbps"] for m in disk["measurements"] if m["warm"] == warm]
        disk["warm_gbps" if warm else "gbps"] = statistics.median(same)
        self._rate = (warm, rate.best_gbps)
        return rate.best_gbps


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


def _bytes_per_token(row: BenchRow, layer_bytes: int) -> float:
    """What had to be read for a token: the engine knows; else all layers, once for every sequence's next token."""
    # What the system counted is no measure of that: it includes what the kernel read ahead in vain.
    return layer_bytes / row.batch if row.engine_bytes_per_token is None else row.engine_bytes_per_token


def open_and_plan(folder: Path, **options: Any) -> tuple[Preparation, bool]:
    """The model, opened, and whether all of it fits into what memory is free; else it is planned as small as can be.

    Args:
        options: of ``prepare``.

    Raises:
        CheckpointError, UsageError, BudgetError: it cannot be used.
    """
    try:
        prepared = prepare(folder, **options)
        return prepared, not prepared.plan.streams
    except BudgetError as e:
        if e.smallest is None:
            raise
        return prepare(folder, memory=e.smallest, **options), False


def vocabulary(prepared: Preparation) -> int:
    """Number of tokens that the model knows; what is sure to be there if it does not say."""
    config = prepared.profile.lazy.config
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 128)


def shown_command(argv: Sequence[str], names: dict[str, str]) -> list[str]:
    """A command line with paths replaced by names, in ``--flag=path`` too."""
    shown = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if equals and flag.startswith("-") and value in names:
            argument = f"{flag}={names[value]}"
        shown.append(names.get(argument, argument))
    return shown
