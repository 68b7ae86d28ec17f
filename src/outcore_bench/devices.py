"""The paper's tables and devices: what its own system does there, and what a plan of ours may assume of them.

Nothing here was measured by this project.
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
"""Of a device's memory, what a process may use, and where that is from.

Working sets: llama.cpp's logs, 21845 MB of 32 GB (issue 1870), 73728 of 96 (3213). Phones: killed at half of 8 GB
(cardona/SwiftMistralCoreML issue 15); 3.12 of 6 GB to start with (a-ghorbani/pocketpal-ai pull request 651). The
paper's own rows only say that its phone's cliff lies between 4.28 and 5.28 GB, and its tablet's between 5.62 and 5.96.
"""

WHOLE = (2, 5)
"""The paper's tables of models that are in memory as a whole."""
BY_RESIDENCY = (4, 7, 8, 9)
"""Those of speed against layers in memory."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of one of the paper's tables: what its system does with so many of a model's layers in memory.

    Attributes:
        tps: tokens a second, by device. ``swaps``: devices that swapped.
        memory_mb, whole_mb: memory in units of 1e6 bytes; with everything in memory.
        label: what the table says of the row beside.
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
    """The paper's tables as they stand in the package; not to be changed."""
    text = (resources.files("outcore_bench") / "published_tables.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def published_rows() -> list[PublishedRow]:
    """All rows, in the paper's order."""
    return [PublishedRow(table["number"], **row) for table in published_data()["tables"] for row in table["rows"]]


@dataclass(frozen=True)
class Device:
    """One of the paper's devices, with the bandwidth that it states.

    Attributes:
        memory_bytes: memory sold as 8 GB is 8 GiB.
        ssd_gbps: GB/s of 1e9 bytes.
    """

    name: str
    memory_bytes: int
    ssd_gbps: float

    @property
    def usable_bytes(self) -> int:
        """Memory that one process may use before the system swaps; ``usable_source`` says where that is from."""
        return int(self.memory_bytes * USABLE[self.name.split("-")[0]][0])

    @property
    def usable_source(self) -> str:
        """Where ``usable_bytes`` is from, in words."""
        return USABLE[self.name.split("-")[0]][1]

    def calibration(self) -> Calibration:
        """What our engine would find there, if it got all of the SSD and as much of the memory bandwidth as their fully
        resident models: all bytes over all seconds a token.

        Not measured: latency, synchronizing and slowing each other down are the assumptions of any machine.
        """
        rows = [r for r in published_rows() if r.table in WHOLE and r.memory_mb and self.name in r.tps]
        seconds = sum(1 / r.tps[self.name] for r in rows)
        weight_gbps = sum(r.memory_mb or 0 for r in rows) / 1000 / seconds
        return Calibration(read_gbps=self.ssd_gbps, weight_gbps=weight_gbps)

    def published(self) -> list[PublishedRow]:
        """Every row of speed against layers in memory on it."""
        rows = [r for r in published_rows() if r.table in BY_RESIDENCY and self.name in r.tps]
        return sorted(rows, key=lambda row: (row.table, row.resident))


DEVICES = tuple(Device(d["name"], d["memory_gb"] * 2**30, d["ssd_gbps"]) for d in published_data()["devices"])
"""The paper's devices."""


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        UsageError: there is none; lists those that there are.
    """
    known = {d.name: d for d in DEVICES}
    return known[choice("--device", name, known)]
