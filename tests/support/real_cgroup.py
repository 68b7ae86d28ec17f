"""A real control group (v1) of this machine's, where one can be made."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

V1_ROOT = Path("/sys/fs/cgroup/memory")


def can_make_v1_groups() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and os.access(V1_ROOT / "memory.limit_in_bytes", os.W_OK)


@contextlib.contextmanager
def real_v1_group(limit: int) -> Iterator[Path]:
    folder = V1_ROOT / f"outcore-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        yield folder
    finally:
        for attempt in range(50):  # busy until the kernel has reaped the last process
            try:
                folder.rmdir()
                break
            except OSError:
                if attempt == 49:
                    raise
                time.sleep(0.1)
