"""The paper's devices as numbers: what a plan of ours may assume there, and the speeds that its own system has there.

*Ours* is a ``Calibration`` from the published bandwidths, for ``plan`` to simulate reads under compute with. Nothing
here was measured by this project.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from outcore.errors import UsageError
from outcore.plan.machine_profile import Calibration

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
        ssd_gbps: GB/s of 1e9 bytes.
    """

    name: str
    memory_bytes: int
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
        mac = self.family == "mac"
        rows = published_data()["full_resident_mac_studio" if mac else "device_baseline"]
        speeds = [(r["mem_gb"], r["tps" if mac else f"{self.family}_tps"]) for r in rows]
        return float(sum(gb for gb, tps in speeds if tps) / sum(1 / tps for _, tps in speeds if tps))

    def calibration(self) -> Calibration:
        """What our engine would find there, if it got all of the SSD and as much of the memory bandwidth as theirs.

        Not measured: latency, synchronizing and slowing each other down are the assumptions of any machine.
        """
        return Calibration(read_gbps=self.ssd_gbps, weight_gbps=self.weight_gbps)


DEVICES = tuple(Device(d["name"], d["memory_gb"] * 2**30, d["ssd_gbps"]) for d in published_data()["devices"])
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
    """What the paper's system does on a device with so many of a model's layers in memory, from its table of that
    number; ``thrashing``: the system swapped."""

    table: int
    device: str
    model: str
    resident: int
    layers: int
    tps: float
    thrashing: bool = False


def published_rows(where: Device) -> list[PublishedRow]:
    """Every row of a sweep of speed against residency on that device."""
    data, nine, four = published_data(), "Qwen3.5-9B-6bit", "Qwen3.5-4B-4bit"
    tables: tuple[tuple[int, str, str, str], ...] = (
        (4, "Qwen3.5-9B-8bit", "mac_studio_9b_8bit", "mac"),
        (7, nine, "hybrid_9b_6bit", where.family),
        (8, nine, "adaptive_9b_6bit_ipad", "ipad"),
        (9, four, "sweep_4b_4bit", where.family),
    )
    found = []
    for table, model, key, family in tables:
        for raw in data[key]:
            tps = raw.get(f"{family}_tps", raw.get("tps"))
            if family != where.family or tps is None or not isinstance(raw["resident"], int):
                continue
            note = str(raw.get("note", "")).lower()
            # A note may name the one device of several that it is about.
            thrashing = "thrash" in note and (family in note or not any(f in note for f in USABLE))
            row = PublishedRow(table, where.name, model, raw["resident"], raw.get("layers", 32), tps, thrashing)
            found.append(row)
    return sorted(found, key=lambda row: (row.table, row.resident))
