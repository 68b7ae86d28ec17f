"""uvicorn's server with our sockets, signals and shutdown."""

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

# Connections that asyncio accepts in one turn of its loop; others wait in the system's queue.
ACCEPTED_AT_ONCE = 32

# Length of that queue; Linux caps it at net.core.somaxconn.
QUEUE = 4096

# The interpreter's switch interval in seconds. The event loop releases the GIL with every socket call, and with the
# default it would wait 5 ms each time for threads that compute.
SWITCH_S = 0.0005

# Thresholds of Python's garbage collector.
YOUNG = 10_000, 5, 10_000

# Seconds that Python and the system need to free a process of several gigabytes.
EXIT_S = 0.4


class Deadline:
    """Calls ``cut``, which ends the process, at a given time unless the ``with`` block has ended before."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._timers: list[threading.Timer] = []

    def by(self, at: float) -> None:
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
    """uvicorn's server with our connections, which answers 503 while it shuts down.

    Args:
        drain_s: seconds from the first signal to the end of the process. Answers under way may take all but the last 2
            seconds (half of ``drain_s`` if it is below 4, at least one second); then they end with an error, and the
            model is closed.
        ready: called when the server accepts requests.
        draining: called at shutdown with the number of requests under way, if there are any.
        over: called ten times a second; True ends the server, because its engine has failed.
        deadline: gets the times by which the process must have ended; None: not limited.

    Attributes:
        signals: received so far. The second ends answers under way with an error; the third does not wait until clients
            have read it.
        signalled_at: time of the first one, by ``time.monotonic``.
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
                # Malformed requests would fill the log with warnings.
                log_level=None if logging.getLogger().isEnabledFor(logging.INFO) else logging.ERROR,
                access_log=False,  # ``Observed`` writes a line that says more
                proxy_headers=False,
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                # Only ``Connection``'s own time-outs count.
                timeout_keep_alive=int(site.limits.idle_s) + 60,
                timeout_graceful_shutdown=3,
                h11_max_incomplete_event_size=site.limits.header_bytes,
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with _quick_switches():
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
        """Refuse new requests, wait for answers under way, end late ones with an error, and close."""
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

        def all_sent() -> bool:
            unsent = any(c.transport.get_write_buffer_size() for c in self.server_state.connections)
            return not self.site.under_way and not unsent

        await self._until(ended + ending_s / 2, all_sent, signals=3)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.drop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but signals that were ignored stay ignored."""
        main = threading.current_thread() is threading.main_thread()  # as uvicorn: others cannot set any
        handled = (signal.SIGINT, signal.SIGTERM) if main else ()
        ignored = [s for s in handled if signal.getsignal(s) is signal.SIG_IGN]
        with super().capture_signals():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, but the signal is not raised again at the end."""
        self.signals.append(sig)
        self.signalled_at = self.signalled_at or time.monotonic()
        self.force_exit = self.should_exit
        self.should_exit = True

    def look(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.look()

    async def _until(self, end: float, done: Callable[[], bool], signals: int) -> None:
        while not done() and len(self.signals) < signals and time.monotonic() < end:
            self.look()
            await asyncio.sleep(0.05)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Shortens the pauses of the event loop that other threads and the garbage collector cause."""
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    # A full collection takes 0.1 s. Existing objects stay anyway, so they are frozen, and a large body's objects are
    # collected in the young generation only.
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
    """Sockets bound to all addresses of a host, not yet listening; port 0: a free port, the same for all.

    Raises:
        UsageError: the host is unknown.
        OutcoreError: the port is in use or not permitted.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host {host}: {getattr(e, 'strerror', None) or one_line(e)}") from e
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    with ExitStack() as opened:
        for family, address in dict.fromkeys((f, a) for f, _, _, _, a in found):
            # asyncio sets TCP_NODELAY only for IPPROTO_TCP; without it, an answer's second half waits for 40 ms.
            try:
                listening = opened.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                sockets.append(listening)
            except OSError as e:
                # Skips addresses that this machine does not have, such as ::1 without IPv6.
                failed = e
                if e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    sockets.clear()
                    break
        if not sockets:
            assert failed is not None
            used = failed.errno == errno.EADDRINUSE
            other = "; outcore ps lists your servers, --port 0 picks a free port" if used else ""
            raise OutcoreError(f"--host {host} --port {port}: {failed.strerror}{other}") from failed
        opened.pop_all()
    return sockets


def url(host: str, sockets: Sequence[socket.socket]) -> str:
    port = sockets[0].getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
