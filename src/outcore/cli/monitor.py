"""``outcore monitor``: what this user's running Outcore processes do. Imports no MLX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import OutcoreError, UsageError
from ..monitoring.watch import Watched, follow, watch_all
from .console import PlainConsole
from .monitor_view import NO_MODEL, View

SETTLED = 5
"""Snapshots after which rates are of a second: what ``--once`` shows."""

WIDTH = 100
"""Characters of a line where standard output is no terminal."""


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: there is no terminal, or no Textual.
        OutcoreError: nothing runs that could be watched.
    """
    if args.once or args.json:
        processes = _processes(args.pid)
        try:
            if args.once:
                _once(processes, args)
            else:
                for watched, line in follow(processes):
                    args.result.line(_told(watched, line))
        finally:
            for each in processes:
                each.close()
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("standard output is no terminal; --json and --once do without")
    try:
        from .monitor_app import Monitor
    except ImportError as e:
        raise UsageError(
            "outcore monitor needs Textual: pip install 'outcore[monitor]'; --json and --once do without"
        ) from e
    Monitor(args.pid).run()


def _processes(pid: int | None) -> list[Watched]:
    processes = watch_all(pid)
    if not processes:
        which = "no Outcore process of yours runs" if pid is None else f"no Outcore process of yours has number {pid}"
        raise OutcoreError(f"{which}; start one, such as outcore chat, or see whether OUTCORE_MONITOR is off")
    return processes


def _told(watched: Watched, line: dict[str, Any]) -> dict[str, Any]:
    return {"pid": watched.pid, "command": watched.hello.get("command"), **line}


def _once(processes: Sequence[Watched], args: argparse.Namespace) -> None:
    seen: dict[int, int] = {}
    last: dict[int, dict[str, Any]] = {}
    for watched, line in follow(processes):
        last[watched.pid] = line
        seen[watched.pid] = seen.get(watched.pid, 0) + 1
        if all(seen.get(each.pid, 0) >= SETTLED for each in processes if each.connection.fileno() >= 0):
            break
    args.result.record = {"processes": [_told(each, last[each.pid]) for each in processes if each.pid in last]}
    console = PlainConsole(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for each in processes:
        models = last.get(each.pid, {}).get("models", ())
        for model in models:
            console.print(View(each.hello, model, bool(last[each.pid].get("frozen"))).whole())
        if not models:
            console.print(f"{each.hello['command']} · process {each.hello['pid']}: {NO_MODEL}")
