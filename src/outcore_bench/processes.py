"""Measurements in processes of their own: a row, or what the disk gives. Knows nothing of documents.

``python -m outcore_bench.processes KIND ARGUMENTS`` is such a process: ``ARGUMENTS`` is a JSON object, and so is the
last line of standard output. A failure is the last line of standard error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.errors import OutcoreError

from .disk import DiskRate, disk_rate
from .document import BUSY, BenchRow, RowSetting
from .jobs import BenchJob
from .page_cache import drop_page_cache
from .words import AUTO

KILLED = "killed for memory"
BUSY_PERCENT = 10  # of all cores, by others, right before a row
DISK_BYTES = 2_000_000_000  # of one pass at most, of six: a large model would take longer to calibrate than to run
PACKAGE = str(Path(__file__).parents[1])


class ChildError(OutcoreError):
    """A measurement that gave no result: it was killed, or ended with an error."""


def measure_row(job: BenchJob, files: Sequence[Path]) -> BenchRow:
    """The row of ``job``, with a note where the machine was busy; a row with an ``error`` where it cannot run.

    Args:
        files: of the model; dropped from the page cache before.
    """
    drop_page_cache(files)
    others = psutil.cpu_percent(interval=0.3)  # nothing of ours runs now
    try:
        row = BenchRow.of(_child("row", asdict(job)))
    except ChildError as e:
        return failed(job, str(e))
    if others > BUSY_PERCENT:
        row.notes.append(f"{BUSY} {others:.0f} % of the cores right before")
    row.notes = [names_only(note) for note in row.notes]
    return row


def measure_disk(files: Sequence[Path]) -> DiskRate | None:
    """What a reader gets of these files that does nothing else; None where that cannot be measured."""
    arguments = {"files": [str(f) for f in files], "most": DISK_BYTES}
    try:
        return DiskRate(**_child("disk", arguments))
    except ChildError:
        return None


def failed(job: BenchJob, why: str) -> BenchRow:
    """A row that could not be measured."""
    setting = RowSetting(memory=job.memory, batch=job.batch)
    setting.slots, setting.threads, setting.io = job.run.slots, job.run.threads, job.io if job.io != AUTO else None
    return BenchRow(job.mode, job.label, setting=setting, error=why)


def _child(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join(p for p in (PACKAGE, os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, "-m", "outcore_bench.processes", kind, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildError(KILLED if done.returncode == -9 else names_only(lines[-1]))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def names_only(text: str) -> str:
    """Absolute paths cut to their last parts: results are shared, and where things lie is nobody's business."""
    return re.sub(r"(?<![\w.:/])(?:/[^\s/:'\",]+)+/([^\s/:'\",]+)", r"\1", text)


def main(kind: str, text: str) -> int:
    """Take one measurement in this process; returns the exit status."""
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
