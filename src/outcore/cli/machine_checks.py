"""``outcore doctor``: whether what Outcore relies on holds on this machine, within 20 seconds.

Each check is a function of its own that finds one thing and says what to do about it; one that itself fails is a
finding too.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..calibration.calibration_file import load_calibration
from ..calibration.disk import Setting
from ..disk import disk_calls
from ..disk.cold_ranges import forget, forget_before, scratch_file
from ..disk.disk_probe import DiskProbe, probe_disk
from ..disk.layout import BLOCK, Extent, round_up
from ..disk.reader import CHUNK, FileReader
from ..disk.ring import Slot
from ..disk.slot_probe import REWRITES, unseen_rewrites
from ..errors import OutcoreError
from ..loading.loader import load_model
from ..loading.preparation import prepare
from ..model.packed_store import open_model
from ..planning.planner import resident_budget
from ..runtime.kernels import SHARES, Compiling, compile_kernels, keep_kernels, kernels_kept
from ..sizes import format_size
from ..system.cache_folder import cache_dir, make_cache
from ..system.device import device_facts, device_kind, on_cpu, on_cuda
from ..system.hardware import cores, cpu_name, filesystem, gpu_name
from ..system.memory import default_budget, memory_limits
from ..system.pressure import pressure_signals

SCRATCH_BYTES = 512 << 20
"""Of the file that is read where no model's is; written in a second or two."""

LANES, LANE_BYTES = (1, 4, 8), 64 << 20
"""Reads in flight that are tried, and bytes for each of them."""

FROM_MEMORY = 0.5
"""A range that takes less than this share of the time when it is read again did not come from the disk."""

COUNTED, DRIFTED = 1.5, 2.0
"""Times that the reader's own count, and a calibration, may differ from what a clock says: reads of 64 MiB take tens of
milliseconds on a quick disk, and others use it too."""

OVERLAP_BYTES, OVERLAP_ROUNDS, RATE_ROUNDS = 256 << 20, 4, 4

ASKING = 0.25
"""Share of a read's time that asking for it may take: reads run by themselves."""

LEFT = 0.1
"""Share of a range that the page cache may hold after a direct read: others may read the file, too."""

Check = Callable[["Patient"], "Finding"]


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
        facts: numbers for a program, by name.
        compiling: the kernels of the embedded model, beside the other checks; None: its loading compiles them.
    """

    file: Path
    model: Path | None = None
    disk: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    compiling: Compiling | None = None
    _probe: DiskProbe | None = None

    @property
    def probe(self) -> DiskProbe:
        """What the disk does; looked at once."""
        if self._probe is None:
            self._probe = probe_disk(self.file)
        return self._probe


def examine(
    model: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    facts: dict[str, Any] | None = None,
) -> list[Finding]:
    """All findings, in the order of ``CHECKS``.

    Args:
        model: a folder whose files and plan are looked at, too.
        facts: gets numbers for a program, by name.
    """
    findings = []
    with _patient(model) as patient, contextlib.ExitStack() as stack:
        with contextlib.suppress(OutcoreError):
            patient.compiling = _compile_beside()
        if patient.compiling is not None:
            stack.callback(patient.compiling.close)
        patient.facts = {} if facts is None else facts
        for n, (name, check) in enumerate(CHECKS.items()):
            progress(name, n, len(CHECKS))
            try:
                findings.append(check(patient))
            except Exception as e:  # whatever a broken machine raises: the other checks are of use all the same
                said = " ".join(str(e).split()) or type(e).__name__
                known = isinstance(e, OutcoreError)
                findings.append(Finding(name, False, said if known else f"{type(e).__name__}: {said}", REPORT))
    return findings


REPORT = "please report this page"

EMBEDDED: dict[str, Any] = {"memory": "400MB", "context": 8, "prompt": 4, "draft": "none"}
"""How the model that comes with Outcore is loaded."""


def _embedded() -> contextlib.AbstractContextManager[Path]:
    return resources.as_file(resources.files("outcore") / "demo_model")


def _compile_beside() -> Compiling | None:
    """Begin to compile the embedded model's kernels, where there are cores for that and for the other checks."""
    if not on_cuda() or cores() < 2 * SHARES:
        return None
    with _embedded() as folder:
        prepared = prepare(folder, **EMBEDDED)
        return compile_kernels(prepared.profile, prepared.opened, prepared.plan.budget_bytes, EMBEDDED["prompt"])


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
            # The disk of the model that comes with Outcore, then.
            folder = stack.enter_context(_embedded())
            path = next(iter(sorted(folder.glob("*.safetensors"))))
            yield Patient(path)
            return
        yield Patient(path, disk=cache_dir())


def machine(_: Patient) -> Finding:
    """What it is, and which MLX computes on what."""
    device = gpu_name() or "the CPU"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("machine", True, f"{cpu_name()}, {system}; MLX {version('mlx')} on {device}")


def memory(patient: Patient) -> Finding:
    """What may be used, by each limit."""
    limits = memory_limits()
    patient.facts["default_budget_bytes"] = budget = default_budget()
    text = "; ".join(f"{x.source}: {format_size(x.available)} of {format_size(x.total)}" for x in limits)
    return Finding("memory", True, f"{text}; without --memory {format_size(budget)} are used")


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
        ways = {way for _, _, way in wrong}
        advice = "answers would be wrong; " + ("try --io cached, and " if ways == {"direct"} else "") + REPORT
        return Finding("offsets", False, f"wrong bytes from offset {told}", advice)
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
        advice = (
            "something that is not the page cache keeps what was read (a hypervisor, a controller): speeds will vary"
        )
        return Finding("direct reads", None, f"faster the second time: {rates}", advice)
    more = "" if held is not None else "; what the page cache holds is not told here"
    more += "" if p.forgets else "; it cannot be told to forget"
    more += "; not straight into MLX's memory, but through a buffer" if p.bounces else ""
    return Finding("direct reads", True, f"around the page cache: {rates}{more}")


def _left_behind(file: Path, nbytes: int) -> float | None:
    """Share of a range that a direct read adds to the page cache; None: the system does not tell what that holds."""
    middle = (file.stat().st_size - nbytes) // 2 // BLOCK * BLOCK
    extent, slot, calls = Extent(file, middle, nbytes, 0, in_place=True), _slot(nbytes), disk_calls.system()
    fd = calls.open_cached(file)
    try:
        forget([extent])
        before = calls.held(fd, middle, nbytes)
        with contextlib.closing(FileReader([file])) as reader:
            reader.submit("doctor", [extent], slot.payload).wait()
        after = calls.held(fd, middle, nbytes)
    finally:
        calls.close(fd)
    return None if before is None or after is None else after - before


def rates(patient: Patient) -> Finding:
    """GB/s by the number of reads in flight, counted by the reader and by a clock beside it."""
    size, direct = patient.file.stat().st_size, patient.probe.direct
    lanes = sorted({*LANES, *disk_calls.system().lanes})
    nbytes = min(LANE_BYTES, size // len(lanes) // BLOCK * BLOCK)
    folder = patient.disk or patient.file.parent
    where = filesystem(folder)
    if nbytes < CHUNK:
        return Finding(
            "disk", None, f"{where}: the file is too small to measure with", "leave out --model, or give a larger one"
        )
    slot, counted, clocked = _slot(nbytes), dict[int, float](), dict[int, float]()
    for i, n in enumerate(lanes):
        extent = Extent(patient.file, i * nbytes, nbytes, 0, in_place=True)
        for _ in range(RATE_ROUNDS):
            with contextlib.closing(Setting(CHUNK, n, direct).open([patient.file])) as reader:
                forget_before(reader.direct, [extent])
                began = time.perf_counter()
                reader.submit("doctor", [extent], slot.payload).wait()
                clocked[n] = nbytes / (time.perf_counter() - began) / 1e9
                counted[n] = reader.metrics.read_gbps
            if _agree(counted[n], clocked[n]):
                break
    patient.facts["gbps_by_lanes"] = {n: round(rate, 3) for n, rate in clocked.items()}
    text = f"{where}; GB/s by reads in flight: " + ", ".join(f"{n}: {rate:.2f}" for n, rate in clocked.items())
    if not all(_agree(counted[n], clocked[n]) for n in lanes):
        told = ", ".join(f"{n}: {rate:.2f}" for n, rate in counted.items())
        return Finding("disk", False, f"{text}, but counted as {told}", f"speeds are told wrong; {REPORT}")
    calibration, _ = load_calibration(folder, _streams())
    if calibration is not None and calibration.measured:
        text += f"; calibrated: {calibration.read_gbps:.2f}"
        if not 1 / DRIFTED < calibration.read_gbps / max(clocked.values()) < DRIFTED:
            advice = "predictions are off; measure again with outcore calibrate when the machine is quiet"
            return Finding("disk", False, text, advice)
    return Finding("disk", True, text)


def _agree(counted: float, clocked: float) -> bool:
    return 1 / COUNTED < counted / clocked < COUNTED


def _streams() -> int:
    return cores() if on_cpu() else 1


def _slot(nbytes: int) -> Slot:
    return Slot(round_up(nbytes, BLOCK), device_kind())


def pressure(_: Patient) -> Finding:
    """What tells that memory gets short can be read."""
    signals = pressure_signals()
    there = [s.name for s in signals if s.readable]
    # Of each system some are another's; what every one has are the limits and a count of page faults or of swapping.
    ok = any(name in there for name in ("swap-outs", "macOS's pressure level", "stalls (some)", "major page faults"))
    advice = "" if ok else "memory that gets short will be noticed late: give --memory with room to spare"
    return Finding("pressure", ok, f"this system tells: {', '.join(there)}", advice)


def limits(patient: Patient) -> Finding:
    """The device's limits, against the plan of the model."""
    facts = device_facts()
    told = [f"largest slot {format_size(facts.slot)}"]
    told += [f"largest buffer {format_size(facts.buffer)}"] if facts.buffer is not None else []
    told += [f"recommended working set {format_size(facts.working_set)}"] if facts.working_set is not None else []
    told += [f"wired limit {format_size(facts.wired_limit)}"] if facts.wired_limit is not None else []
    if patient.model is None:
        return Finding("limits", True, ", ".join(told))
    prepared = prepare(patient.model, least=True)
    plan, whole = prepared.plan, resident_budget(prepared.profile.size)
    told.append(
        f"this model with {prepared.profile.size.context} tokens: smallest budget "
        f"{format_size(plan.smallest_budget_bytes, round_up=True)}, all resident from "
        f"{format_size(whole, round_up=True)}, without --memory {format_size(plan.peak_bytes)} at most"
        + (f", slots of {format_size(plan.slot_bytes)}" if plan.streams else "")
    )
    if facts.working_set is not None and plan.peak_bytes > facts.working_set:
        advice = f"give --memory {format_size(facts.working_set)} or less: more cannot stay wired, and would crawl"
        return Finding("limits", False, ", ".join(told), advice)
    if prepared.refused is not None:
        return Finding("limits", False, prepared.refused, "free memory, or give a smaller context")
    return Finding("limits", True, ", ".join(told))


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
    extent = Extent(patient.file, 0, size, 0, in_place=True)
    slot = _slot(size)
    text = ""
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
            patient.facts["overlap"] = {"reading_s": reading_s, "asking_s": asking_s, "computing_s": computing_s}
            if there and asking_s < ASKING * reading_s:
                return Finding("overlap", True, "reading goes on while the device computes")
    advice = "reads are not hidden behind computing: if others use this machine, run this again when it is quiet"
    return Finding("overlap", False, text, advice)


def answers(patient: Patient) -> Finding:
    """The model that comes with Outcore gives the same logits, streamed and resident."""
    if patient.compiling is not None:
        patient.compiling.wait()
    with _embedded() as folder:
        logits = []
        for resident in (0, None):
            model, _config = load_model(folder, resident=resident, **EMBEDDED)
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
    told = f"embedded model: {logits[0].size} logits equal, bit for bit, streamed and resident"
    return Finding("answers", True, told)


def kernels(_: Patient) -> Finding:
    """Where compiled kernels are kept."""
    keep_kernels()
    kept = kernels_kept()
    if kept is None:
        return Finding("kernels", True, "compiled by MLX as they are needed, in seconds")
    folder, nbytes = kept
    return Finding("kernels", True, f"compiled once and kept, {format_size(nbytes)} in {folder}; removing it is safe")


CHECKS: dict[str, Check] = {
    "machine": machine,
    "memory": memory,
    "slots": slots,
    "offsets": offsets,
    "direct reads": direct,
    "disk": rates,
    "pressure": pressure,
    "limits": limits,
    "overlap": overlap,
    "answers": answers,
    "kernels": kernels,
}
