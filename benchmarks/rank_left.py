"""What a run on several machines has on this one: processes, and sockets of network namespaces. Linux, as root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from namespaces import Namespace

MARK = "OUTCORE_TRIAL"
"""The variable that all processes of a trial have, with the trial's name."""

IN_USE = {"01": "established", "08": "close-wait", "0A": "listening"}
"""States of sockets that a process has; what a kernel still has of ended ones passes by itself."""


@dataclass(frozen=True)
class Process:
    """A process of a trial: what it is, and its rank if it has one."""

    pid: int
    parent: int
    role: str
    rank: int | None


def processes(mark: str, names: Sequence[str]) -> list[Process]:
    """Those of a trial that are left, wherever they hang in the tree.

    Args:
        names: of the hosts, by rank; the first one's may be ``local``.
    """
    found = list(_marked(mark, names))
    # A guard of this machine is the launcher's own child.
    reached = {p.pid: p.rank if p.role == "ssh" else 0 for p in found if p.role in ("ssh", "launcher")}
    return [replace(p, rank=reached.get(p.parent)) if p.role == "guard" else p for p in found]


def _marked(mark: str, names: Sequence[str]) -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = dict(v.partition("=")[::2] for v in (folder / "environ").read_text("latin-1").split("\0"))
            words = (folder / "cmdline").read_text("latin-1").split("\0")[:-1]
            parent = int((folder / "stat").read_text("latin-1").rpartition(")")[2].split()[1])
        except OSError:
            continue
        if variables.get(MARK) != mark or not words:
            continue
        number = int(variables["MLX_RANK"]) if "MLX_RANK" in variables else None
        if number is not None:
            role = "rank"
        elif words[-1] == "outcore_cluster.launch.guard":
            role = "guard"
        elif len(words) > 1 and words[1].endswith("namespaces.py"):
            role, number = "ssh", names.index(words[-2])
        else:
            role = "launcher" if "launch" in words else "other"
        yield Process(int(folder.name), parent, role, number)


def sockets(host: Namespace) -> list[str]:
    """TCP sockets of a namespace that some process would have to have."""
    found = []
    for file in ("tcp", "tcp6"):
        command = ["nsenter", f"--net=/run/netns/{host.name}", "cat", f"/proc/net/{file}"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[1:]
        found += [f"{host.name} {IN_USE[state]}" for state in (line.split()[3] for line in lines) if state in IN_USE]
    return found
