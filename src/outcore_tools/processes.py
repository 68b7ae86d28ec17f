"""``outcore ps`` and ``outcore stop``: this user's running Outcore processes, from their snapshots. Imports no MLX."""

from __future__ import annotations

import argparse
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.cli.commands import commands
from outcore.cli.console import console, table
from outcore.errors import OutcoreError, UsageError
from outcore.sizes import format_size
from outcore.text import shortened

from .monitor import NONE_RUNNING, read_all

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
