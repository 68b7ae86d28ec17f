"""A snapshot as lines of text with colours: what ``outcore monitor`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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


def view(process: Mapping[str, Any], model: Mapping[str, Any]) -> Group:
    """One model of a process.

    Args:
        process: its snapshot.
        model: one of its models.
    """
    working = model["state"] == "working"
    title = Text.assemble(
        (f" {model['state']} ", f"bold black on {'green' if working else 'white'}"),
        (f" {shown(model['name'])}", "bold"),
        f"  {shown(process['command'])} · process {process['pid']} · context {model['context']}",
    )
    noted = "\n".join(f"• {shown(note)}" for note in reversed(model["notes"]))
    notes = Text(noted) if noted else Text("no notes", "bright_black")
    return Group(title, _layers(model), _memory(model["memory"]), _disk(model), _speed(model), notes, Text())


def _layers(model: Mapping[str, Any]) -> Group:
    """Where each layer is, and what the signs mean."""
    layers, head = model["layers"], model["head"]
    legend = Text()
    for code, (glyph, style, name) in STATES.items():
        if code in "md" or code in layers + head:
            legend.append(f"{glyph} ", style)
            legend.append(f"{layers.count(code)} {name}   ")
    if head:
        legend.append(f"and the head, {STATES[head][2]}   ", "bright_black")
    if shed := model["shed_layers"]:
        legend.append(f"{shed} shed", "bold red")
    return Group(LayerStrip(layers, head), legend)


def _memory(m: Mapping[str, int]) -> Group:
    """What is held now, and the plan's parts, against the budget."""
    budget, held = max(1, m["budget"]), m["active"] + m["kept"]
    style = "red" if held > budget else "dodger_blue2"
    parts = {p: style for p, style in PARTS.items() if p != "experts" or m[p]}  # most models have none
    grid = _grid()
    grid.add_row("held", ShareBar((m["active"] / budget, style), (m["kept"] / budget, "magenta")), _of(held, budget))
    grid.add_row("plan", ShareBar(*((m[p] / budget, s) for p, s in parts.items())), _of(m["planned"], budget))
    named = [Text.assemble(("█ ", style), f"{NAMES.get(p, p)} {format_size(m[p])}") for p, style in parts.items()]
    return Group(grid, Columns(named, padding=(0, 2)))


def _disk(model: Mapping[str, Any]) -> RenderableType:
    """The disk's rate against what it was measured to give, and how much of the time is waited for it."""
    d, slots = model["disk"], model["slots"]
    if d["how"] == "none":
        return Text("nothing is streamed", "bright_black")
    rate, ceiling, stalled = d["gbps"] or 0.0, d["ceiling_gbps"], d["stalled"] or 0.0
    grid = _grid()
    # Without a ceiling there is nothing to be full.
    bar, most = (ShareBar((rate / ceiling, "cyan")), f" of {ceiling:.2f}") if ceiling else ("", "")
    grid.add_row("SSD", bar, f"{rate:.2f}{most} GB/s")
    grid.add_row("waiting", ShareBar((stalled, "red")), f"{stalled:.0%}, {d['stall_s']:.1f} s in all")
    ring = f"{slots} slots of {format_size(model['memory']['slots'] // slots)}" if slots else "no slots"
    return Group(grid, Text(f"{format_size(d['bytes'])} read, {d['how']}; {ring}", "bright_black"))


def _speed(model: Mapping[str, Any]) -> Group:
    """Tokens, sweeps and drafts."""
    t, drafts = model["tokens"], model["drafts"]
    first = Text.assemble(("–" if t["per_s"] is None else f"{t['per_s']:.2f}", "bold green"), " tokens/s")
    if t["per_sweep"] is not None:
        first.append(f"   {t['per_sweep']:.2f} a sweep")
    if t["sweeps_per_s"] is not None and model["disk"]["how"] != "none":
        first.append(f"   {t['sweeps_per_s']:.2f} sweeps/s")
    second = Text(f"{counted(t['made'], 'token')} in {counted(t['sweeps'], 'sweep')}", "bright_black")
    if t["sweep_s"] is not None:
        second.append(f"; the last sweep took {t['sweep_s']:.2f} s")
    if t["in_sweep"] > 1:
        second.append(f"; {t['in_sweep']} tokens in this one")
    grid = _grid()
    if drafts["source"]:
        said = f"{drafts['accepted']} of {drafts['drafted']} right ({shown(drafts['source'])})"
        grid.add_row("drafts", ShareBar((drafts["accepted"] / max(1, drafts["drafted"]), "green")), said)
    return Group(first, second, grid)


def _grid() -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=8, style="bold")
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, min_width=22)
    return grid


def _of(some: int, budget: int) -> str:
    return f"{format_size(some)} of {format_size(budget)}"
