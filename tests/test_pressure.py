from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore.machine.memory import MemoryLimit, Pressure, read_pressure
from quick_transformers import python_path
from real_cgroup import can_make_v1_groups, real_v1_group

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def tightest(read: Pressure) -> MemoryLimit:
    return min(read.limits, key=lambda limit: (limit.available, limit.total))


def events(read: Pressure) -> tuple[int, int, bool]:
    return read.oom, read.oom_kill, read.under_oom


def stand(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def proc(groups: str = "", mounts: str = "") -> dict[str, str]:
    return {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        "proc/vmstat": "nr_free_pages 1\npgpgin 99\npswpin 12\npswpout 34\npgmajfault 56\n",
    }


def v2(folder: str, **events: int) -> dict[str, str]:
    counts = dict.fromkeys(("low", "high", "max", "oom", "oom_kill"), 0) | events
    text = "".join(f"{name} {count}\n" for name, count in counts.items())
    return {
        f"{folder}/memory.max": "4000000000\n",
        f"{folder}/memory.high": "max\n",
        f"{folder}/memory.current": "3999000000\n",
        f"{folder}/memory.stat": "anon 5\ninactive_file 1000\npgmajfault 70\n",
        f"{folder}/memory.events": text,
    }


def v1(folder: str, failed: int = 0, under_oom: int = 0, oom_kill: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": "4000000000\n",
        f"{folder}/memory.usage_in_bytes": "3999000000\n",
        f"{folder}/memory.stat": "pgmajfault 3\ntotal_inactive_file 1000\ntotal_pgmajfault 70\n",
        f"{folder}/memory.failcnt": f"{failed}\n",
        f"{folder}/memory.oom_control": f"oom_kill_disable 0\nunder_oom {under_oom}\noom_kill {oom_kill}\n",
    }


def test_a_machine_without_groups_tells_paging(tmp_path: Path) -> None:
    read = read_pressure(stand(tmp_path, proc()))
    assert read.swap_ins == 12
    assert events(read) == (0, 0, False) and read.major_faults >= 0


def test_a_folder_without_anything_still_gives_a_reading(tmp_path: Path) -> None:
    read = read_pressure(tmp_path)
    assert read.swap_ins is None
    assert 0 < tightest(read).available <= tightest(read).total


def test_the_tightest_limit_is_what_is_available(tmp_path: Path) -> None:
    read = read_pressure(stand(tmp_path, proc("0::/app\n", V2_MOUNT) | v2("sys/fs/cgroup/app")))
    assert tightest(read) == MemoryLimit(4 * 10**9, 1_001_000, "/sys/fs/cgroup/app/memory.max")
    assert tightest(read).available == 1_001_000 and len(read.limits) >= 2


def test_v2_events_are_the_groups_own(tmp_path: Path) -> None:
    files = proc("0::/app\n", V2_MOUNT) | v2("sys/fs/cgroup/app", low=1, high=2, max=3, oom=4, oom_kill=5)
    read = read_pressure(stand(tmp_path, files))
    assert events(read) == (4, 5, False)


def test_v2_neighbours_misfortunes_are_not_ours(tmp_path: Path) -> None:
    files = proc("0::/pod/app\n", V2_MOUNT) | v2("sys/fs/cgroup/pod/app") | v2("sys/fs/cgroup/pod", oom=9, oom_kill=9)
    assert events(read_pressure(stand(tmp_path, files))) == (0, 0, False)
    # But a limit above that was reached itself is.
    local = "low 0\nhigh 0\nmax 6\noom 2\noom_kill 3\n"
    stand(tmp_path, {"sys/fs/cgroup/pod/memory.events.local": local})
    assert events(read_pressure(tmp_path)) == (2, 0, False)


def test_v1_out_of_memory_is_counted(tmp_path: Path) -> None:
    files = proc("4:memory:/a/b\n", V1_MOUNT)
    files |= v1("sys/fs/cgroup/memory/a/b", failed=10, under_oom=1, oom_kill=2)
    files |= v1("sys/fs/cgroup/memory/a", failed=5, oom_kill=7)
    read = read_pressure(stand(tmp_path, files))
    assert events(read) == (0, 2, True)


def test_events_of_v1_count_beside_a_unified_hierarchy(tmp_path: Path) -> None:
    files = proc("4:memory:/a\n0::/a\n", UNIFIED_MOUNT + V1_MOUNT)
    files |= v1("sys/fs/cgroup/memory/a", failed=1, oom_kill=2)
    read = read_pressure(stand(tmp_path, files))
    assert events(read) == (0, 2, False)


@pytest.mark.parametrize("text", ["", "nonsense\n", "some avg10= total=\n", "full\nsome avg10=x avg60=0 total=-1\n"])
def test_files_that_make_no_sense_are_nothing(tmp_path: Path, text: str) -> None:
    files = proc("0::/app\n", V2_MOUNT) | v2("sys/fs/cgroup/app")
    files |= {"proc/vmstat": text, "sys/fs/cgroup/app/memory.events": text}
    read = read_pressure(stand(tmp_path, files))
    assert (read.swap_ins, *events(read)) == (None, 0, 0, False)


def test_a_real_reading_is_cheap_and_sound() -> None:
    read_pressure()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        read = read_pressure()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.005  # 0.8 ms measured
    assert isinstance(read, Pressure) and 0 <= tightest(read).available <= tightest(read).total


CHILD = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from outcore.machine.memory import read_pressure
block = bytearray(200_000_000)
block[::4096] = b"x" * len(block[::4096])
for line in sys.stdin:
    read = read_pressure()
    least = min(read.limits, key=lambda limit: (limit.available, limit.total))
    print(least.total, least.available, read.oom_kill, flush=True)
"""


@pytest.mark.skipif(not can_make_v1_groups(), reason="needs root and a writable cgroup v1 memory controller")
def test_a_limit_that_is_lowered_is_seen() -> None:
    environment = os.environ | {"PYTHONPATH": python_path(Path(outcore.__file__).parents[1])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with real_v1_group(600_000_000) as group:
        limit = group / "memory.limit_in_bytes"
        with subprocess.Popen([sys.executable, "-c", CHILD, str(group)], **pipes) as child:
            assert child.stdin is not None and child.stdout is not None

            def ask() -> list[int]:
                child.stdin.write("\n")
                child.stdin.flush()
                return [int(word) for word in child.stdout.readline().split()]

            try:
                total, available, _ = ask()
                limit.write_text(str(400_000_000))
                lower = ask()
                assert 190_000_000 < total - lower[0] < 210_000_000
                assert 190_000_000 < available - lower[1] < 210_000_000 and lower[2] == 0
            finally:
                child.stdin.close()
                child.wait(timeout=30)
        assert child.returncode == 0
    assert not group.exists()
