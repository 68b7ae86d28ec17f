"""A control group of our own, to run a command under a memory limit in which page cache counts.

Version 1 where its memory controller is mounted, else version 2. Making one takes root, or a delegated hierarchy.
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from outcore.errors import OutcoreError

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 5.0
"""Seconds to wait for the kernel to let a group go once its last process has ended."""


class CgroupError(OutcoreError):
    """No group with a memory limit can be made here; says why."""


class Cgroup:
    """A group with a memory limit, removed on exit.

    Pages that another group read first (Python, MLX's libraries) are charged there, not here: the kernel charges page
    cache to who brings it in. What a command itself allocates and reads is charged in full.

    Args:
        limit: bytes, rounded down to whole pages by the kernel.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.version = 1 if (ROOT / "memory/memory.limit_in_bytes").exists() else 2
        self.path = (ROOT / "memory" if self.version == 1 else ROOT) / name

    def __enter__(self) -> Cgroup:
        try:
            if self.version == 2:
                (ROOT / "cgroup.subtree_control").write_text("+memory")
            self.path.mkdir()
        except OSError as e:
            raise CgroupError(f"{self.path}: cannot be made: {e.strerror}; run as root on Linux") from e
        try:
            self.set_limit(self.limit)
        except OSError as e:
            self.path.rmdir()
            raise CgroupError(f"{self.path}: cannot be given a limit of {self.limit} bytes: {e.strerror}") from e
        return self

    def set_limit(self, limit: int) -> None:
        """Write the limit, also while processes run in the group; of swap as well, where it is counted.

        Raises:
            OSError: the kernel does not take it. Version 1 refuses (EBUSY) one below what the group holds after all was
                freed that can be; version 2 takes any, and kills.
        """
        if self.version == 1:
            swap = self.path / "memory.memsw.limit_in_bytes"
            # It is never the smaller of the two: first where it rises, last where it falls.
            with contextlib.suppress(OSError):
                swap.write_text(str(limit))
            (self.path / "memory.limit_in_bytes").write_text(str(limit))
            with contextlib.suppress(OSError):
                swap.write_text(str(limit))
        else:
            (self.path / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0")
        self.limit = limit

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command, started inside the group: what it imports is charged to it as well."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.path), *command]

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes ever charged to the group, page cache included; None where the kernel does not say."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"  # Linux 5.19
        try:
            return int((self.path / name).read_text())
        except (OSError, ValueError):
            return None

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for passing the limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = (line.split() for line in (self.path / name).read_text().splitlines())
        return next((int(f[1]) for f in fields if f[0] == "oom_kill"), 0)

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + REMOVE_S
        while True:
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
