from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

import outcore
from outcore.machine import memory
from outcore.machine.memory import MemoryLimit
from quick_transformers import python_path
from real_cgroup import can_make_v1_groups, real_v1_group

GB = 10**9
UNLIMITED_V1 = "9223372036854771712"


def stand(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2_group(folder: str, limit: str, current: int, inactive: int = 0, active: int = 0, high: str = "max") -> dict:
    return {
        f"{folder}/memory.max": limit + "\n",
        f"{folder}/memory.high": high + "\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\nslab 7\n",
    }


def v1_group(folder: str, limit: str, usage: int, cached: int = 0, hierarchical: str = UNLIMITED_V1) -> dict:
    stat = f"inactive_file 1\nhierarchical_memory_limit {hierarchical}\ntotal_inactive_file {cached}\n"
    return {
        f"{folder}/memory.limit_in_bytes": limit + "\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": stat + "total_active_file 0\n",
    }


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def tightest(root: Path) -> MemoryLimit:
    return min(memory.cgroup_limits(root), key=lambda limit: limit.available)


def test_v2_counts_file_cache_as_available(tmp_path: Path) -> None:
    files = v2_group("sys/fs/cgroup/app", str(4 * GB), 3 * GB, inactive=1 * GB, active=GB // 2)
    stand(tmp_path, files | {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": V2_MOUNT})
    assert memory.cgroup_limits(tmp_path) == (MemoryLimit(4 * GB, 5 * GB // 2, "/sys/fs/cgroup/app/memory.max"),)


def test_v2_finds_the_tightest_group_above(tmp_path: Path) -> None:
    files = v2_group("sys/fs/cgroup/a/b/c", str(8 * GB), GB)
    files |= v2_group("sys/fs/cgroup/a/b", "max", 2 * GB)
    files |= v2_group("sys/fs/cgroup/a", str(5 * GB), 4 * GB)
    stand(tmp_path, files | {"proc/self/cgroup": "0::/a/b/c\n", "proc/self/mountinfo": V2_MOUNT})
    assert tightest(tmp_path) == MemoryLimit(5 * GB, GB, "/sys/fs/cgroup/a/memory.max")
    assert [limit.total for limit in memory.cgroup_limits(tmp_path)] == [8 * GB, 5 * GB]


def test_v2_throttling_limit_counts(tmp_path: Path) -> None:
    files = v2_group("sys/fs/cgroup/app", str(8 * GB), GB, high=str(3 * GB))
    stand(tmp_path, files | {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": V2_MOUNT})
    assert tightest(tmp_path) == MemoryLimit(3 * GB, 2 * GB, "/sys/fs/cgroup/app/memory.high")


def test_v2_without_limits_or_controller_gives_none(tmp_path: Path) -> None:
    files = v2_group("sys/fs/cgroup/app", "max", GB) | {"sys/fs/cgroup/cgroup.procs": "1\n"}
    stand(tmp_path, files | {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": V2_MOUNT})
    assert memory.cgroup_limits(tmp_path) == ()


def test_v2_in_a_container_reads_the_group_at_the_mount_point(tmp_path: Path) -> None:
    mount = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files = v2_group("sys/fs/cgroup", str(2 * GB), GB)
    for group in ("/docker/abc", "/", "/../other", "/docker/abcdef"):
        stand(tmp_path, files | {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mount})
        assert memory.cgroup_limits(tmp_path) == (MemoryLimit(2 * GB, GB, "/sys/fs/cgroup/memory.max"),)


def test_a_group_path_cannot_lead_out_of_the_mount(tmp_path: Path) -> None:
    files = v2_group("etc", str(GB), 0) | v2_group("sys/fs/cgroup", str(2 * GB), GB)
    stand(tmp_path, files | {"proc/self/cgroup": "0::/../../../etc\n", "proc/self/mountinfo": V2_MOUNT})
    assert [limit.total for limit in memory.cgroup_limits(tmp_path)] == [2 * GB]


def test_mount_points_with_spaces_are_found(tmp_path: Path) -> None:
    mount = "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n"
    stand(tmp_path, v2_group("my groups/app", str(GB), 0))
    stand(tmp_path, {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": mount})
    assert tightest(tmp_path).source == "/my groups/app/memory.max"


def test_usage_above_the_limit_leaves_nothing_and_cache_above_usage_leaves_all(tmp_path: Path) -> None:
    files = v2_group("sys/fs/cgroup/a/b", str(GB), 10, inactive=500) | v2_group("sys/fs/cgroup/a", str(GB), 2 * GB)
    stand(tmp_path, files | {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2_MOUNT})
    assert [limit.available for limit in memory.cgroup_limits(tmp_path)] == [GB, 0]


def test_v1_subtracts_the_cache_of_the_whole_subtree(tmp_path: Path) -> None:
    files = v1_group("sys/fs/cgroup/memory/app", str(4 * GB), 3 * GB, cached=2 * GB, hierarchical=str(4 * GB))
    files |= v1_group("sys/fs/cgroup/memory", UNLIMITED_V1, 9 * GB)
    groups = "5:cpu,cpuacct:/\n4:memory:/app\n1:name=systemd:/x\n0::/\n"
    stand(tmp_path, files | {"proc/self/cgroup": groups, "proc/self/mountinfo": V1_MOUNT})
    source = "/sys/fs/cgroup/memory/app/memory.limit_in_bytes"
    assert memory.cgroup_limits(tmp_path) == (MemoryLimit(4 * GB, 3 * GB, source),)


def test_v1_limit_above_the_mount_is_found_in_memory_stat(tmp_path: Path) -> None:
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = v1_group("sys/fs/cgroup/memory", UNLIMITED_V1, GB, hierarchical=str(3 * GB))
    stand(tmp_path, files | {"proc/self/cgroup": "4:memory:/docker/abc\n", "proc/self/mountinfo": mount})
    assert (tightest(tmp_path).total, tightest(tmp_path).available) == (3 * GB, 2 * GB)


def test_v1_and_v2_side_by_side_are_not_mixed_up(tmp_path: Path) -> None:
    mounts = V1_MOUNT + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    mounts += "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\nnonsense\n"
    files = v1_group("sys/fs/cgroup/memory/one", str(GB), 0) | v2_group("sys/fs/cgroup/unified/two", str(2 * GB), 0)
    files |= v1_group("sys/fs/cgroup/cpu/one", str(5), 0)
    stand(tmp_path, files | {"proc/self/cgroup": "4:memory:/one\n3:cpu:/one\n0::/two\n", "proc/self/mountinfo": mounts})
    assert [limit.total for limit in memory.cgroup_limits(tmp_path)] == [GB, 2 * GB]


def test_no_proc_at_all_means_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory.cgroup_limits(tmp_path) == () and memory.rlimits(tmp_path) == ()
    assert memory.process_memory_limit(tmp_path).source in {"machine", "Metal working set"}
    assert memory.peak_rss(tmp_path) > 10_000_000  # getrusage's, in bytes


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {data}                 unlimited            bytes
Max resident set          1000                 unlimited            bytes
Max address space         {space}            unlimited            bytes
"""


def test_rlimits_leave_what_is_not_mapped_yet(tmp_path: Path) -> None:
    status = "Name:\tpython\nVmSize:\t 2000 kB\nVmData:\t 500 kB\nVmRSS:\t 10 kB\n"
    stand(tmp_path, {"proc/self/limits": LIMITS.format(data=1_000_000, space=3_000_000), "proc/self/status": status})
    assert memory.rlimits(tmp_path) == (
        MemoryLimit(3_000_000, 3_000_000 - 2_048_000, "RLIMIT_AS"),
        MemoryLimit(1_000_000, 1_000_000 - 512_000, "RLIMIT_DATA"),
    )
    stand(tmp_path, {"proc/self/limits": LIMITS.format(data="unlimited", space="unlimited")})
    assert memory.rlimits(tmp_path) == ()


def test_metal_and_cuda_limits_come_from_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(metal: bool, info: dict[str, Any]) -> tuple[MemoryLimit, ...]:
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        monkeypatch.setattr(mx, "device_info", lambda: info)
        return memory.device_limits()

    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: GB)
    apple = {"device_name": "Apple M4", "max_recommended_working_set_size": 12 * GB, "memory_size": 16 * GB}
    assert pretend(True, apple) == (MemoryLimit(12 * GB, 9 * GB, "Metal working set", common=True),)
    cuda = {"device_name": "NVIDIA H200", "total_memory": 150 * GB, "free_memory": 100 * GB}
    assert pretend(False, cuda) == (MemoryLimit(150 * GB, 101 * GB, "CUDA memory of NVIDIA H200", common=True),)
    assert pretend(False, {"device_name": "AMD EPYC", "architecture": "x86_64"}) == ()


def test_the_limit_that_leaves_least_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    monkeypatch.setattr(memory, "device_limits", lambda *_: (MemoryLimit(available // 2, available // 4, "card"),))
    assert memory.process_memory_limit(tmp_path) == MemoryLimit(available // 2, available // 4, "card")


def test_default_budget_keeps_a_reserve_and_never_goes_negative() -> None:
    budget = memory.default_budget(MemoryLimit(20 * GB, 10 * GB, "machine", common=True))
    assert 8 * GB - memory.PROCESS_BYTES <= budget < 8 * GB
    own = memory.default_budget(MemoryLimit(20 * GB, 10 * GB, "RLIMIT_AS"))
    assert budget < 9 * GB - memory.PROCESS_BYTES <= own < 9 * GB
    assert own < memory.last_resort(MemoryLimit(20 * GB, 10 * GB, "RLIMIT_AS")) < 10 * GB
    assert memory.default_budget(MemoryLimit(GB, 10_000_000, "machine")) == 0
    assert 0 < memory.default_budget() < psutil.virtual_memory().total


def test_peak_rss_follows_this_process() -> None:
    before = memory.peak_rss()
    with mmap.mmap(-1, before + 50_000_000) as block:
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a fault for 2 MB instead of one for 4 KiB
            block.madvise(mmap.MADV_HUGEPAGE)
        block[::4096] = b"x" * len(range(0, len(block), 4096))
        assert memory.rss() >= before
        assert before + 50_000_000 <= memory.peak_rss() < before + 50_000_000 + len(block)


PRINT_PEAK = "from outcore.machine.memory import peak_rss; print(peak_rss())"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands a parent's peak to its children")
def test_peak_rss_is_not_the_parents() -> None:
    block = bytearray(300_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert int(run(PRINT_PEAK)) < 250_000_000
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept on Linux only")
def test_a_real_address_space_limit_is_seen() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 * GB, 6 * GB))

    script = "from outcore.machine.memory import *; [print(l.total, l.available, l.source) for l in rlimits()]"
    total, available, source = run(script, preexec_fn=limit).split()
    assert (int(total), source) == (6 * GB, "RLIMIT_AS")
    assert 0 < int(available) < 6 * GB


@pytest.mark.skipif(not can_make_v1_groups(), reason="needs root and a writable cgroup v1 memory controller")
def test_a_real_v1_group_limits_its_process_and_forgives_page_cache(tmp_path: Path) -> None:
    limit = 400 * 2**20
    big = tmp_path / "weights"
    with big.open("wb") as file:
        for _ in range(200):
            file.write(os.urandom(2**20))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    script = f"""
from pathlib import Path
from outcore.machine.memory import process_memory_limit, default_budget
l = process_memory_limit(); print(l.total, l.available, l.source)
group = Path(l.source).parent
before = int((group / "memory.usage_in_bytes").read_text())
with open({str(big)!r}, "rb", buffering=0) as file:
    while file.read(2**20): pass
after = int((group / "memory.usage_in_bytes").read_text())
l = process_memory_limit(); print(l.total, l.available, after - before)
block = bytearray(100 * 2**20)
block[::4096] = b"x" * len(block[::4096])
l = process_memory_limit(); print(l.total, l.available, default_budget())
"""
    with real_v1_group(limit) as group:
        enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        first, cached, filled = (line.split() for line in run(enter + script).splitlines())
        assert first[0] == cached[0] == filled[0] == str(limit)
        assert first[2] == str(group / "memory.limit_in_bytes")
        assert int(cached[2]) > 150 * 2**20  # the file did enter the group's usage ...
        assert int(first[1]) - int(cached[1]) < 20 * 2**20  # ... and stayed available
        assert 90 * 2**20 < int(cached[1]) - int(filled[1]) < 120 * 2**20
        assert int(filled[2]) < int(filled[1]) < limit
    assert not group.exists()


def run(script: str, **options: Any) -> str:
    environment = os.environ | {"PYTHONPATH": python_path(Path(outcore.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
