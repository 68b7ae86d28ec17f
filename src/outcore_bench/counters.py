"""What the system counts: bytes that this process read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reads:
    """Bytes that this process has read so far: ``device`` from the disk, ``asked`` by all its read calls.

    proc(5): direct reads count in both; what the page cache gave counts in ``asked`` alone. Read-ahead of the kernel
    counts in ``device`` before it is asked for.
    """

    device: int
    asked: int

    @property
    def cached(self) -> int:
        """Bytes that came from the page cache."""
        return max(0, self.asked - self.device)

    def since(self, before: Reads) -> Reads:
        return Reads(self.device - before.device, self.asked - before.asked)


def process_reads(root: Path = Path("/")) -> Reads | None:
    """From ``/proc/self/io``; None where the system has none."""
    try:
        lines = (root / "proc/self/io").read_text().splitlines()
    except OSError:
        return None
    fields = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return Reads(fields["read_bytes"], fields["rchar"]) if {"read_bytes", "rchar"} <= fields.keys() else None
