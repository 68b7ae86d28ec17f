"""``outcore monitor``: what this user's running Outcore processes do. Imports no MLX."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from outcore.cli.console import PlainConsole, console
from outcore.errors import OutcoreError, StoreError, UsageError

from .monitor_view import NO_MODEL, view
from .snapshots import read_all

EVERY_S = 0.25
"""Seconds between two looks."""

SETTLED = 5
"""Looks after which rates are of a second: what ``--once`` shows."""

NOBODY = "No Outcore process of yours runs. Start one in another terminal, such as outcore chat: it will show up here."


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: there is no terminal.
        OutcoreError: nothing runs that could be watched.
    """
    if args.once:
        *_, processes = itertools.islice(_looks(), SETTLED)
        args.result.record = {"processes": processes}
        console(soft_wrap=False).print(_drawn(processes))
    elif args.json:
        for processes in _looks():
            for process in processes:
                args.result.line(process)
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("standard output is no terminal; --json and --once do without")
    else:
        terminal = PlainConsole(highlight=False)
        # Ctrl-C is the way to leave.
        with contextlib.suppress(KeyboardInterrupt), Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                live.update(look(), refresh=True)
                time.sleep(EVERY_S)


def _looks() -> Iterator[list[dict[str, Any]]]:
    """What processes do, again and again, until all have ended; one at least has to run."""
    if not (processes := read_all()):
        raise OutcoreError(
            "no Outcore process of yours runs; start one, such as outcore chat, or see whether OUTCORE_MONITOR is off"
        )
    while processes:
        yield processes
        time.sleep(EVERY_S)
        processes = read_all()


def look() -> RenderableType:
    """What the view shows now."""
    try:
        processes = read_all()
    except StoreError as e:
        return Text(str(e), "red")
    return Group(_drawn(processes) if processes else Text(NOBODY), Text("Ctrl-C to leave", "dim"))


def _drawn(processes: list[dict[str, Any]]) -> Group:
    """All models of these processes, one below the other."""
    drawn: list[RenderableType] = []
    for process in processes:
        drawn += [view(process, model) for model in process["models"]]
        if not process["models"]:
            drawn.append(Text(f"{process['command']} · process {process['pid']}: {NO_MODEL}"))
    return Group(*drawn)
