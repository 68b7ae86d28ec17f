"""The devices and tables of the published paper, for ``outcore plan --device``.

None of these numbers was measured by this project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from outcore.checks import choice
from outcore.plan.machine_profile import Calibration

USABLE = {
    "mac": (3 / 4, "three quarters of memory: Metal's recommended working set on large Macs"),
    "ipad": (2 / 3, "two thirds of memory: Metal's recommended working set on Apple silicon with up to 32 GB"),
    "iphone": (1 / 2, "half of memory: what iOS, which does not swap, leaves an app by common reports"),
}
"""The share of a device's memory that a process may use, and the source.

Working sets: llama.cpp's logs, 21845 MB of 32 GB (issue 1870), 73728 of 96 (3213). Phones: killed at half of 8 GB
(cardona/SwiftMistralCoreML issue 15); 3.12 of 6 GB to start with (a-ghorbani/pocketpal-ai pull request 651). The
paper's own rows only say that its phone's cliff lies between 4.28 and 5.28 GB, and its tablet's between 5.62 and 5.96.
"""

WHOLE = (2, 5)
BY_RESIDENCY = (4, 7, 8, 9)


@dataclass(frozen=True)
class PublishedRow:
    """A row of one of the paper's tables.

    Attributes:
        tps: tokens per second by device.
        memory_mb: memory in units of 1e6 bytes. ``whole_mb``: the same with everything resident.
        label: the row's remark in the table.
        swaps: devices that swapped.
    """

    table: int
    model: str
    resident: int
    layers: int
    tps: Mapping[str, float] = field(default_factory=dict)
    memory_mb: int | None = None
    whole_mb: int | None = None
    ppl: float | None = None
    io_share: float | None = None
    label: str = ""
    note: str = ""
    swaps: tuple[str, ...] = ()


@cache
def published_data() -> dict[str, Any]:
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def published_rows() -> list[PublishedRow]:
    return [PublishedRow(table["number"], **row) for table in published_data()["tables"] for row in table["rows"]]


@dataclass(frozen=True)
class Device:
    """One of the paper's devices, with the paper's SSD rate in GB/s of 1e9 bytes."""

    name: str
    memory_bytes: int
    ssd_gbps: float

    @property
    def usable_bytes(self) -> int:
        """Memory that one process may use before the system swaps."""
        return int(self.memory_bytes * USABLE[self.name.split("-")[0]][0])

    @property
    def usable_source(self) -> str:
        return USABLE[self.name.split("-")[0]][1]

    def calibration(self) -> Calibration:
        """Estimates a calibration: the paper's SSD rate, and the memory bandwidth of its fully resident models.

        Everything else is assumed as for any machine that was not measured.
        """
        rows = [r for r in published_rows() if r.table in WHOLE and r.memory_mb and self.name in r.tps]
        seconds = sum(1 / r.tps[self.name] for r in rows)
        weight_gbps = sum(r.memory_mb or 0 for r in rows) / 1000 / seconds
        return Calibration(read_gbps=self.ssd_gbps, weight_gbps=weight_gbps)

    def published(self) -> list[PublishedRow]:
        rows = [r for r in published_rows() if r.table in BY_RESIDENCY and self.name in r.tps]
        return sorted(rows, key=lambda row: (row.table, row.resident))


DEVICES = tuple(Device(d["name"], d["memory_gb"] * 2**30, d["ssd_gbps"]) for d in published_data()["devices"])


def device(name: str) -> Device:
    devices = {d.name: d for d in DEVICES}
    return devices[choice("--device", name, devices)]
