"""A control group whose limit changes while a process runs in it. Needs root; skipped elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cgroup import Cgroup, CgroupError

MB = 10**6
HOLDS = "x = bytearray(100_000_000); x[::4096] = b'1' * len(range(0, len(x), 4096)); print(flush=True); input()"


@pytest.fixture
def group() -> Iterator[Cgroup]:
    try:
        with Cgroup(f"outcore-test-{os.getpid()}", 400 * MB) as made:
            yield made
    except CgroupError as e:
        pytest.skip(str(e))


def test_a_limit_goes_down_and_up(group: Cgroup) -> None:
    limit = group.path / ("memory.limit_in_bytes" if group.version == 1 else "memory.max")
    for nbytes in (200 * MB, 300 * MB):
        group.set_limit(nbytes)
        assert group.limit == nbytes
        assert 0 <= nbytes - int(limit.read_text()) < 1 << 16


def test_a_limit_below_what_is_held_is_refused_until_it_is_given_up(group: Cgroup) -> None:
    if group.version == 2:
        pytest.skip("version 2 refuses nothing")
    holder = subprocess.Popen(
        group.wrap([sys.executable, "-c", HOLDS]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "\n"
    with pytest.raises(OSError, match="busy"):
        group.set_limit(50 * MB)
    assert group.limit == 400 * MB
    holder.communicate("\n")
    group.set_limit(50 * MB)
    assert group.kills == 0
