"""``outcore monitor``, ``ps`` and ``stop``: this user's running processes, from their snapshots. Imports no MLX."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outcore.cli.commands import commands
from outcore.cli.console import PlainConsole, console, table
from outcore.errors import OutcoreError, StoreError, UsageError
from outcore.monitoring import publisher
from outcore.sizes import format_size
from outcore.text import counted, shortened, shown

EVERY_S = 0.25

# Updates to wait for where the state is shown once, so that rates cover a second.
SETTLED = 5

NONE_RUNNING = "no Outcore process of yours is running (or OUTCORE_MONITOR is off); start one, such as outcore chat"

STATES = {
    "m": ("█", "dodger_blue2", "in memory"),
    "c": ("◆", "bold yellow", "computing"),
    "r": ("▓", "green", "ready"),
    "l": ("▒", "cyan", "loading"),
    "d": ("·", "bright_black", "on disk"),
}


def monitor(args: argparse.Namespace) -> None:
    if args.json:
        for processes in _looks():
            for process in processes:
                args.result.line(process)
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        *_, processes = itertools.islice(_looks(), SETTLED)
        console(soft_wrap=False).print(_drawn(processes))
    else:
        terminal = PlainConsole(highlight=False)
        # Ctrl-C is the way to leave.
        with contextlib.suppress(KeyboardInterrupt), Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                live.update(look(), refresh=True)
                time.sleep(EVERY_S)


def _looks() -> Iterator[list[dict[str, Any]]]:
    if not (processes := read_all()):
        raise OutcoreError(NONE_RUNNING)
    while processes:
        yield processes
        time.sleep(EVERY_S)
        processes = read_all()


def look() -> RenderableType:
    try:
        processes = read_all()
    except StoreError as e:
        return Text(str(e), "red")
    return Group(_drawn(processes) if processes else Text(NONE_RUNNING), Text("Ctrl-C to leave", "dim"))


def _drawn(processes: list[dict[str, Any]]) -> Group:
    return Group(*(view(process, model) for process in processes for model in process["models"]))


def _bar(share: float, style: str) -> ProgressBar:
    return ProgressBar(1.0, share, complete_style=style, finished_style=style)


def view(process: Mapping[str, Any], model: Mapping[str, Any]) -> Group:
    layers, head, m, d = model["layers"], model["head"], model["memory"], model["disk"]
    title = Text.assemble(
        (f" {model['state']} ", f"bold black on {'green' if model['state'] == 'working' else 'white'}"),
        (f" {shown(model['name'])}", "bold"),
        f"  {shown(process['command'])} · process {process['pid']} · context {model['context']}",
    )
    strip, legend = Text(), Text()
    for code in layers + head:
        strip.append(*STATES.get(code, ("?", "red"))[:2])
    for code, (glyph, style, name) in STATES.items():
        if code in "md" or code in layers + head:
            legend.append(f"{glyph} ", style).append(f"{layers.count(code)} {name}   ")
    if head:
        legend.append(f"and the head, {STATES[head][2]}   ", "bright_black")
    if shed := model["shed_layers"]:
        legend.append(f"{shed} shed", "bold red")
    budget, held = max(1, m["budget"]), m["active"] + m["kept"]
    style = "red" if held > budget else "dodger_blue2"
    memory = _grid()
    for name, nbytes, colour in (("held", held, style), ("plan", m["planned"], "dodger_blue2")):
        memory.add_row(name, _bar(nbytes / budget, colour), f"{format_size(nbytes)} of {format_size(budget)}")
    use, read = _grid(), Text("nothing is streamed", "bright_black")
    if d["how"] != "none":
        # The disk's rate against its calibrated one, and the share of time spent waiting for reads.
        rate, ceiling, stalled, slots = d["gbps"] or 0.0, d["ceiling_gbps"], d["stalled"] or 0.0, model["slots"]
        bar, most = (_bar(rate / ceiling, "cyan"), f" of {ceiling:.2f}") if ceiling else ("", "")
        use.add_row("SSD", bar, f"{rate:.2f}{most} GB/s")
        use.add_row("waiting", _bar(stalled, "red"), f"{stalled:.0%}, {d['stall_s']:.1f} s in all")
        ring = f"{slots} slots of {format_size(m['slots'] // slots)}" if slots else "no slots"
        read = Text(f"{format_size(d['bytes'])} read, {d['how']}; {ring}", "bright_black")
    if (drafts := model["drafts"])["source"]:
        right = f"{drafts['accepted']} of {drafts['drafted']} accepted ({shown(drafts['source'])})"
        use.add_row("drafts", _bar(drafts["accepted"] / max(1, drafts["drafted"]), "green"), right)
    notes = "\n".join(f"• {shown(note)}" for note in reversed(model["notes"])) or "no notes"
    speed = _speed(model["tokens"], d["how"] != "none")
    return Group(title, strip, legend, memory, use, read, *speed, Text(notes), Text())


def _speed(t: Mapping[str, Any], streams: bool) -> tuple[Text, Text]:
    first = Text.assemble((f"{t['per_s']:.2f}" if t["per_s"] else "–", "bold green"), " tokens/s")
    if t["per_sweep"] is not None:
        first.append(f"   {t['per_sweep']:.2f} per pass")
    if t["sweeps_per_s"] is not None and streams:
        first.append(f"   {t['sweeps_per_s']:.2f} passes/s")
    # Of a model that is all in memory no passes are counted.
    within = f" in {counted(t['sweeps'], 'pass')}" if streams or t["sweeps"] else ""
    second = Text(counted(t["made"], "token") + within, "bright_black")
    if t["sweep_s"] is not None:
        second.append(f"; the last pass took {t['sweep_s']:.2f} s")
    if t["in_sweep"] > 1:
        second.append(f"; {t['in_sweep']} tokens in this one")
    return first, second


def _grid() -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=8, style="bold")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, min_width=22)
    return grid


# Largest snapshot file in bytes; a longer one is ignored.
LONGEST = 1 << 20

# Seconds by which a process may seem to have started after it wrote, as its start is measured by another clock.
CLOCK_S = 2.0


def read_all() -> list[dict[str, Any]]:
    """Reads the snapshots of this user's processes, in the order of process ids.

    Removes the files of processes that have ended, and ignores files that are not snapshots.

    Raises:
        StoreError: other users can access the folder.
    """
    folder = publisher.runtime_folder()
    try:
        publisher.require_private(folder)
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    pids = sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdecimal())
    found = (_read(n, folder / f"{n}.json") for n in pids)
    return [document for document in found if document is not None]


def _read(pid: int, path: Path) -> dict[str, Any] | None:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if not _wrote(pid, status.st_mtime):
                path.unlink(missing_ok=True)
                path.with_suffix(".new").unlink(missing_ok=True)
                return None
            document = json.loads(file.read(LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    # Another version's snapshots may differ; those are not shown.
    valid = isinstance(document, dict) and document.get("type") == "snapshot" and document.get("pid") == pid
    return document if valid else None


def _wrote(pid: int, at: float) -> bool:
    """Returns whether the process runs, and was already running at time ``at``, when its file was written."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.create_time() <= at + CLOCK_S)
    except psutil.Error:
        return False


# Seconds that a process has to end in: ``outcore serve`` lets answers end within its --drain.
ENDING_S = 40


def ps(args: argparse.Namespace) -> None:
    args.result.record = {"processes": (processes := read_all())}
    rows = []
    for process in processes:
        for model in process["models"]:
            memory, speed = format_size(model["memory"]["active"] + model["memory"]["kept"]), model["tokens"]["per_s"]
            told = memory, "-" if speed is None else f"{speed:.1f}", model["state"]
            rows.append([str(process["pid"]), process["command"], model["name"], *told])
    if rows:
        console(soft_wrap=False).print(table([">pid", "command", "~model", ">memory", ">tokens/s", "state"], rows))
    else:
        print(NONE_RUNNING)


def stop(args: argparse.Namespace) -> None:
    # A Python program, such as a notebook, is not ours to end; nor is what nobody named, even if it is the only one.
    running = [process for process in read_all() if process["command"] in commands()]
    found = [process for process in running if args.which in (str(process["pid"]), *_names(process))]
    if not running:
        raise OutcoreError(NONE_RUNNING)
    if len(found) != 1:
        which = "give a PID or a model" if args.which is None else f"{'several' if found else 'none'} by that name"
        listed = ", ".join(f"{process['pid']} ({_said(process)})" for process in found or running)
        raise UsageError(f"{which}; running: {listed}")
    pid = found[0]["pid"]
    try:
        process = psutil.Process(pid)
        process.terminate()  # SIGTERM, unless the PID is another process's by now
        process.wait(ENDING_S)
    except psutil.TimeoutExpired:
        raise OutcoreError(f"process {pid} still runs; kill -9 {pid} ends it at once") from None
    except psutil.NoSuchProcess:
        pass  # it has ended by itself
    print(f"stopped {_said(found[0])}, process {pid}")
    args.result.record = {"pid": pid, "command": found[0]["command"], "models": _names(found[0])}


def _names(process: dict[str, Any]) -> list[str]:
    return [model["name"] for model in process["models"]]


def _said(process: dict[str, Any]) -> str:
    return shortened(" ".join([process["command"], *_names(process)]), 80)
