"""A machine's speed as numbers: disk rates and seconds of layers. ``calibrate`` measures them.

Times are seconds, sizes bytes, rates GB/s of 1e9 bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

# Tokens per pass that are measured: a token, a draft, several sequences, and chunks of a prompt.
TOKENS = (1, 4, 16, 128, 512)


@dataclass(frozen=True)
class Calibration:
    """The speed of a machine and one of its disks.

    Attributes:
        read_gbps: disk rate of the reader with the fastest ``io``, ``threads`` and ``chunk``.
        read_latency_s: seconds of a small read while no other is in flight.
        sync_s: seconds to hand a graph to the device and wait for it, beyond those of computing.
        weight_gbps: GB/s of weights that a pass of one token computes with, for kinds that were not measured.
        decode_gbps: GB/s of bfloat16 weights that are decoded from a compact copy; None: unknown.
        kinds: for each kind of layer (``LayerSize.kind``) or rest of a model (``ModelSize.rest_kind``): seconds of one
            pass by number of tokens, when all weights are in memory.
        measured: False for assumed numbers.
    """

    read_gbps: float = 3.0
    read_latency_s: float = 0.0002
    sync_s: float = 0.0002
    weight_gbps: float = 10.0
    decode_gbps: float | None = None
    io: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    kinds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    measured: bool = False

    def seconds(self, kind: str, tokens: int) -> float | None:
        """Returns seconds of one pass of ``tokens`` tokens over a layer; None for an unknown kind.

        Interpolates linearly between measurements; extrapolates beyond the last two, and is flat below the first.
        """
        points = sorted(self.kinds.get(kind, {}).items())
        if not points:
            return None
        if tokens <= points[0][0] or len(points) == 1:
            return points[0][1] if tokens <= points[0][0] else points[0][1] * tokens / points[0][0]
        upper = min(bisect_left(points, (tokens, 0.0)), len(points) - 1)
        (n0, s0), (n1, s1) = points[upper - 1], points[upper]
        slope = max(0.0, (s1 - s0) / (n1 - n0))
        return s0 + slope * (tokens - n0) if tokens <= n1 else s1 + slope * (tokens - n1)
