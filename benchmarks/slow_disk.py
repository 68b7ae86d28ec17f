"""A disk that is really slow: a control group of version 1 (`blkio`) limits what its processes read, direct reads too.
Needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")


@contextmanager
def slow_disk(folder: Path, rate: int | None, reads: int | None = None) -> Iterator[Path | None]:
    """A control group whose processes read so many bytes a second from the disk that a folder lies on, by at most so
    many reads a second."""
    if rate is None and reads is None:
        yield None
        return
    device = folder.stat().st_dev
    group = GROUPS / f"outcore-disk-{os.getpid()}"
    group.mkdir()
    try:
        for name, limit in (("read_bps_device", rate), ("read_iops_device", reads)):
            if limit is not None:
                (group / f"blkio.throttle.{name}").write_text(f"{os.major(device)}:{os.minor(device)} {limit}")
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
