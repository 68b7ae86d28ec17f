"""What was measured beside other programs is measured again, unasked, when the machine is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ..errors import OutcoreError
from ..machine.neighbours import BUSY, Neighbours
from ..plan.certainty import others_load, unsure
from ..plan.machine_profile import Calibration, Conditions
from .check import ENOUGH_BYTES, PRODUCT_BYTES, product_times
from .compute import LayerTimes
from .disk import disk_rate_now, spread_of

QUIET_S = 0.4
"""Seconds for which others have to be still."""

REST_S = 60.0
"""Seconds in which nothing is measured again that just was: others come and go."""

BRIEF_S = 6.0
"""Seconds of measuring layers before a model is loaded."""

DISK_TURNS, DISK_TURN_S = 3, 0.5
"""Times that the disk is read before a model is loaded, and seconds of each."""


def is_quiet(neighbours: Neighbours | None = None, wait: Callable[[float], None] = time.sleep) -> bool:
    """Whether others leave the machine alone, for ``QUIET_S``; not, where the system does not say."""
    watched = neighbours or Neighbours()
    wait(QUIET_S)
    load = watched.lap()
    return load is not None and load < BUSY


def due(calibration: Calibration, kinds: set[str], quiet: Callable[[], bool], clock: float) -> tuple[str, ...]:
    """What is to be measured again now, of ``disk``, ``layers``: what others disturbed, where none do any more.

    Args:
        clock: seconds since 1970.
    """
    found = unsure(calibration, kinds)
    at = {
        "disk": calibration.disk_conditions,
        "layers": max(
            (c for kind in kinds if (c := calibration.kind_conditions.get(kind))), key=lambda c: c.at, default=None
        ),
    }
    rested = tuple(what for what in found if (c := at[what]) is None or not 0 <= clock - c.at < REST_S)
    return rested if rested and quiet() else ()


def quieter(old: Calibration, new: Calibration) -> Calibration:
    """Of each thing what was measured more quietly; all that one of them alone knows."""
    base = new if others_load(new.disk_conditions) <= others_load(old.disk_conditions) else old
    kinds, conditions = {**new.kinds, **old.kinds}, {**new.kind_conditions, **old.kind_conditions}
    parts = {**new.parts, **old.parts}
    for kind in new.kinds:
        if others_load(new.kind_conditions.get(kind)) <= others_load(old.kind_conditions.get(kind)):
            kinds[kind] = new.kinds[kind]
            parts |= {kind: new.parts[kind]} if kind in new.parts else {}
            conditions.pop(kind, None)
            if kind in new.kind_conditions:
                conditions[kind] = new.kind_conditions[kind]
    known = [s for s in (old.product_s, new.product_s) if s is not None]
    return replace(base, kinds=kinds, parts=parts, kind_conditions=conditions, product_s=min(known, default=None))


def renewed(
    known: Calibration,
    times: LayerTimes,
    cpu_streams: int,
    most_bytes: int,
    products: Callable[[int], Sequence[float]] = product_times,
) -> Calibration:
    """The calibration with these times of layers, and a product to compare with that was taken beside them, where
    there is memory for it."""
    if times.conditions is None:
        return known
    kinds = dict.fromkeys(times.kinds, times.conditions)
    found = replace(known, kinds=times.kinds, parts=times.parts, kind_conditions=kinds)
    return found if most_bytes < PRODUCT_BYTES else replace(found, product_s=min(products(cpu_streams)))


@dataclass(frozen=True)
class Brief:
    """The little that is measured again before a model is loaded.

    Args:
        files: of the model.
        most_bytes: of memory to read into, and to compute with beside the layers.
        layers: measures them.
    """

    files: Sequence[Path]
    cpu_streams: int
    most_bytes: int
    layers: Callable[[], LayerTimes]
    rate: Callable[..., float] = disk_rate_now
    products: Callable[[int], Sequence[float]] = product_times
    neighbours: Callable[[], Neighbours] = Neighbours

    def again(self, known: Calibration, what: Sequence[str]) -> Calibration:
        """The calibration with this of it measured again; as it was, where that could not be done or was disturbed
        more."""
        found = known
        if "layers" in what:
            found = renewed(found, self.layers(), self.cpu_streams, self.most_bytes, self.products)
        if "disk" in what and sum(f.stat().st_size for f in self.files) >= ENOUGH_BYTES:
            found = self._disk(found)
        return quieter(known, found)

    def _disk(self, known: Calibration) -> Calibration:
        watched, rates = self.neighbours(), []
        try:
            for _ in range(DISK_TURNS):
                rates.append(self.rate(self.files, known, seconds=DISK_TURN_S, most_bytes=self.most_bytes))
        except OutcoreError:  # whoever loads the model will hear of it
            return known
        if (gbps := median(rates)) <= 0:
            return known
        how = Conditions(time.time(), watched.whole(), spread_of(rates))
        return replace(known, read_gbps=gbps, disk_conditions=how)


def renewed_note(old: Calibration, kinds: set[str], what: Sequence[str], seconds: float) -> str:
    """For the user: what was measured again, and why."""
    loads = [others_load(old.disk_conditions)] if "disk" in what else []
    loads += [others_load(old.kind_conditions.get(kind)) for kind in kinds] if "layers" in what else []
    named = " and ".join({"disk": "the disk", "layers": "this model's layers"}[each] for each in what)
    return (
        f"{named} had been measured while others used {100 * max(loads):.0f} % of the cores: measured again now that "
        f"they are still, in {seconds:.0f} s"
    )
