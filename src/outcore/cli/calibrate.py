"""``outcore calibrate``: measure this machine's disk and how long a model's layers take. Kept for the plans to come."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..calibration.calibrate import calibrated, kinds_of
from ..calibration.calibration_file import file_of, key_of
from ..checkpoint.find_model import resolve_model
from ..checkpoint.packed_store import cache_dir
from ..errors import UsageError
from ..loading.preparation import Preparation, prepare
from ..machine.device import on_cpu
from ..machine.hardware import cores
from ..plan.machine_profile import Calibration
from ..sizes import format_size
from .console import console
from .engine import measuring, progress_bar
from .output import tell


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    began = time.perf_counter()
    prepared = _prepare(args)
    if prepared is None and args.cpu_streams is not None and args.cpu_streams < 1:
        raise UsageError(f"--cpu-streams {args.cpu_streams}: at least 1")
    streams = prepared.cpu_streams if prepared else (args.cpu_streams or cores()) if on_cpu() else 1
    profile = prepared.profile if prepared else None
    folder = profile.lazy.checkpoint.folder if profile else cache_dir()
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        tell(line)

    with progress_bar() as bar:
        told = measuring(bar)
        found, measured = calibrated(profile, folder, streams, force=args.force, progress=told, note=note)
    record = {
        "model": str(folder) if prepared else None,
        "cpu_streams": streams,
        "measured_now": list(measured),
        "seconds": round(time.perf_counter() - began, 2),
        "stored": str(file_of(key_of(folder, streams))) if measured else None,
        "notes": notes,
        "model_kinds": sorted(kinds_of(profile)) if profile else [],
        **asdict(found),
    }
    _show(record, found, prepared)
    args.result.record = record


def _prepare(args: argparse.Namespace) -> Preparation | None:
    """The model, opened; its plan does not matter."""
    if args.model is None:
        if args.revision is not None or args.dtype is not None:
            raise UsageError("--revision and --dtype are about a model; give one")
        return None
    folder = resolve_model(args.model, args.revision)
    trusted = args.trust_remote_code
    return prepare(
        folder, least=True, dtype=args.dtype, cpu_streams=args.cpu_streams, trust_remote_code=trusted, flags=True
    )


def _show(record: dict[str, Any], found: Calibration, prepared: Preparation | None) -> None:
    out = console()
    how = "cached" if found.io == "cached" else "direct"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    requests = f"{found.threads} requests of {(found.chunk or 0) >> 20} MiB in flight"
    table.add_row("disk", f"{found.read_gbps:.3g} GB/s, {requests}, {how}")
    table.add_row("a small read", _time(found.read_latency_s))
    table.add_row("waiting for the device", _time(found.sync_s))
    out.print(table)
    if prepared is not None and (times := _times_table(found, prepared)) is not None:
        out.print(times)
    known = "Known already; --force measures again."
    out.print(f"Measured in {record['seconds']:.0f} s, and kept." if record["measured_now"] else known)
    for note in record["notes"]:
        out.print(f"Note: {note}")


def _times_table(found: Calibration, prepared: Preparation) -> Table | None:
    size = prepared.profile.size
    names = [*dict.fromkeys(layer.kind for layer in size.layers), size.rest_kind]
    kinds = {name: found.kinds[name] for name in names if name in found.kinds}
    if not kinds:
        return None
    counts = sorted({n for times in kinds.values() for n in times})
    title = "Milliseconds of one pass by number of tokens, weights in memory"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("", no_wrap=True)
    for n in counts:
        table.add_column(str(n), justify="right", no_wrap=True)
    for kind, times in kinds.items():
        layers = [layer for layer in size.layers if layer.kind == kind]
        name = f"{len(layers)} × {format_size(layers[0].resident)}" if layers else "all else"
        table.add_row(name, *(f"{1e3 * times[n]:.3g}" if n in times else "" for n in counts))
    return table


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
