"""What mirrors of a model add to the machine that it is planned for."""

from __future__ import annotations

from collections.abc import Sequence

from ..calibration.calibration_file import load_calibration
from ..checkpoint.mirror import about, same_disk
from ..disk.mirrored_reader import Replica
from ..engine.model_profile import ModelProfile
from ..options import LoadOptions
from ..plan.machine_profile import Calibration
from ..sizes import format_size

MOSTLY = 0.95
"""Share of the layers' bytes that mirrors have and from which nothing is said of the rest."""


def mirrored(
    machine: Calibration, mirrors: Sequence[Replica], profile: ModelProfile, o: LoadOptions, cpu_streams: int
) -> tuple[Calibration, tuple[str, ...]]:
    """The machine with the disks of mirrors as well, and what the user should know of them."""
    if not mirrors:
        return machine, ()
    known = {m: load_calibration(m.folder, cpu_streams, mirror=True)[0] for m in mirrors}
    rates = [found.read_gbps for m, found in known.items() if found is not None and not same_disk(m)]
    notes = [line for mirror in mirrors for line in about(mirror, profile.lazy.checkpoint)]
    copies = {file for mirror in mirrors for file in mirror.copies or ()}
    extents = [e for unit in profile.units if unit is not None for e in unit.extents]
    total = sum(e.nbytes for e in extents)
    there = sum(e.nbytes for e in extents if e.file in copies)
    if there < total * MOSTLY:
        notes.append(
            f"{format_size(total - there)} of {format_size(total)} of layers are in no mirror, and read from one disk: "
            "what mlx-lm changes when it loads lies in the cache (a mirror of what outcore pack writes has all)"
        )
    unknown = [str(m.folder) for m, found in known.items() if found is None]
    if unknown and machine.measured:
        name = o.name("mirror")
        notes.append(f"predicted without {', '.join(unknown)}: that disk was not measured (outcore plan {name})")
    return machine.joined(rates, there / total if total else 1.0), tuple(notes)
