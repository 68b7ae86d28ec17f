"""Shared by the commands that run a model: the model's folder, the progress bar, and the report of the engine."""

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
"""Ends the loader's description of work that it does on first use only."""


def model_folder(args: argparse.Namespace) -> Path:
    """Finds the model's folder as ``resolve_model`` does; several ranks wait for one another."""
    find: Callable[..., Path] = resolve_model if args.ranks is None else args.ranks.model_folder
    return find(args.model, args.revision)


class ProgressBar(Progress):
    """A progress bar on standard error. Shows nothing if that is not a terminal, and disappears when it is done."""

    def __init__(self) -> None:
        what, amount = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[amount]}"))
        console = PlainConsole(stderr=True)
        columns = (SpinnerColumn(), what, BarColumn(), amount, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._announced = False

    def __enter__(self) -> Self:
        return self  # the first task starts it

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.console.is_terminal and ONCE in what:
            tell(f"{what} ({format_size(total)})")
        self._show(what, done, total, f"{format_size(done)} of {format_size(total)}")

    def count(self, what: str, done: int, total: int, more: str = "") -> None:
        self._show(what, done, total, f"{done} of {total}{', ' if more else ''}{more}")

    def measuring(self, what: str, done: int, total: int, more: str = "") -> None:
        """Shows calibration's progress; without a terminal, one line says why nothing happens for a while."""
        if not (self._announced or self.console.is_terminal):
            tell("measuring this machine, for up to a minute; the result is saved")
        self._announced = True
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


def prefill_progress(
    bar: ProgressBar, session: Session, check: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Shows in ``bar`` how far prefill has come. Returns the function to call at the first token, or on giving up.

    Args:
        check: called after each streamed unit until then; an exception that it raises stops prefill.
    """
    streaming = session.streaming
    if streaming is None:
        return bar.clear
    units = len(streaming.layers.units)
    # Shown at once: in the first run, compiling kernels delays the first unit.
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
    """Returns the model's session, and lets ``outcore monitor`` see it until it is closed."""
    publish(model, args.command, model_name(args.model))
    session: Session = model.outcore
    forecast = session.transport.forecast
    if forecast is not None and session.transport.chooses:
        tell(forecast.line)
    return session


def engine_record(session: Session) -> dict[str, Any]:
    m, plan, forecast, mirrors = session.metrics, session.plan, session.transport.forecast, session.reading.mirrors
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
    plan, m, forecast = session.plan, session.metrics, session.transport.forecast
    read = f"{counted(m.sweeps, 'pass')}; SSD {m.read_gbps:.2f} GB/s ({session.io}), {m.stall_s:.2f} s waiting for it"
    streaming = f"Streaming: nothing, {plan.held} are resident"
    if plan.pools:
        # A prefetched expert that was used was read from disk as well: no hit.
        hits = m.experts.used - m.experts.read - (m.experts.foreseen - m.experts.wasted)
        rate = f", hit rate {100 * max(0, hits) / m.experts.used:.0f} %" if m.experts.used else ""
        streaming = f"Experts: {plan.held} in memory{rate}; {format_size(m.bytes_read)} read, {read}"
    elif plan.streams:
        of, head = len(plan.resident) + len(plan.streamed), " and the head" if plan.head_streamed else ""
        each = format_size(plan.bytes_per_token)
        streaming = f"Streaming: {len(plan.streamed)} of {of} layers{head}, {each} a pass, {read}"
    lines = [*lines, streaming]
    if forecast is not None:
        lines.append(f"{len(forecast.record()['ranks'])} machines: {m.ranks_s:.2f} s waiting for the others")
    if session.drafting is not None and m.drafted:
        lines.append(f"Drafting: {session.drafting.name}, {m.accepted} of {m.drafted} drafted tokens accepted")
    peak, budget = peak_held(), plan.budget_bytes
    lines.append(
        f"Memory: peak {format_size(peak)} of {format_size(budget)} budget ({100 * peak / budget:.0f} %); whole "
        f"process {format_size(peak_rss())}"
    )
    console = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    for line in [*lines, *(f"Note: {note}" for note in session.notes)]:
        console.print(line)
