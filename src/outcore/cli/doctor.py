"""``outcore doctor``: whether what Outcore relies on holds on this machine, within 20 seconds.

Each check is a function of its own that finds one thing and says what to do about it; one that itself fails is a
finding too.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..calibration.calibration_file import load_calibration
from ..calibration.disk import ReadSetting
from ..checkpoint.find_model import resolve_model
from ..checkpoint.packed_store import open_model
from ..checkpoint.random_checkpoint import save_random_checkpoint
from ..disk import disk_calls
from ..disk.cold_ranges import forget, forget_before, scratch_file
from ..disk.disk_probe import REWRITES, DiskProbe, probe_disk, unseen_rewrites
from ..disk.layout import Extent
from ..disk.reader import CHUNK, FileReader
from ..disk.ring import Slot
from ..errors import OutcoreError, StoreError
from ..loading.loader import load_model
from ..loading.preparation import prepare
from ..machine.cache_folder import cache_dir, make_cache
from ..machine.device import device_kind, on_cpu
from ..machine.device_facts import device_facts
from ..machine.hardware import cores, cpu_name, filesystem, gpu_name
from ..machine.memory import default_budget
from ..sizes import BLOCK, format_size, round_up
from ..text import one_line
from ..version import __version__
from .console import console
from .engine import progress_bar

REPORT = "please report what stands here"
VERDICTS = {True: "ok", False: "FAILED", None: "note"}

SCRATCH_BYTES = 512 << 20
"""Of the file that is read where no model's is; written in a second or two."""

SMALL: dict[str, Any] = {"memory": "400MB", "context": 8, "prompt": 4, "draft": "none"}
"""How the small model is loaded."""

LANES, LANE_BYTES = (1, 4, 8), 64 << 20
"""Reads in flight that are tried, and bytes for each of them."""

OVERLAP_BYTES, OVERLAP_ROUNDS = 256 << 20, 4

FROM_MEMORY = 0.5
"""A range that takes less than this share of the time when it is read again did not come from the disk."""

DRIFTED = 2.0
"""Times that a calibration may differ from what is found: others use the disk too."""

ASKING = 0.25
"""Share of a read's time that asking for it may take: reads run by themselves."""

LEFT = 0.1
"""Share of a range that the page cache may hold after a direct read: others may read the file, too."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        ok: None: nothing is wrong, but something is worth knowing.
        advice: what to do about it.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass
class Patient:
    """What checks look at.

    Attributes:
        file: that is read: the largest of the model's, or a scratch file.
        model: a folder; None: none was given.
        disk: a folder on the file's disk, where its own path does not tell.
    """

    file: Path
    model: Path | None = None
    disk: Path | None = None

    @cached_property
    def probe(self) -> DiskProbe:
        """What the disk does."""
        return probe_disk(self.file)


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit status, 1 where a check failed."""
    model = resolve_model(args.model, args.revision) if args.model is not None else None
    began, budget = time.perf_counter(), default_budget()
    with progress_bar() as bar:
        findings = examine(model, bar.count)
    out = console()
    out.print(
        f"Outcore {__version__}, MLX {version('mlx')} on {gpu_name() or 'the CPU'}; {cpu_name()}, {platform.system()} "
        f"{platform.release()} {platform.machine()}; without --memory {format_size(budget)} are used\n"
    )
    for f in findings:
        out.print(f"{VERDICTS[f.ok]:6} {f.name}: {f.found}" + (f"\n       → {f.advice}" if f.advice else ""))
    failed = [f.name for f in findings if f.ok is False]
    wrong = f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}. What to do stands above."
    out.print(f"\n{wrong if failed else f'All {len(findings)} checks passed: nothing to do.'}")
    args.result.record = {
        "findings": [asdict(f) for f in findings],
        "failed": failed,
        "seconds": time.perf_counter() - began,
        "default_budget_bytes": budget,
    }
    return 1 if failed else 0


def examine(model: Path | None = None, progress: Callable[[str, int, int], None] = lambda *_: None) -> list[Finding]:
    """All findings, in the order of ``CHECKS``.

    Args:
        model: a folder whose files and plan are looked at, too.
    """
    findings = []
    with _patient(model) as patient:
        for n, (name, check) in enumerate(CHECKS.items()):
            progress(name, n, len(CHECKS))
            try:
                findings.append(check(patient))
            except Exception as e:  # whatever a broken machine raises: the other checks are of use all the same
                said = one_line(e) if isinstance(e, OutcoreError) else f"{type(e).__name__}: {one_line(e)}"
                findings.append(Finding(name, False, said, REPORT))
    return findings


@contextlib.contextmanager
def _patient(model: Path | None) -> Iterator[Patient]:
    if model is not None:
        files = open_model(model).checkpoint.files
        yield Patient(max(files, key=lambda f: f.stat().st_size), model)
        return
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(scratch_file(make_cache(), nbytes=SCRATCH_BYTES))
        except (OutcoreError, OSError):
            # The disk of temporary files, then.
            folder = stack.enter_context(_small_model())
            yield Patient(next(iter(sorted(folder.glob("*.safetensors")))))
            return
        yield Patient(path, disk=cache_dir())


@contextlib.contextmanager
def _small_model() -> Iterator[Path]:
    """A model of random weights, in a folder that is there for as long as the block runs.

    Raises:
        StoreError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outcore-doctor-")))
            save_random_checkpoint(folder)
        except OSError as e:
            raise StoreError(
                f"a small model to look at cannot be written ({e.strerror or e}): set TMPDIR to a folder that can be "
                "written to and has 20 MB free"
            ) from e
        yield folder


def slots(_: Patient) -> Finding:
    """A slot that is written in place is what the device sees."""
    unseen = unseen_rewrites()
    if unseen:
        advice = f"nothing can be streamed on this device, and answers would be wrong: {REPORT}"
        return Finding("slots", False, f"{unseen} of {REWRITES} rewrites were not seen by the device", advice)
    return Finding("slots", True, f"{REWRITES} of {REWRITES} rewrites were seen by the device")


def offsets(patient: Patient) -> Finding:
    """Reads at odd offsets give the file's bytes."""
    wrong = patient.probe.wrong
    if wrong:
        told = ", ".join(f"{offset} (alignment {align}, {way})" for offset, align, way in wrong[:4])
        cached = "try --io cached, and " if {way for _, _, way in wrong} == {"direct"} else ""
        return Finding("offsets", False, f"wrong bytes from offset {told}", f"answers would be wrong; {cached}{REPORT}")
    return Finding("offsets", True, "all bytes right, at odd offsets too")


def direct(patient: Patient) -> Finding:
    """Direct reads are direct: they leave nothing in the page cache, and the same range read again is no faster."""
    p = patient.probe
    rates = f"{p.nbytes / p.first_s / 1e9:.2f} GB/s, and {p.nbytes / p.second_s / 1e9:.2f} again"
    if not p.direct:
        return Finding("direct reads", None, f"refused here, so weights go through the page cache ({rates})")
    held = _left_behind(patient.file, p.nbytes)
    if held is not None and held > LEFT:
        told = f"{100 * held:.0f} % of what was read stayed in the page cache ({rates})"
        return Finding("direct reads", False, told, f"speeds measured here may be the cache's; {REPORT}")
    if p.second_s < FROM_MEMORY * p.first_s:
        advice = "a hypervisor or a controller keeps what was read: speeds will vary"
        return Finding("direct reads", None, f"faster the second time: {rates}", advice)
    return Finding("direct reads", True, f"around the page cache: {rates}")


def _left_behind(file: Path, nbytes: int) -> float | None:
    """Share of a range that a direct read adds to the page cache; None: the system does not tell what that holds."""
    middle = (file.stat().st_size - nbytes) // 2 // BLOCK * BLOCK
    extent, calls = Extent(file, middle, nbytes, 0, in_place=True), disk_calls.system()
    fd = calls.open_cached(file)
    try:
        forget([extent])
        before = calls.held(fd, middle, nbytes)
        with contextlib.closing(FileReader([file])) as reader:
            reader.submit("doctor", [extent], _slot(nbytes).payload).wait()
        after = calls.held(fd, middle, nbytes)
    finally:
        calls.close(fd)
    return None if before is None or after is None else after - before


def rates(patient: Patient) -> Finding:
    """GB/s by the number of reads in flight, beside what was calibrated."""
    size, direct = patient.file.stat().st_size, patient.probe.direct
    lanes = sorted({*LANES, *disk_calls.system().lanes})
    nbytes = min(LANE_BYTES, size // len(lanes) // BLOCK * BLOCK)
    folder = patient.disk or patient.file.parent
    where = filesystem(folder)
    if nbytes < CHUNK:
        advice = "leave out --model, or give a larger one"
        return Finding("disk", None, f"{where}: the file is too small to measure with", advice)
    slot, found = _slot(nbytes), dict[int, float]()
    for i, n in enumerate(lanes):
        extent = Extent(patient.file, i * nbytes, nbytes, 0, in_place=True)
        with contextlib.closing(ReadSetting(CHUNK, n, direct).open([patient.file])) as reader:
            forget_before(reader.direct, [extent])
            began = time.perf_counter()
            reader.submit("doctor", [extent], slot.payload).wait()
            found[n] = nbytes / (time.perf_counter() - began) / 1e9
    text = f"{where}; GB/s by reads in flight: " + ", ".join(f"{n}: {rate:.2f}" for n, rate in found.items())
    calibration, _ = load_calibration(folder, cores() if on_cpu() else 1)
    if calibration is not None and calibration.measured:
        text += f"; calibrated: {calibration.read_gbps:.2f}"
        if not 1 / DRIFTED < calibration.read_gbps / max(found.values()) < DRIFTED:
            advice = "predictions are off; measure again with outcore calibrate when the machine is quiet"
            return Finding("disk", False, text, advice)
    return Finding("disk", True, text)


def _slot(nbytes: int) -> Slot:
    return Slot(round_up(nbytes, BLOCK), device_kind())


def limits(patient: Patient) -> Finding:
    """The device's limits, against the plan of the model."""
    facts = device_facts()
    names = {"largest buffer": facts.buffer, "recommended working set": facts.working_set}
    known = {"largest slot": facts.slot} | names | {"wired limit": facts.wired_limit}
    told = ", ".join(f"{name} {format_size(n)}" for name, n in known.items() if n is not None)
    if patient.model is None:
        return Finding("limits", True, told)
    prepared = prepare(patient.model, least=True)
    plan = prepared.plan
    told += f"; this model without --memory: {format_size(plan.peak_bytes)} at most"
    if facts.working_set is not None and plan.peak_bytes > facts.working_set:
        advice = f"give --memory {format_size(facts.working_set)} or less: more cannot stay wired, and would crawl"
        return Finding("limits", False, told, advice)
    if prepared.refused is not None:
        return Finding("limits", False, prepared.refused, "free memory, or give a smaller context")
    return Finding("limits", True, told)


def overlap(patient: Patient) -> Finding:
    """Reading goes on while the device computes: neither waits for the other."""
    weights = mx.full((1024, 1024), 1e-3, dtype=mx.float32)
    x = mx.ones((16, 1024), dtype=mx.float32)

    def compute(until: float) -> float:
        """Products, one after the other; the time when the last had ended."""
        while (now := time.perf_counter()) < until:
            mx.eval(x @ weights)
        return now

    size = min(patient.file.stat().st_size, OVERLAP_BYTES)
    extent, slot, text = Extent(patient.file, 0, size, 0, in_place=True), _slot(size), ""
    with contextlib.closing(FileReader([patient.file])) as reader:
        for _ in range(OVERLAP_ROUNDS):
            forget_before(reader.direct, [extent])
            began = time.perf_counter()
            reader.submit("doctor", [extent], slot.payload).wait()
            reading_s = time.perf_counter() - began
            forget_before(reader.direct, [extent])
            began = time.perf_counter()
            read = reader.submit("doctor", [extent], slot.payload)
            asking_s = time.perf_counter() - began
            computing_s = compute(began + 2 * reading_s) - began - asking_s
            there = read.ready
            read.wait()
            text = f"{reading_s:.3f} s of reading took {asking_s:.3f} s to ask for, and had "
            text += f"{'' if there else 'not '}ended after {computing_s:.3f} s of computing"
            if there and asking_s < ASKING * reading_s:
                return Finding("overlap", True, "reading goes on while the device computes")
    advice = "reads are not hidden behind computing: if others use this machine, run this again when it is quiet"
    return Finding("overlap", False, text, advice)


def answers(_: Patient) -> Finding:
    """A small model gives the same logits, streamed and resident."""
    with _small_model() as folder:
        logits = []
        for resident in (0, None):
            model, _config = load_model(folder, resident=resident, **SMALL)
            with model.outcore as session:
                found = model(mx.array([[5, 7, 11, 13]]))
                again = model(mx.array([[5, 7, 11, 13]]))
                mx.eval(found, again)
                logits += [np.array(found.astype(mx.float32)), np.array(again.astype(mx.float32))]
                streamed = session.streaming is not None
            if resident == 0 and not streamed:
                return Finding("answers", False, "the model was not streamed", REPORT)
    differs = sum(not np.array_equal(logits[-1], other) for other in logits[:-1])
    if differs or not np.isfinite(logits[-1]).all():
        return Finding("answers", False, "streamed logits are not the resident ones", f"do not use it; {REPORT}")
    told = f"model of random weights: {logits[0].size} logits equal, bit for bit, streamed and resident"
    return Finding("answers", True, told)


CHECKS: dict[str, Callable[[Patient], Finding]] = {
    "slots": slots,
    "offsets": offsets,
    "direct reads": direct,
    "disk": rates,
    "limits": limits,
    "overlap": overlap,
    "answers": answers,
}
