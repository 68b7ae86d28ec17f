"""uvicorn, run by us: its sockets, signals and end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ..errors import OutcoreError, UsageError
from ..text import one_line
from .connection import Connection
from .site import Site

ACCEPTED_AT_ONCE = 32
"""Connections that asyncio accepts before it looks after others; those to come wait in the system's queue."""

QUEUE = 4096
"""Of that queue; Linux takes no more than net.core.somaxconn."""

SWITCH_S = 0.0005
"""Seconds after which a thread that wants Python's lock gets it. The loop gives it up with every call to a socket, and
while other threads compute it would wait for 5 ms each time."""

YOUNG = 10_000, 5, 10_000
"""Objects after which Python looks for garbage among them, and how often until it looks among older ones."""

EXIT_S = 0.4
"""Seconds, at the end of those to end in, that Python and the system take to let go of a process of gigabytes."""


class Deadline:
    """Calls ``cut``, which ends the process, when a moment has come, unless the ``with`` block has ended before."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._timers: list[threading.Timer] = []

    def by(self, at: float) -> None:
        """The process is to have ended by then, a time of ``time.monotonic``; the earliest that was given counts."""
        timer = threading.Timer(max(0.0, at - time.monotonic()), self._cut)
        timer.name, timer.daemon = "outcore-deadline", True
        timer.start()
        self._timers.append(timer)

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()


class Server(uvicorn.Server):
    """uvicorn's server, with time-outs and a connection limit of ours, which answers 503 while it drains.

    Args:
        drain_s: seconds after a signal by which the process has ended. Requests under way may take all of them but the
            last 2 (half of them, where there are fewer than 4; one at least), in which answers still under way are told
            an error and the model is closed.
        ready: called once it answers.
        draining: called with the number of requests under way that it waits for when it shuts down, if there are any.
        over: asked ten times a second whether nothing will be answered any more; then it ends.
        deadline: is told by when the process has ended; None: whoever runs it ends when this does.

    Attributes:
        signals: that asked it to end, in their order. The second ends answers under way, each with an error, the third
            does not wait for clients to hear of it.
        signalled_at: when the first came, by ``time.monotonic``.
    """

    def __init__(
        self,
        app: ASGIApp,
        site: Site,
        drain_s: float,
        ready: Callable[[], None] = lambda: None,
        draining: Callable[[int], None] = lambda count: None,
        over: Callable[[], bool] = lambda: False,
        deadline: Deadline | None = None,
    ) -> None:
        self.site, self.drain_s, self.ready, self.draining, self.over = site, drain_s, ready, draining, over
        self.signals: list[int] = []
        self.signalled_at: float | None = None
        self._by = deadline.by if deadline is not None else lambda at: None
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=type("SiteConnection", (Connection,), {"site": site}),
                ws="none",
                lifespan="off",
                log_config=None,
                # Else whoever sends nonsense fills the log with warnings.
                log_level=None if logging.getLogger().isEnabledFor(logging.INFO) else logging.ERROR,
                access_log=logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO),
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                # Later than ours.
                timeout_keep_alive=int(site.limits.idle_s) + 60,
                timeout_graceful_shutdown=3,
                h11_max_incomplete_event_size=site.limits.header_bytes,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until a signal comes, or ``should_exit`` is set."""
        with _prompt():
            asyncio.run(self.serve(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        self.look()
        self.should_exit |= self.over()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what comes, wait for what is under way, end what takes too long, close."""
        self.site.closing = True
        if self.site.under_way and self.drain_s:
            self.draining(self.site.under_way)
        began, ending_s = self.signalled_at or time.monotonic(), max(1.0, min(2.0, self.drain_s / 2))
        answers_until = began + max(0.0, self.drain_s - ending_s)
        self._by(answers_until + ending_s - EXIT_S)
        await self._until(answers_until, lambda: not self.site.under_way, signals=2)
        ended = time.monotonic()
        self._by(ended + ending_s - EXIT_S)
        self.site.ended.set()

        def heard() -> bool:
            unsent = any(c.transport.get_write_buffer_size() for c in self.server_state.connections)
            return not self.site.under_way and not unsent

        await self._until(ended + ending_s / 2, heard, signals=3)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.drop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but what is ignored stays so."""
        handled = (signal.SIGINT, signal.SIGTERM)
        ignored = [s for s in handled if signal.getsignal(s) is signal.SIG_IGN]
        with super().capture_signals():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, but nothing is raised anew at the end."""
        self.signals.append(sig)
        self.signalled_at = self.signalled_at or time.monotonic()
        self.force_exit = self.should_exit
        self.should_exit = True

    def look(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.look()

    async def _until(self, end: float, done: Callable[[], bool], signals: int) -> None:
        """Wait until it is done, until that moment at most, or until there have been that many signals."""
        while not done() and len(self.signals) < signals and time.monotonic() < end:
            self.look()
            await asyncio.sleep(0.05)


@contextmanager
def _prompt() -> Iterator[None]:
    """Python answers soon, whatever its other threads do, and however many objects there were before."""
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    # What is there stays for as long as the server runs; looking at all of it for garbage takes a tenth of a second. So
    # does looking at all that a large body is read into, several times: only what is young is looked at.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(before)


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to all addresses of a host, not yet listening; port 0: one that is free, the same for all.

    Raises:
        UsageError: there is no such host. OutcoreError: the port is taken, or not ours to take.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host {host}: {getattr(e, 'strerror', None) or one_line(e)}") from e
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as opened:
        for family, address in dict.fromkeys((f, a) for f, _, _, _, a in found):
            # asyncio sets TCP_NODELAY where it sees this protocol; without it, an answer's second half waits for 40 ms.
            try:
                listening = opened.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                sockets.append(listening)
            except OSError as e:
                # An address that a name has and this machine has not, such as ::1 without IPv6, is passed over.
                missing = e
                if e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    sockets.clear()
                    break
        if not sockets:
            assert missing is not None
            raise OutcoreError(f"--host {host} --port {port}: {missing.strerror}") from missing
        opened.pop_all()
    return sockets


def url(host: str, sockets: Sequence[socket.socket]) -> str:
    port = sockets[0].getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
