"""What the commands that run a model share: its folder, the progress bar, and what they tell of the engine at the
end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..checkpoint.find_model import resolve_model
from ..engine.session import Session
from ..machine.allocator import peak_held
from ..machine.memory import peak_rss
from ..monitoring import publish
from ..sizes import format_size
from ..text import counted
from .arguments import model_name
from .console import PlainConsole
from .output import tell

ONCE = ", once"
"""In what the loader says of what it does the first time only."""


def model_folder(args: argparse.Namespace) -> Path:
    """As ``resolve_model``; several ranks wait for one another."""
    find: Callable[..., Path] = resolve_model if args.ranks is None else args.ranks.model_folder
    return find(args.model, args.revision)


class ProgressBar(Progress):
    """A progress bar on standard error, silent where that is no terminal. It is gone when what it shows is done, and
    when its ``with`` block ends."""

    def __init__(self) -> None:
        said, amount = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[amount]}"))
        console = PlainConsole(stderr=True)
        columns = (SpinnerColumn(), said, BarColumn(), amount, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._told = False

    def __enter__(self) -> Self:
        return self  # it starts with what it shows

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes; where that is no terminal a line says what is done once."""
        if not self.console.is_terminal and ONCE in what:
            tell(f"{what} ({format_size(total)})")
        self._show(what, done, total, f"{format_size(done)} of {format_size(total)}")

    def count(self, what: str, done: int, total: int, more: str = "") -> None:
        """Show ``done`` of ``total`` things, and what else there is to say."""
        self._show(what, done, total, f"{done} of {total}{', ' if more else ''}{more}")

    def measuring(self, what: str, done: int, total: int, more: str = "") -> None:
        """``count`` for calibrating, which takes a while: where there is no bar a line says what is waited for."""
        if not (self._told or self.console.is_terminal):
            tell("measuring this machine, for up to a minute; what is found is kept")
        self._told = True
        self.count(what, done, total, more)

    def _show(self, what: str, done: int, total: int, amount: str) -> None:
        if not self.tasks or what != self.tasks[0].description:
            self.clear()
            self.start()
            self.add_task(what, total=total, amount=amount)
        self.update(self.task_ids[0], completed=done, total=total, amount=amount)

    def clear(self) -> None:
        if self.tasks:
            self.remove_task(self.task_ids[0])
            self.stop()


def sweep_progress(bar: ProgressBar, session: Session, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Show a prompt's first pass in ``bar``; returns what to call when the first token is there, or is given up.

    Args:
        check: called behind each streamed unit until then; what it raises breaks the pass off.
    """
    streaming = session.streaming
    if streaming is None:
        return bar.clear
    units = len(streaming.layers.units)
    # The first time, the device's kernels are compiled before the first of them is done.
    bar.count("prompt", 0, units)
    done = 0

    def unit() -> None:
        nonlocal done
        check()
        done += 1
        bar.count("prompt", (done - 1) % units + 1, units)

    streaming.after_unit.append(unit)

    def finish() -> None:
        if unit in streaming.after_unit:
            streaming.after_unit.remove(unit)
        bar.clear()

    return finish


def watched(model: Any, args: argparse.Namespace) -> Session:
    """The model's session, which ``outcore monitor`` sees until it is closed."""
    publish(model, args.command, model_name(args.model))
    session: Session = model.outcore
    forecast = session.transport.forecast
    if forecast is not None and session.transport.chooses:
        tell(forecast.line)
    return session


def engine_record(session: Session) -> dict[str, Any]:
    """What the engine did and holds, under the names of the design's JSON."""
    m, plan, forecast, mirrors = session.metrics, session.plan, session.transport.forecast, session.reading.mirrors
    # What was read from the model's folder and each of its mirrors; nothing where there are none.
    folders = () if mirrors is None else mirrors.all
    return {
        "sweeps": m.sweeps,
        "bytes_read": m.bytes_read,
        "read_gbps": round(m.read_gbps, 3),
        "drafted_tokens": m.drafted,
        "accepted_tokens": m.accepted,
        "draft": session.drafting.name if session.drafting is not None else None,
        "stall_s": round(m.stall_s, 4),
        "resident_units": len(plan.resident),
        "streamed_units": len(plan.streamed),
        "head_streamed": plan.head_streamed,
        "slots": plan.slots,
        "expert_slots": sum(n for _, n in plan.pools),
        "experts_used": m.experts.used,
        "experts_read": m.experts.read,
        "experts_foreseen": m.experts.foreseen,
        "experts_wasted": m.experts.wasted,
        "peak_memory_bytes": peak_held(),
        "planned_peak_bytes": plan.peak_bytes,
        "peak_rss_bytes": peak_rss(),
        "budget_bytes": plan.budget_bytes,
        "io": session.io,
        "mirrors": [{"folder": str(r.folder), "bytes_read": r.nbytes, "lost": r.lost} for r in folders],
        "cpu_streams": session.cpu_streams,
        "notes": list(session.notes),
    } | ({} if forecast is None else {"shared": forecast.record() | {"waited_s": round(m.ranks_s, 4)}})


def print_summary(lines: list[str], session: Session) -> None:
    """Print what was measured, then how the engine was used, to standard error."""
    plan, m, forecast = session.plan, session.metrics, session.transport.forecast
    read = f"{counted(m.sweeps, 'sweep')}; SSD {m.read_gbps:.2f} GB/s ({session.io}), {m.stall_s:.2f} s waited for it"
    used = f"Streaming: nothing, {plan.held} are resident"
    if plan.pools:
        # What was foreseen was read for its use, and not found.
        there = m.experts.used - m.experts.read - (m.experts.foreseen - m.experts.wasted)
        found = f", {100 * max(0, there) / m.experts.used:.0f} % of uses found" if m.experts.used else ""
        used = f"Experts: {plan.held} in memory{found}; {format_size(m.bytes_read)} read, {read}"
    elif plan.streams:
        of, head = len(plan.resident) + len(plan.streamed), " and the head" if plan.head_streamed else ""
        each = format_size(plan.bytes_per_token)
        used = f"Streaming: {len(plan.streamed)} of {of} layers{head}, {each} a sweep, {read}"
    lines = [*lines, used]
    if forecast is not None:
        lines.append(f"{len(forecast.record()['ranks'])} machines: {m.ranks_s:.2f} s waited for the others")
    if session.drafting is not None and m.drafted:
        lines.append(f"Drafting: {session.drafting.name}, {m.accepted} of {m.drafted} drafted tokens were right")
    peak, budget = peak_held(), plan.budget_bytes
    lines.append(
        f"Memory: {format_size(peak)} of {format_size(budget)} budget ({100 * peak / budget:.0f} %); process "
        f"{format_size(peak_rss())} at most"
    )
    console = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    for line in [*lines, *(f"Note: {note}" for note in session.notes)]:
        console.print(line)
