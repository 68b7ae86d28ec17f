"""What a machine does, as numbers: how fast its disk reads and how long a model's layers take. Data only, no measuring.

``calibrate`` fills this in; ``simulate`` and ``plan`` read it. Times are seconds, sizes bytes, rates GB/s of 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

TOKENS = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens that compute is measured for."""


@dataclass(frozen=True)
class DiskPoint:
    """One measurement of the disk: requests of ``chunk`` bytes, ``in_flight`` at a time, around the cache or not."""

    chunk: int
    in_flight: int
    direct: bool
    gbps: float


@dataclass(frozen=True)
class Conditions:
    """When something was measured, and how quietly.

    Attributes:
        at: seconds since 1970.
        load: share of all cores that other processes used meanwhile, 0 to 1; None where the system does not say.
        spread: by how much of what was taken for it its samples were off: of compute the slowest quarter, of the disk
            all.
    """

    at: float
    load: float | None
    spread: float


@dataclass(frozen=True)
class Correction:
    """Times that computing and reading take as long as was measured, by what so many runs have shown."""

    compute: float = 1.0
    read: float = 1.0
    runs: int = 0


@dataclass(frozen=True)
class Calibration:
    """A machine and one of its disks.

    Attributes:
        read_gbps: what the reader gets from the disk with the ``io``, ``threads`` and ``chunk`` that read best.
        read_latency_s: from asking for a small read to its end, with nothing else in flight.
        unit_s: seconds that a unit's read takes beyond its bytes at that rate, by units asked for at a time.
        sync_s: cost of handing a graph to the device and waiting for it, beyond its computing.
        read_slowdown: by how much a read takes longer while the device computes; at least 1.
        compute_slowdown: by how much computing takes longer while the reader reads; at least 1.
        weight_gbps: GB/s of weights that are computed with, for one token; for kinds that were not measured.
        join_gbps: GB/s of codes that are put together from their high and low bits; None: as fast as weights are
            computed with.
        decode_gbps: GB/s of bfloat16 weights that are put together from three quarters of their bytes; None: not known.
        cast_gbps: GB/s of weights that are brought to the dtype they are computed in; None: as fast as weights are
            computed with.
        kinds: for each kind of layer (``LayerSize.kind``) or rest of a model (``ModelSize.rest_kind``): seconds of one
            pass over it by number of tokens, everything in memory.
        parts: for kinds of layers whose pieces can be computed one by one: seconds that each costs beside that.
        disk_points: every measurement of the disk.
        disk_conditions, kind_conditions: how the disk, and each kind, was measured; unknown where they are left out.
        product_s: seconds of a fixed product (``calibration.check``) at best, to compare the machine with later.
        corrections: what runs of one model have shown, by kind of plan (``correction``); not kept with the rest.
        measured: False for the assumptions of a machine that was never calibrated.
    """

    read_gbps: float = 3.0
    read_latency_s: float = 0.0002
    sync_s: float = 0.0002
    read_slowdown: float = 1.0
    compute_slowdown: float = 1.0
    weight_gbps: float = 10.0
    join_gbps: float | None = None
    decode_gbps: float | None = None
    cast_gbps: float | None = None
    io: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    kinds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    unit_s: Mapping[int, float] = field(default_factory=dict)
    disk_points: tuple[DiskPoint, ...] = ()
    disk_conditions: Conditions | None = None
    kind_conditions: Mapping[str, Conditions] = field(default_factory=dict)
    product_s: float | None = None
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    measured: bool = False

    def seconds(self, kind: str, tokens: int) -> float | None:
        """Seconds of one pass of ``tokens`` tokens over a layer of that kind; None for a kind that is not known."""
        times = self.kinds.get(kind)
        return interpolate(times, tokens) if times else None

    def read_s(self, nbytes: int, slots: int) -> float:
        """Seconds in which a unit of so many bytes is read, through a ring of so many slots."""
        ahead = max((n for n in self.unit_s if n < slots), default=0)
        return nbytes / self.read_gbps / 1e9 + self.unit_s.get(ahead, 0.0)

    def part_s(self, kind: str) -> float:
        """Seconds that each part of a layer of that kind costs, where it is computed in several."""
        return self.parts.get(kind, 0.0)

    def join_s(self, nbytes: int) -> float:
        """Seconds in which so many bytes of codes are put together."""
        return nbytes / (self.join_gbps or self.weight_gbps) / 1e9

    def joined(self, gbps: Sequence[float], share: float) -> Calibration:
        """The same machine where other disks are read at these rates, too.

        Args:
            share: of what is read, that they have; the rest is read from the one disk alone.
        """
        together = self.read_gbps + sum(gbps)
        return replace(self, read_gbps=min(together, self.read_gbps / (1 - share)) if share < 1 else together)

    def decode_s(self, nbytes: int) -> float:
        """Seconds in which weights of so many bytes are decoded."""
        return nbytes / (self.decode_gbps or self.weight_gbps) / 1e9

    def cast_s(self, nbytes: int) -> float:
        """Seconds in which weights are brought to a dtype in which they have so many bytes."""
        return nbytes / (self.cast_gbps or self.weight_gbps) / 1e9

    def slower(self, compute: float, read: float) -> Calibration:
        """The same machine where computing and reading take so many times as long."""
        return replace(
            self,
            read_gbps=self.read_gbps / read,
            read_latency_s=self.read_latency_s * read,
            unit_s={ahead: s * read for ahead, s in self.unit_s.items()},
            sync_s=self.sync_s * compute,
            weight_gbps=self.weight_gbps / compute,
            join_gbps=None if self.join_gbps is None else self.join_gbps / compute,
            decode_gbps=None if self.decode_gbps is None else self.decode_gbps / compute,
            cast_gbps=None if self.cast_gbps is None else self.cast_gbps / compute,
            parts={kind: s * compute for kind, s in self.parts.items()},
            kinds={kind: {n: s * compute for n, s in times.items()} for kind, times in self.kinds.items()},
        )


def interpolate(times: Mapping[int, float], tokens: int) -> float:
    """Seconds for a number of tokens: linear between measurements and on beyond the last two, flat below the first."""
    points = sorted(times.items())
    if tokens <= points[0][0] or len(points) == 1:
        return points[0][1] if tokens <= points[0][0] else points[0][1] * tokens / points[0][0]
    upper = next((i for i, (n, _) in enumerate(points) if n >= tokens), len(points) - 1)
    (n0, s0), (n1, s1) = points[upper - 1], points[upper]
    slope = max(0.0, (s1 - s0) / (n1 - n0))
    return s0 + slope * (tokens - n0) if tokens <= n1 else s1 + slope * (tokens - n1)
