"""``outcore calibrate``: measures this machine's disk and a model's layers."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from outcore.calibration.calibration_file import file_of, key_of
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import whole
from outcore.cli.console import console, listing
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import loading_options
from outcore.cli.output import tell
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import UsageError
from outcore.machine.cache_folder import cache_dir
from outcore.machine.device import on_cpu
from outcore.machine.hardware import cores
from outcore.plan.machine_profile import Calibration
from outcore.sizes import format_size
from outcore.text import counted

from .calibration import calibrated


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    prepared = _prepare(args)
    streams = prepared.cpu_streams if prepared else (args.cpu_streams or cores()) if on_cpu() else 1
    profile = prepared.profile if prepared else None
    folder = profile.lazy.checkpoint.folder if profile else cache_dir()
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        tell(line)

    with ProgressBar() as bar:
        found, measured = calibrated(profile, folder, streams, force=args.force, progress=bar.measuring, note=note)
    args.result.record = {
        "model": str(folder) if prepared else None,
        "cpu_streams": streams,
        "measured_now": list(measured),
        "seconds": round(time.perf_counter() - began, 2),
        "stored": str(file_of(key_of(folder, streams))) if measured else None,
        "notes": notes,
        "model_kinds": sorted(profile.size.kinds) if profile else [],
        **asdict(found),
    }
    if not args.quiet:
        _show(args.result.record, found, prepared)


def _prepare(args: argparse.Namespace) -> Preparation | None:
    """Opens the model, if one is given; its plan does not matter."""
    if args.model is None:
        if args.revision is not None or args.dtype is not None:
            raise UsageError("--revision and --dtype need a model; give --model NAME")
        if args.cpu_streams is not None:
            whole("--cpu-streams", args.cpu_streams)
        return None
    return prepare(resolve_model(args.model, args.revision), least=True, **loading_options(args))


def _show(record: dict[str, Any], found: Calibration, prepared: Preparation | None) -> None:
    how = "cached" if found.io == "cached" else "direct"
    disk = f"{found.read_gbps:.3g} GB/s, {found.threads} requests of {(found.chunk or 0) >> 20} MiB in flight, {how}"
    rows = [
        ("disk", disk if found.measured else "not measured"),
        ("a small read", _time(found.read_latency_s)),
        ("waiting for the device", _time(found.sync_s)),
    ]
    if prepared is not None:
        size = prepared.profile.size
        for kind in dict.fromkeys([*(layer.kind for layer in size.layers), size.rest_kind]):
            layers = [layer for layer in size.layers if layer.kind == kind]
            name = f"{len(layers)} × {format_size(layers[0].resident)}" if layers else "all else"
            times = [f"{_time(seconds)} for {counted(n, 'token')}" for n, seconds in found.kinds.get(kind, {}).items()]
            rows += [(name, f"in memory {', '.join(times)}")] if times else []
    out = console()
    out.print(listing(rows))
    measured = f"Measured in {record['seconds']:.0f} s, and kept."
    out.print(measured if record["measured_now"] else "Known already; --force measures again.")
    for note in record["notes"]:
        out.print(f"Note: {note}")


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
