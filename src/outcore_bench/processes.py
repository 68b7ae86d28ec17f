"""Measures a row or the disk in a child process.

``python -m outcore_bench.processes KIND ARGUMENTS`` is the child. ``ARGUMENTS`` is a JSON object, and so is the result,
the last line of standard output. An error is the last line of standard error.
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

from .disk import DiskRate, disk_rate, drop_page_cache
from .document import BUSY, BenchRow, RowSetting
from .jobs import BenchJob
from .words import AUTO

KILLED = "killed for memory"
BUSY_PERCENT = 10  # of all cores, used by other programs right before a row
DISK_BYTES = 2_000_000_000  # most bytes to read per repeat, as a large model takes long
PACKAGE = str(Path(__file__).parents[1])


class ChildError(OutcoreError):
    """A child process was killed or failed."""


def measure_row(job: BenchJob, files: Sequence[Path]) -> BenchRow:
    """Measures a row after dropping ``files`` from the page cache. A job that fails gives a row with an ``error``."""
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
    """Measures the disk's read rate; None if that fails."""
    arguments = {"files": [str(f) for f in files], "most": DISK_BYTES}
    try:
        return DiskRate(**_child("disk", arguments))
    except ChildError:
        return None


def failed(job: BenchJob, why: str) -> BenchRow:
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
    """Cuts absolute paths to their last parts, as results may be shared."""
    return re.sub(r"(?<![\w.:/])(?:/[^\s/:'\",]+)+/([^\s/:'\",]+)", r"\1", text)


def main(kind: str, text: str) -> int:
    """Runs in the child process; returns the exit status."""
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
