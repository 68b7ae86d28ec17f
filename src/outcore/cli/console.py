"""Tables and colours for the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import shown

WIDTH = 120


class PlainConsole(Console):
    """A rich console that prints text literally: no markup, no emoji, control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


class BrokenLines:
    """Breaks lines between words at a terminal's width while their text arrives: a word that has no room moves down."""

    def __init__(self) -> None:
        self._column, self._word = 0, ""

    def broken(self, text: str) -> str:
        try:
            width = 0 if os.environ.get("TERM", "dumb") == "dumb" else os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError):
            width = 0
        return "".join(self._put(c, width) for c in text) if width else text

    def _put(self, c: str, width: int) -> str:
        # The last column stays free: some terminals wrap when it is written, some do not.
        if c == "\n" or (c in " \t" and self._column + 1 >= width):
            self._column, self._word = 0, ""
            return "\n"
        cells, back = 8 - self._column % 8 if c == "\t" else cell_len(c), ""
        apart = c in " \t" or cells > 1  # lines may break before and after wide characters
        if self._column + cells >= width:
            moved = "" if apart or cell_len(self._word) > width // 2 else self._word
            self._column = cell_len(moved)
            back = (f"\x1b[{self._column}D\x1b[K" if moved else "") + "\n" + moved
        self._word = "" if apart else self._word + c
        self._column += cells
        return back + c


def console(least: int = WIDTH, *, soft_wrap: bool = True) -> PlainConsole:
    """Returns a console for standard output, at least ``least`` characters wide when that is not a terminal."""
    width = None if sys.stdout.isatty() else max(WIDTH, least)
    return PlainConsole(highlight=False, soft_wrap=soft_wrap, width=width)


def listing(rows: Iterable[tuple[str, str]], justify: Literal["left", "right"] = "left") -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify=justify)
    for name, value in rows:
        table.add_row(name, value)
    return table


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Builds a table. A leading ``>`` in a head aligns the column right, for numbers; a leading ``~`` lets it wrap."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in heads:
        wraps, numbers = head.startswith("~"), head.startswith(">")
        made.add_column(head.lstrip("~>"), justify="right" if numbers else "left", no_wrap=not wraps, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
