"""``outcore monitor``: what this user's running Outcore processes do. Imports no MLX."""

from __future__ import annotations

import argparse
import itertools
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import OutcoreError, StoreError, UsageError
from ..monitoring.files import read_all
from .console import PlainConsole, console
from .monitor_view import NO_MODEL, view

EVERY_S = 0.25
"""Seconds between two looks."""

SETTLED = 5
"""Looks after which rates are of a second: what ``--once`` shows."""

NOBODY = "No Outcore process of yours runs. Start one in another terminal, such as outcore chat: it will show up here."

KEYS = "← → another process or model   q quit"


def run(args: argparse.Namespace) -> None:
    """Run the command; refused where nothing runs that could be watched, or there is no terminal."""
    if args.once:
        _once(args)
    elif args.json:
        for processes in _looks():
            for process in processes:
                args.result.line(process)
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("standard output is no terminal; --json and --once do without")
    else:
        _live(LiveView())


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


def _once(args: argparse.Namespace) -> None:
    *_, processes = itertools.islice(_looks(), SETTLED)
    args.result.record = {"processes": processes}
    out = console(soft_wrap=False)
    for process in processes:
        for model in process["models"]:
            out.print(view(process, model))
        if not process["models"]:
            out.print(f"{process['command']} · process {process['pid']}: {NO_MODEL}")


class LiveView:
    """One model of one process at a time.

    Attributes:
        over: the user has left.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # process number, model of it
        self._at = (0, 0)
        self.over = False

    def look(self) -> RenderableType:
        """What is to be seen now."""
        try:
            processes = read_all()
        except StoreError as e:
            return Text(str(e), "red")
        self._places = [(p["pid"], i) for p in processes for i in range(max(1, len(p["models"])))]
        if not self._places:
            return Group(Text("outcore monitor", "bold"), Text(NOBODY), Text(KEYS, "dim"))
        if self._at not in self._places:
            # The same process's first model, or the first process there is.
            self._at = next((p for p in self._places if p[0] == self._at[0]), self._places[0])
        pid, number = self._at
        tabs = Text(no_wrap=True, overflow="ellipsis")
        shown: RenderableType = Text(NO_MODEL)
        for process in processes:
            here = process["pid"] == pid
            tabs.append(f" {process['command']} {process['pid']} ", "reverse bold" if here else "")
            if here and process["models"]:
                shown = view(process, process["models"][number])
        return Group(tabs, shown, Text(KEYS, "dim"))

    def press(self, key: str) -> None:
        """Do what a key asks for, by prompt_toolkit's name of it."""
        if key in ("q", "c-c"):
            self.over = True
        elif key in ("right", "left", "c-i", "s-tab") and self._at in self._places:
            step = 1 if key in ("right", "c-i") else -1
            self._at = self._places[(self._places.index(self._at) + step) % len(self._places)]


def _live(shown: LiveView) -> None:
    from prompt_toolkit.input import create_input

    keys = create_input(sys.stdin)
    console = PlainConsole(highlight=False)
    with keys.raw_mode(), Live(shown.look(), console=console, screen=True, auto_refresh=False) as live:
        while not shown.over:
            if select.select([keys.fileno()], [], [], EVERY_S)[0]:
                for press in [*keys.read_keys(), *keys.flush_keys()]:
                    shown.press(str(getattr(press.key, "value", press.key)))
            live.update(shown.look(), refresh=True)
