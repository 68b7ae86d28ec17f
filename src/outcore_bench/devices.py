"""The paper's devices as numbers: what its own system does there, and what a plan of ours may assume. Predictions only.

*Theirs* is an engine without overlap: a token costs a fixed time and, for every streamed layer, one more, in which the
layer is loaded, waited for and computed with, one after the other. Two rows of a published sweep give both times.
Layers that the system's file cache does not hold cost their bytes at the SSD's rate besides. *Ours* is a
``Calibration`` from the published bandwidths, for ``plan`` to simulate reads under compute with. Nothing here was
measured by this project.

Which two rows is a rule: of those that stream something and do not thrash, the lowest residency and the highest. A row
at which nothing is streamed is not used: it has no load and no wait in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import inf
from typing import Any

from outcore.errors import UsageError
from outcore.plan.machine_profile import Calibration

COPIES = 2
"""Times that a cached layer's bytes cross the memory bus: out of the file cache, and into an array."""

USABLE = {
    "mac": (3 / 4, "three quarters of memory: Metal's recommended working set on large Macs"),
    "ipad": (2 / 3, "two thirds of memory: Metal's recommended working set on Apple silicon with up to 32 GB"),
    "iphone": (1 / 2, "half of memory: what iOS, which does not swap, leaves an app by common reports"),
}
"""Of a device's memory, what a process may use, and where that is from.

Working sets: llama.cpp's logs, 21845 MB of 32 GB (issue 1870), 73728 of 96 (3213). Phones: killed at half of 8 GB
(cardona/SwiftMistralCoreML issue 15); 3.12 of 6 GB to start with (a-ghorbani/pocketpal-ai pull request 651). The
paper's own rows only say that its phone's cliff lies between 4.28 and 5.28 GB, and its tablet's between 5.62 and 5.96.
"""


@cache
def published_data() -> dict[str, Any]:
    """The paper's tables as they stand in the package; not to be changed."""
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


@dataclass(frozen=True)
class Device:
    """One of the paper's devices, with the bandwidths that it states.

    Attributes:
        memory_bytes: memory sold as 8 GB is 8 GiB.
        memory_gbps, ssd_gbps: GB/s of 1e9 bytes.
    """

    name: str
    chip: str
    gpu_cores: int
    memory_bytes: int
    memory_gbps: float
    ssd_gbps: float

    @property
    def family(self) -> str:
        """``mac``, ``ipad`` or ``iphone``."""
        return self.name.split("-", 1)[0]

    @property
    def usable_bytes(self) -> int:
        """Memory that one process may use before the system swaps; ``usable_source`` says where that is from."""
        return int(self.memory_bytes * USABLE[self.family][0])

    @property
    def usable_source(self) -> str:
        """Where ``usable_bytes`` is from, in words."""
        return USABLE[self.family][1]

    @property
    def weight_gbps(self) -> float:
        """GB/s of weights that their fully resident models are computed with: all bytes over all seconds a token."""
        rows = [(r["mem_gb"], tps) for r, tps in self._resident_rows() if tps]
        return float(sum(gb for gb, _ in rows) / sum(1 / tps for _, tps in rows))

    @property
    def efficiency(self) -> float:
        """``weight_gbps`` as a share of the memory bandwidth."""
        return self.weight_gbps / self.memory_gbps

    @property
    def file_cache_bytes(self) -> float:
        """Of the files that their engine reads again for each token, bytes that come from memory each time."""
        return self.memory_bytes * file_cache_share()

    def calibration(self) -> Calibration:
        """What our engine would find there, if it got all of the SSD and as much of the memory bandwidth as theirs.

        Not measured: latency, synchronizing and slowing each other down are the assumptions of any machine.
        """
        return Calibration(read_gbps=self.ssd_gbps, weight_gbps=self.weight_gbps)

    def resident_tps(self, model: str) -> float | None:
        """Published tokens a second of a model without any streaming (tables 2 and 5); None where there is none."""
        return next((tps for r, tps in self._resident_rows() if r["model"] == model), None)

    def _resident_rows(self) -> list[tuple[dict[str, Any], float | None]]:
        if self.family == "mac":
            return [(r, r["tps"]) for r in published_data()["full_resident_mac_studio"]]
        return [(r, r[f"{self.family}_tps"]) for r in published_data()["device_baseline"]]


DEVICES = tuple(
    Device(
        d["name"],
        d["chip"],
        d["gpu_cores"],
        d["memory_gb"] * 2**30,
        d["memory_gbps"],
        d["ssd_gbps"],
    )
    for d in published_data()["devices"]
)
"""The paper's devices."""


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        UsageError: there is none; lists those that there are.
    """
    found = next((d for d in DEVICES if d.name == name), None)
    if found is None:
        raise UsageError(f"--device {name}: no such device; choose one of {', '.join(d.name for d in DEVICES)}")
    return found


@dataclass(frozen=True)
class PublishedRow:
    """One row of a sweep. ``streaming``: measured with their streaming loop, not with plain mlx-lm."""

    resident: int
    tps: float
    memory_bytes: float
    thrashing: bool = False
    streaming: bool = True


@dataclass(frozen=True)
class Sweep:
    """Speed against residency: one model on one device, from the paper's table of that number."""

    table: int
    device: Device
    model: str
    layers: int
    rows: tuple[PublishedRow, ...]

    def engine(self) -> TheirEngine:
        """Their engine, fitted to two of the rows."""
        return TheirEngine.fit(self.rows, self.layers, self.device)


@dataclass(frozen=True)
class TheirEngine:
    """The paper's layer streaming of one model on one device, without overlap. Seconds and bytes.

    Attributes:
        fixed_s: a token with nothing streamed, as the two rows have it: all computing, and what does not depend on
            residency. For 9B on 8 GB it is 1.2 to 2.6 s, many times what computing takes; the paper does not say why.
        layer_s: what each streamed layer adds: allocating, copying, waiting.
        read_gbps: of what the file cache does not hold.
        cache_bytes: what the file cache holds.
        layer_bytes: one layer's weights.
        base_bytes: what is in memory with no layer resident: all outside of layers, one layer's slot, the run's KV.
    """

    layers: int
    fixed_s: float
    layer_s: float
    read_gbps: float
    cache_bytes: float
    layer_bytes: float
    base_bytes: float

    @classmethod
    def fit(cls, rows: Sequence[PublishedRow], layers: int, where: Device) -> TheirEngine:
        """The engine through the two ``calibration_rows``.

        Reads at the SSD's rate cannot take longer than the rows differ: where they would, ``layer_s`` is 0 and the
        rows give the rate.
        """
        low, high = calibration_rows(rows, layers)
        more = high.resident - low.resident
        layer = (high.memory_bytes - low.memory_bytes) / more
        slower, cached = 1 / low.tps - 1 / high.tps, where.file_cache_bytes

        def missed(row: PublishedRow) -> float:
            return max(0.0, (layers - row.resident) * layer - cached)

        reads, rate = (missed(low) - missed(high)) / where.ssd_gbps / 1e9, where.ssd_gbps
        if reads > slower:
            rate = rate * reads / slower if slower > 0 else inf
        layer_s = max(0.0, slower - reads) / more
        fixed = 1 / high.tps - (layers - high.resident) * layer_s - missed(high) / rate / 1e9
        return cls(layers, fixed, layer_s, rate, cached, layer, low.memory_bytes - low.resident * layer)

    def seconds(self, resident: int) -> float:
        """Seconds of a token with that many layers resident, if memory suffices (see ``above_cliff``)."""
        streamed = self.layers - resident
        missed = max(0.0, streamed * self.layer_bytes - self.cache_bytes)
        return self.fixed_s + streamed * self.layer_s + missed / self.read_gbps / 1e9

    def needed_bytes(self, resident: int, kv_bytes: float = 0.0) -> float:
        """Memory of a process with that many layers resident.

        As in the paper's equation 2, solved for memory: non_layer + layer + resident * layer + runtime + kv_reserve,
        with its 150 MB for the runtime. The KV of the published runs is in their memory already; ``kv_bytes`` is more.
        """
        runtime = published_data()["adaptive_formula"]["runtime_mb"] * 1e6
        return float(self.base_bytes + resident * self.layer_bytes + runtime + kv_bytes)

    def above_cliff(self, resident: int, usable_bytes: float, kv_bytes: float = 0.0) -> bool:
        """Whether that residency needs more memory than a process may use, so that the system swaps.

        Their equation 2 goes by what the system says is free, and takes nine tenths of the layers that fit: with the
        6.5 GB of their tablet 24 layers of 9B, which thrash. Here the limit is a share of the device's memory
        (``Device.usable_bytes``), whatever is said to be free.
        """
        return self.needed_bytes(resident, kv_bytes) > usable_bytes


def calibration_rows(rows: Sequence[PublishedRow], layers: int) -> tuple[PublishedRow, PublishedRow]:
    """Of the rows that stream something and do not thrash, the lowest residency and the highest.

    Raises:
        UsageError: there are no two such rows.
    """
    fit = sorted((r for r in rows if r.streaming and r.resident < layers and not r.thrashing), key=lambda r: r.resident)
    if len(fit) < 2 or fit[0].resident == fit[-1].resident:
        raise UsageError(f"{len(fit)} rows that stream and do not thrash: two residencies are needed to fit an engine")
    return fit[0], fit[-1]


@cache
def sweeps() -> tuple[Sweep, ...]:
    """Every published sweep of speed against residency, by table and device.

    Table 9's last row, without streaming, is table 5's once more and left out.
    """
    data, (mac, ipad, iphone) = published_data(), DEVICES
    nine, four = "Qwen3.5-9B-6bit", "Qwen3.5-4B-4bit"
    counted = [r for r in data["sweep_4b_4bit"] if isinstance(r["resident"], int)]
    return (
        _sweep(4, mac, "Qwen3.5-9B-8bit", data["mac_studio_9b_8bit"], "tps"),
        *(_sweep(7, d, nine, data["hybrid_9b_6bit"], f"{d.family}_tps") for d in (ipad, iphone)),
        _sweep(8, ipad, nine, data["adaptive_9b_6bit_ipad"], "tps"),
        *(_sweep(9, d, four, counted, f"{d.family}_tps") for d in (ipad, iphone)),
    )


def _sweep(table: int, where: Device, model: str, raw: Sequence[dict[str, Any]], tps: str) -> Sweep:
    def row(r: dict[str, Any]) -> PublishedRow:
        note = str(r.get("note", "")).lower()
        # A note may name the one device of several that it is about.
        about = [f for f in USABLE if f in note] or [where.family]
        memory = r["mem_gb"] * 1e9 if "mem_gb" in r else r["mem_mb"] * 1e6
        thrashing = "thrash" in note and where.family in about
        return PublishedRow(r["resident"], r[tps], memory, thrashing, "no streaming" not in note)

    return Sweep(table, where, model, _layers(model), tuple(row(r) for r in sorted(raw, key=lambda r: r["resident"])))


def _layers(model: str) -> int:
    return int(_of(model, "full_resident_mac_studio")["layers"])


def _of(model: str, table: str) -> dict[str, Any]:
    return next(r for r in published_data()[table] if r["model"] == model)


@cache
def file_cache_share() -> float:
    """Of a device's memory, the share that holds files which are read again and again; from the two 8 GB devices' rows.

    Table 6 streams all of a model that is small enough to stay in the cache as a whole: less table 5's time without
    streaming, that is a layer's cost without the disk. With ``COPIES`` of its bytes at the memory's rate taken off, and
    those of table 9's model put on, it gives what that model's two calibration rows would differ by if the cache held
    all of it. What they differ by beyond that is reading at the SSD's rate, and its bytes are those that the cache did
    not hold. The larger model of tables 7 and 8 says nothing of this: it misses at every residency.
    """
    small, shares = "Qwen3.5-0.8B-8bit", []
    held = _of(small, "memory_reduction_at_0_resident")
    # Streaming holds one layer of its own.
    small_layer = (held["normal_gb"] - held["streaming_gb"]) * 1e9 / (_layers(small) - 1)
    for sweep in (s for s in sweeps() if s.table == 9):
        d = sweep.device
        streaming, resident = (_of(small, t)[f"{d.family}_tps"] for t in ("device_streaming", "device_baseline"))
        low, high = calibration_rows(sweep.rows, sweep.layers)
        more = high.resident - low.resident
        layer = (high.memory_bytes - low.memory_bytes) / more
        copying = COPIES / d.memory_gbps / 1e9
        layer_s = (1 / streaming - 1 / resident) / _layers(small) + (layer - small_layer) * copying
        missed = max(0.0, 1 / low.tps - 1 / high.tps - more * layer_s) * d.ssd_gbps * 1e9
        shares.append(((sweep.layers - low.resident) * layer - missed) / d.memory_bytes)
    return float(sum(shares) / len(shares))


@dataclass(frozen=True)
class ComparedRow:
    """A published row and what ``TheirEngine`` predicts for it.

    Attributes:
        error: predicted over published speed, less 1.
        streaming: False where the row has no streaming loop: then the prediction is the same model's row of table 2.
    """

    table: int
    device: str
    model: str
    resident: int
    streamed: int
    published_tps: float
    predicted_tps: float
    error: float
    used_for_calibration: bool
    thrashing_published: bool
    above_cliff_predicted: bool
    streaming: bool

    @property
    def judged(self) -> bool:
        """Whether ``error`` says something: not fitted to, and not beyond what the engine is a model of."""
        return not (self.used_for_calibration or self.thrashing_published)


def published_comparison() -> list[ComparedRow]:
    """Every row of every sweep, beside its prediction from two rows of the same sweep."""
    return [row for sweep in sweeps() for row in _compared(sweep)]


def _compared(sweep: Sweep) -> list[ComparedRow]:
    engine, used = sweep.engine(), calibration_rows(sweep.rows, sweep.layers)
    compared = []
    for row in sweep.rows:
        plain = None if row.streaming else sweep.device.resident_tps(sweep.model)
        predicted = plain or 1 / engine.seconds(row.resident)
        compared.append(
            ComparedRow(
                table=sweep.table,
                device=sweep.device.name,
                model=sweep.model,
                resident=row.resident,
                streamed=sweep.layers - row.resident,
                published_tps=row.tps,
                predicted_tps=predicted,
                error=predicted / row.tps - 1,
                used_for_calibration=row in used,
                thrashing_published=row.thrashing,
                above_cliff_predicted=engine.above_cliff(row.resident, sweep.device.usable_bytes),
                streaming=row.streaming,
            )
        )
    return compared


def mean_error(rows: Sequence[ComparedRow]) -> float | None:
    """Mean of the absolute errors of those rows that are judged; None where none is."""
    errors = [abs(row.error) for row in rows if row.judged]
    return sum(errors) / len(errors) if errors else None
