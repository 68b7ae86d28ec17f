"""What a user should know of a model's mirrors."""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.mirror import about
from ..disk.mirrored_reader import Replica
from ..engine.model_profile import ModelProfile
from ..sizes import format_size

MOSTLY = 0.95
"""Share of the layers' bytes that mirrors have and from which nothing is said of the rest."""


def about_mirrors(mirrors: Sequence[Replica], profile: ModelProfile) -> tuple[str, ...]:
    """Notes on mirrors; none without any."""
    notes = [line for mirror in mirrors for line in about(mirror, profile.lazy.checkpoint)]
    copies = {file for mirror in mirrors for file in mirror.copies or ()}
    extents = [e for unit in profile.units if unit is not None for e in unit.extents]
    total = sum(e.nbytes for e in extents)
    there = sum(e.nbytes for e in extents if e.file in copies)
    if mirrors and there < total * MOSTLY:
        notes.append(
            f"{format_size(total - there)} of {format_size(total)} of layers are in no mirror, and read from one disk: "
            "what mlx-lm changes when it loads lies in the cache (a mirror of what outcore pack writes has all)"
        )
    return tuple(notes)
