"""The live view of ``outcore monitor``, in Textual."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from ..errors import StoreError
from ..monitoring.sockets import found
from ..monitoring.watch import Watched, watch
from .monitor_view import NO_MODEL, View, fitted

LOOK_S = 1.0
"""Seconds until new processes are looked for again."""

CURVE = 200
"""Rates that are kept."""

PANELS = ("layers", "memory", "disk", "speed", "notes")

NOBODY = "No Outcore process of yours runs. Start one in another terminal, such as outcore chat: it will show up here."


class Confirm(ModalScreen[bool]):
    """Asks before a process is ended."""

    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    CSS = """
    Confirm { align: center middle; }
    Confirm Static { width: auto; max-width: 70; height: auto; padding: 1 2; border: round $warning; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(self._question + "\n\n[b]y[/b] yes    [b]n[/b] no")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Monitor(App[None]):
    """Shows one process at a time; the others are not watched meanwhile.

    Args:
        pid: of the only process to show; None: all of this user's.
    """

    TITLE = "outcore monitor"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (116, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar = [
        # Textual's own tab goes from field to field.
        Binding("right,tab", "switch(1)", "Next", key_display="→", priority=True),
        Binding("left,shift+tab", "switch(-1)", "Previous", key_display="←", priority=True),
        Binding("f", "freeze", "Freeze/go on"),
        Binding("k", "end", "End process"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    #processes, #title { height: 1; }
    #title { margin: 0 1; }
    #panels { height: 1fr; layout: vertical; }
    #panels > * { border-top: solid $primary-darken-2; border-title-color: $text-muted; padding: 0 1; height: auto; }
    #panels #notes { height: 1fr; min-height: 2; }
    .-wide #panels { layout: grid; grid-size: 2; grid-rows: auto auto 1fr; grid-gutter: 1 2; padding: 1 0; }
    .-wide #panels > * { height: 100%; }
    .-wide #panels #layers { height: auto; column-span: 2; }
    """

    def __init__(self, pid: int | None = None) -> None:
        super().__init__()
        self._pid = pid
        self._known: dict[int, tuple[int, dict[str, Any]]] = {}  # each process's socket, and what it said of itself
        self._at: int | None = None
        self._model = 0  # of the process's models
        self._snapshot: dict[str, Any] | None = None
        self._watched: Watched | None = None
        self._watching: asyncio.Task[None] | None = None
        self._rates: deque[float] = deque(maxlen=CURVE)
        self._busy = asyncio.Lock()  # of the process that is shown, while it changes
        self._asked: set[int] = set()  # to end
        self.wrong = ""

    def compose(self) -> ComposeResult:
        yield Static(id="processes")
        yield Static(id="title")
        with Container(id="panels"):
            for name in PANELS[:-1]:
                panel = Static(id=name)
                panel.border_title = name
                yield panel
            with VerticalScroll(id="notes") as notes:
                notes.border_title = "notes"
                notes.can_focus = False
                yield Static(id="noted")
        yield Footer()

    async def on_mount(self) -> None:
        self.set_interval(LOOK_S, self.look)
        await self.look()

    async def on_unmount(self) -> None:
        await self._leave()

    # Processes

    async def look(self) -> None:
        """Find what has begun and what has ended."""
        if self._busy.locked():
            return
        async with self._busy:
            await self._look()

    async def _look(self) -> None:
        try:
            paths = {pid: path for pid, path in found() if self._pid in (None, pid)}
            self.wrong = ""
        except StoreError as e:
            paths, self.wrong = {}, str(e)
        for pid in [p for p in self._known if p not in paths]:
            del self._known[pid]
        for pid, path in paths.items():
            with contextlib.suppress(OSError):
                inode = path.stat().st_ino
                if self._known.get(pid, (0,))[0] != inode and (watched := await asyncio.to_thread(watch, pid, path)):
                    self._known[pid] = (inode, watched.hello)
                    watched.close()
        if self._at not in self._known:
            await self.show(next(iter(self._known), None))
        elif self._watching is None or self._watching.done():
            await self.show(self._at)
        self._draw()

    async def show(self, pid: int | None) -> None:
        """Watch this process from now on."""
        await self._leave()
        self._at, self._snapshot, self._model = pid, None, 0
        self._rates.clear()
        if pid is not None:
            path = next((path for number, path in found() if number == pid), None)
            watched = None if path is None else await asyncio.to_thread(watch, pid, path)
            if watched is not None:
                self._watching = asyncio.create_task(self._follow(watched))
        self._draw()

    async def _leave(self) -> None:
        task, self._watching = self._watching, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self, watched: Watched) -> None:
        self._watched = watched
        watched.connection.setblocking(False)
        lines = watched.early
        try:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                while True:
                    for line in lines:
                        if line.get("type") == "snapshot":
                            self._snapshot = line
                            self._draw()
                    data = await asyncio.get_running_loop().sock_recv(watched.connection, 1 << 16)
                    if not data:
                        return
                    lines = watched.taken(data)
        finally:
            watched.close()
            if self._watched is watched:
                self._watched = self._snapshot = None

    def _ask(self, what: str) -> None:
        if self._watched is not None:
            self._watched.ask(what)

    # Keys

    async def action_switch(self, by: int) -> None:
        """The next model of this process, or the next process."""
        models = len((self._snapshot or {}).get("models", ()))
        if 0 <= self._model + by < models:
            self._model += by
            self._rates.clear()
            self._draw()
            return
        known = sorted(self._known)
        async with self._busy:
            if len(known) > 1 and self._at in known:
                await self.show(known[(known.index(self._at) + by) % len(known)])

    def action_freeze(self) -> None:
        """Hold the process up before its next sweep, or let it go on."""
        if self._snapshot is not None:
            self._ask("thaw" if self._snapshot["frozen"] else "freeze")

    def action_end(self) -> None:
        """Ask whether the process shall end, and have it end."""
        pid = self._at
        if pid is None:
            return
        how = "as Ctrl-C would" if pid not in self._asked else "at once: it was asked before"
        command = self._known[pid][1].get("command")

        def end(sure: bool | None) -> None:
            if sure and self._at == pid:
                self._asked.add(pid)
                self._ask("quit")

        self.push_screen(Confirm(f"End process {pid} ({command}), {how}?"), end)

    # What is shown

    def _draw(self) -> None:
        if not self.is_running or not self.screen_stack or not self.screen_stack[0].query("#noted"):
            return
        base = self.screen_stack[0]
        base.query_one("#processes", Static).update(self._tabs())
        models = (self._snapshot or {}).get("models", ())
        shown = self._snapshot is not None and bool(models) and self._at in self._known
        base.query_one("#panels").display = shown
        title = base.query_one("#title", Static)
        title.styles.height = 1 if shown else "auto"
        if not shown:
            waiting = "waiting for its first word…" if self._snapshot is None else NO_MODEL
            title.update(self.wrong or (NOBODY if self._at is None else waiting))
            return
        assert self._snapshot is not None and self._at is not None
        self._model = min(self._model, len(models) - 1)
        model = models[self._model]
        self._rates.append(model["disk"]["gbps"] or 0.0)
        view = View(self._known[self._at][1], model, bool(self._snapshot["frozen"]), tuple(self._rates))
        title.update(view.title())
        for name in PANELS[:-1]:
            base.query_one(f"#{name}", Static).update(getattr(view, name)())
        base.query_one("#noted", Static).update(view.notes())

    def _tabs(self) -> Text:
        known = sorted(self._known)
        titles = [f"{self._known[pid][1].get('command')} {pid}" for pid in known]
        text = Text(no_wrap=True)
        for pid, title in zip(known, fitted(titles, self.size.width), strict=True):
            text.append(f" {title} ", "reverse bold" if pid == self._at else "")
            text.append(" ")
        return text if known else Text(" outcore monitor", "bold")
