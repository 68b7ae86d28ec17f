"""What ``outcore doctor`` looks at of a disk: right bytes, direct reads, how fast, and beside computing."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import mlx.core as mx

from ..calibration.calibration_file import load_calibration
from ..calibration.disk import ReadSetting
from ..disk import disk_calls
from ..disk.cold_ranges import forget, forget_before
from ..disk.layout import BLOCK, Extent, round_up
from ..disk.reader import CHUNK, FileReader
from ..disk.ring import Slot
from ..machine.device import device_kind, on_cpu
from ..machine.hardware import cores, filesystem
from .patient import REPORT, Finding, Patient

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
            with contextlib.closing(ReadSetting(CHUNK, n, direct).open([patient.file])) as reader:
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
