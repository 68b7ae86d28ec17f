"""A snapshot as lines of text with colours: what ``outcore monitor`` shows, with and without Textual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from ..sizes import format_size
from ..text import counted, shown

STATES = {
    "m": ("█", "dodger_blue2", "in memory"),
    "c": ("◆", "bold yellow", "computing"),
    "r": ("▓", "green", "ready"),
    "l": ("▒", "cyan", "loading"),
    "d": ("·", "bright_black", "on disk"),
}
"""For each letter of ``layers``: how a layer is drawn, in which colour, and what that means."""

PARTS = {
    "weights": "dodger_blue2",
    "slots": "cyan",
    "experts": "bright_cyan",
    "caches": "green",
    "activations": "yellow",
    "allocator": "magenta",
}
"""Parts of the plan, and their colours."""

NAMES = {"allocator": "reuse"}

NO_MODEL = "no model is loaded"

WIDEST = 8
"""Characters of a layer at most."""

LEVELS = "▁▂▃▄▅▆▇█"


class ShareBar:
    """A bar as wide as there is room: shares of it in colours, and the rest dim."""

    def __init__(self, *shares: tuple[float, str]) -> None:
        self.shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        text, done, total = Text(), 0, 0.0
        for share, style in self.shares:
            total = min(1.0, total + max(0.0, share))
            end = round(total * width)
            text.append("█" * (end - done), style)
            done = end
        text.append("░" * (width - done), "bright_black")
        yield text


class LayerStrip:
    """Layers side by side, in as many lines as they need."""

    def __init__(self, layers: str, head: str) -> None:
        self.layers, self.head = layers, head

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        count = len(self.layers) + bool(self.head)
        each = max(1, min(WIDEST, width // max(1, count)))
        gap = 1 if each > 2 else 0
        text = Text()
        for i, code in enumerate([*self.layers, *self.head]):
            glyph, style, _ = STATES.get(code, ("?", "red", ""))
            if i and i % (width // each) == 0:
                text.append("\n")
            text.append(glyph * (each - gap), style)
            text.append(" " * gap)
        yield text


class View:
    """One model of a process.

    Args:
        hello: what the process said of itself.
        model: from a snapshot.
        rates: the disk's in GB/s before this one, for a curve of them.
    """

    def __init__(
        self, hello: Mapping[str, Any], model: Mapping[str, Any], frozen: bool = False, rates: tuple[float, ...] = ()
    ) -> None:
        self.hello, self.model, self.frozen, self.rates = hello, model, frozen, rates

    def whole(self) -> Group:
        """All of it, for a terminal that is not taken over."""
        return Group(self.title(), self.layers(), self.memory(), self.disk(), self.speed(), self.notes(), Text())

    def title(self) -> Text:
        """Which model, and what it does."""
        state = "frozen" if self.frozen else str(self.model["state"])
        style = {"frozen": "bold black on cyan", "working": "bold black on green"}.get(state, "bold black on white")
        process = f"  {self.hello['command']} · process {self.hello['pid']} · context {self.model['context']}"
        return Text.assemble((f" {state} ", style), " ", (_plain(self.model["name"]), "bold"), process)

    def layers(self) -> Group:
        """Where each layer is, and what the signs mean."""
        layers, head = self.model["layers"], self.model["head"]
        legend = Text()
        for code, (glyph, style, name) in STATES.items():
            if code in "md" or code in layers + head:
                legend.append(f"{glyph} ", style)
                legend.append(f"{layers.count(code)} {name}   ")
        if head:
            legend.append(f"and the head, {STATES[head][2]}   ", "bright_black")
        if shed := self.model["shed_layers"]:
            legend.append(f"{shed} shed", "bold red")
        return Group(LayerStrip(layers, head), legend)

    def memory(self) -> Group:
        """What is held now, and the plan's parts, against the budget."""
        m = self.model["memory"]
        budget = max(1, m["budget"])
        held = m["active"] + m["kept"]
        style = "red" if held > budget else "dodger_blue2"
        grid = _grid()
        grid.add_row(
            "held", ShareBar((m["active"] / budget, style), (m["kept"] / budget, "magenta")), _of(held, budget)
        )
        # Most models have no experts, and an older Outcore says nothing of them.
        shown = {p: style for p, style in PARTS.items() if p != "experts" or m.get(p)}
        grid.add_row("plan", ShareBar(*((m[p] / budget, s) for p, s in shown.items())), _of(m["planned"], budget))
        parts = [Text.assemble(("█ ", style), f"{NAMES.get(p, p)} {format_size(m[p])}") for p, style in shown.items()]
        return Group(grid, Columns(parts, padding=(0, 2)))

    def disk(self) -> Group:
        """The disk's rate against what it was measured to give, and how much of the time is waited for it."""
        d = self.model["disk"]
        if d["how"] == "none":
            return Group(Text("nothing is streamed", "bright_black"))
        rate, ceiling = d["gbps"] or 0.0, d["ceiling_gbps"]
        grid = _grid()
        said = f"{rate:.2f} of {ceiling:.2f} GB/s" if ceiling else f"{rate:.2f} GB/s"
        most = ceiling or max([rate, *self.rates, 1e-9])
        # Without a ceiling there is nothing to be full.
        grid.add_row(
            "SSD", ShareBar((rate / ceiling, "cyan")) if ceiling else HistoryCurve(self.rates or (rate,), most), said
        )
        stalled = d["stalled"] or 0.0
        grid.add_row("waiting", ShareBar((stalled, "red")), f"{stalled:.0%}, {d['stall_s']:.1f} s in all")
        told = Text(f"{format_size(d['bytes'])} read, {d['how']}; {self._slots()}", "bright_black")
        return Group(grid, told)

    def _slots(self) -> str:
        slots = self.model["slots"]
        return f"{slots} slots of {format_size(self.model['memory']['slots'] // slots)}" if slots else "no slots"

    def speed(self) -> Group:
        """Tokens, sweeps and drafts."""
        t, drafts = self.model["tokens"], self.model["drafts"]
        first = Text.assemble((_number(t["per_s"], 2), "bold green"), " tokens/s")
        if t["per_sweep"] is not None:
            first.append(f"   {t['per_sweep']:.2f} a sweep")
        if t["sweeps_per_s"] is not None and self.model["disk"]["how"] != "none":
            first.append(f"   {t['sweeps_per_s']:.2f} sweeps/s")
        second = Text(f"{counted(t['made'], 'token')} in {counted(t['sweeps'], 'sweep')}", "bright_black")
        if t["sweep_s"] is not None:
            second.append(f"; the last sweep took {t['sweep_s']:.2f} s")
        if t["in_sweep"] > 1:
            second.append(f"; {t['in_sweep']} tokens in this one")
        lines = [first, second]
        if drafts["source"]:
            right = drafts["accepted"] / drafts["drafted"] if drafts["drafted"] else 0.0
            grid = _grid()
            said = f"{drafts['accepted']} of {drafts['drafted']} right"
            grid.add_row("drafts", ShareBar((right, "green")), f"{said} ({_plain(drafts['source'])})")
            return Group(*lines, grid)
        return Group(*lines)

    def notes(self) -> Text:
        """What the user should know, the newest first."""
        notes = [_plain(n) for n in reversed(self.model["notes"])]
        return Text("\n".join(f"• {n}" for n in notes) if notes else "no notes", "bright_black" if not notes else "")


class HistoryCurve:
    """Values one after the other, the newest at the right."""

    def __init__(self, values: tuple[float, ...], most: float) -> None:
        self.values, self.most = values, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        values = self.values[-options.max_width :]
        signs = "".join(_level(v / self.most) for v in values)
        yield Text(signs.rjust(options.max_width), "cyan")


def _level(share: float) -> str:
    return LEVELS[max(0, min(len(LEVELS) - 1, int(share * len(LEVELS))))]


def _grid() -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=8, style="bold")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, min_width=22)
    return grid


def _of(some: int, budget: int) -> str:
    return f"{format_size(some)} of {format_size(budget)}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _plain(text: object) -> str:
    return shown(str(text))


def fitted(titles: list[str], width: int) -> Iterator[str]:
    """Titles that fit beside each other, each cut as far as it has to be."""
    most = max(8, width // max(1, len(titles)) - 3)
    for title in titles:
        yield title if cell_len(title) <= most else title[: most - 1] + "…"
