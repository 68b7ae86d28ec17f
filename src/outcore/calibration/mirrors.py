"""What the disks of mirrors read, each measured alone: together they give about the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..checkpoint.mirror import same_disk
from ..disk.cold_ranges import own_files
from ..disk.replica import Replica
from ..plan.machine_profile import Calibration
from ..sizes import format_size
from .calibration_file import load_calibration, store_calibration
from .disk import Bench, best_setting


@dataclass(frozen=True)
class MirrorRates:
    """What is known of mirrors.

    Attributes:
        gbps: of each that was measured and lies on another disk than the model.
        unknown: that were not measured.
    """

    gbps: tuple[float, ...]
    unknown: tuple[Replica, ...]


def known_mirrors(mirrors: Sequence[Replica], cpu_streams: int) -> MirrorRates:
    """What was measured of mirrors before; they are read from as that reads best."""
    gbps, unknown = [], []
    for mirror in mirrors:
        found, _ = load_calibration(mirror.folder, cpu_streams, mirror=True)
        if found is None:
            unknown.append(mirror)
            continue
        mirror.threads = found.threads
        mirror.io = found.io if found.io != "auto" else mirror.io
        if not same_disk(mirror):
            gbps.append(found.read_gbps)
    return MirrorRates(tuple(gbps), tuple(unknown))


def calibrate_mirrors(
    mirrors: Sequence[Replica],
    cpu_streams: int,
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Calibration]:
    """The disks of mirrors: those that are not known are measured, on the mirrors' own files, and kept.

    Raises:
        CalibrationError: what was measured cannot be kept.
        ReadError: a file cannot be read.
    """
    all_found = []
    for mirror in mirrors:
        found, _ = load_calibration(mirror.folder, cpu_streams, mirror=True)
        if found is None or force:
            assert mirror.copies is not None
            unread, times = own_files(mirror.copies.values())
            if times > 1:
                note(
                    f"{mirror.folder}: its disk was measured on {format_size(unread.nbytes // times)}, read {times} "
                    "times, which may be faster than reading once"
                )
            found = best_setting(Bench(unread), progress).calibration()
            store_calibration(mirror.folder, cpu_streams, found, mirror=True)
        all_found.append(found)
    return all_found
