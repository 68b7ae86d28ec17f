"""The thread of a link: it moves bytes, gives and hears signs of life, and ends a run that has failed, on all ranks.

Every rank tells rank 0 each second that it lives and whom it waits for, and hears the same of rank 0, which decides:
who finds something wrong tells it, and takes its word for whose fault that is. So one rank's death is told everywhere
as that rank's, not as that of those who ended because of it. Who hears nothing of rank 0 blames rank 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outcore.errors import LinkError
from outcore.machine import interrupts
from outcore.text import one_line, printable

from ..link_protocol import LinkLimits
from .connection import SMALL, Kind, LinkConnection
from .meeting import CONTROL, DATA, Identity
from .verdict import GONE, LEFT, Blame, Movement, Sign, broke, silent, stuck

POLL_S = 0.05
"""Seconds until a wait of the main thread looks for signals that are held."""
TELL_S = 0.5


@dataclass
class Receive:
    """A receive (``Arrival``): the ``number``-th message of data that a connection brings, from 1."""

    thread: LinkThread
    source: LinkConnection
    number: int

    @property
    def ready(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        return self.source.received >= self.number or self.thread.fault is not None

    def wait(self) -> None:
        """Wait for the bytes. Raises ``LinkError`` where the run has failed."""
        self.thread.wait_for(lambda: self.source.received >= self.number, self.source.rank, due=True)


class LinkThread:
    """One rank's.

    Args:
        there: sockets by rank and purpose; of signs rank 0 has one to each, others one to rank 0.
        leave: ends the process once the run has failed and the grace is over; None: nothing does.
        alone: asked once a beat; a reason to end, such as a launcher that is gone.

    Attributes:
        inbox: values that were told, by kind and rank.
    """

    def __init__(
        self,
        me: Identity,
        limits: LinkLimits,
        there: Mapping[tuple[int, str], socket.socket],
        leave: Callable[[int], None] | None,
        alone: Callable[[], str | None],
    ) -> None:
        self._me, self._limits, self._leave, self._alone = me, limits, leave, alone
        self.movement = Movement(limits.computing)
        self.inbox: defaultdict[tuple[Kind, int], deque[bytes]] = defaultdict(deque)
        # Others may be meeting yet.
        first = time.monotonic() + limits.start - limits.silence
        self.data, self.peers = (
            {
                rank: LinkConnection(sock, rank, its == DATA, first, self._take)
                for (rank, its), sock in there.items()
                if its == of
            }
            for of in (DATA, CONTROL)
        )
        self.fault: LinkError | None = None
        self._told = self._closing = False
        self._changed = threading.Condition()  # of what leaves, too
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._broke)
        self._thread = threading.Thread(target=self._run, name="outcore-link", daemon=True)
        self._thread.start()

    # Called by any thread.

    def check(self) -> None:
        """Raise the run's fault, if there is one.

        Raises:
            LinkError: the run has failed.
        """
        if self.fault is not None:
            self._told = True
            # A new one each time: a traceback grows with each raise.
            raise LinkError(str(self.fault), self.fault.rank)

    def wait_for(self, done: Callable[[], object], rank: int, due: bool) -> None:
        """Wait for what a rank has to bring, and tell so in heartbeats. Signals are handled also where they are held.

        Raises:
            LinkError: the run has failed.
        """
        if done():
            return
        with self.movement.waiting(rank, due):
            while True:
                ended = not due and self.peers[rank].ended  # before looking at what it has sent
                with self._changed:
                    if not done() and self.fault is None and not ended:
                        self._changed.wait(POLL_S)
                    if done():
                        return
                if ended:
                    self.fail(Blame(rank, LEFT))
                self.check()
                interrupts.check()

    def receive(self, source: int, into: memoryview) -> Receive:
        """Begin to receive a message of a rank."""
        each = self.data[source]
        each.asked += 1
        each.posted.append(into)
        if len(each.posted) == 1:
            self._soon(self._read, each)
        return Receive(self, each, each.asked)

    def put(self, to: LinkConnection, kind: Kind, payload: memoryview) -> None:
        """Queue a frame; what is small leaves now, as far as the connection takes it."""
        with self._changed:
            behind = bool(to.leaving)
            to.put(kind, payload)
            if not behind and payload.nbytes <= SMALL:
                with suppress(OSError):  # what is wrong is found by the thread
                    to.write()
            left = bool(to.leaving)
        if left and not behind:
            self._soon(self._loop.add_writer, to.sock, self._write, to)

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        """Tell all ranks that this one has a connection for signs to: rank 0, or all others."""
        for peer in self.peers.values():
            if not peer.gone:
                self.put(peer, kind, memoryview(payload))

    def fail(self, blame: Blame) -> None:
        """The run cannot go on, for what seems to be a rank's fault. Rank 0 is told, which tells all."""
        if self._me.rank == 0 or blame.rank == 0 or all(peer.gone for peer in self.peers.values()):
            self._decide(blame)
        else:
            self.tell(Kind.BLAME, json.dumps(blame).encode())

    def close(self) -> None:
        """Tell the others that this rank's part is done, wait until they know, and end."""
        self._closing = True
        self.tell(Kind.BYE)
        for each in self.data.values():
            with suppress(OSError):
                each.sock.shutdown(socket.SHUT_WR)
        with self._changed:
            peers = self.peers.values()
            self._changed.wait_for(lambda: self.fault or all(peer.gone for peer in peers), self._limits.grace)
        self._soon(self._loop.stop)
        self._thread.join()
        for each in (*self.data.values(), *self.peers.values()):
            each.sock.close()

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # where the thread has ended, nobody is there to do it
            self._loop.call_soon_threadsafe(call, *args)

    # The thread's own.

    def _run(self) -> None:
        for peer in self.peers.values():
            self._read(peer)
        self._beat()
        self._loop.run_forever()
        self._loop.close()

    def _broke(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A thread that does not go on would look like a rank that is silent.
        self._decide(
            Blame(self._me.rank, f"its link broke: {one_line(context.get('exception') or context['message'])}")
        )

    def _beat(self) -> None:
        self._loop.call_later(self._limits.beat, self._beat)
        sign = self.movement.look()
        self.tell(Kind.BEAT, json.dumps(sign).encode())
        if not self._closing and self.fault is None:
            self._judge(sign)

    def _read(self, each: LinkConnection) -> None:
        try:
            each.read()
        except BlockingIOError:
            if not each.watched:
                self._loop.add_reader(each.sock, self._read, each)
            each.watched = True
        except (OSError, EOFError) as e:
            self._lost(each, broke(e))
        except (ValueError, TypeError) as e:
            self._lost(each, one_line(e))
        else:
            self._loop.remove_reader(each.sock)
            each.watched = False
            if each.ended:
                self._lost(each, "")
        self._moved(each)

    def _write(self, each: LinkConnection) -> None:
        why = ""
        with self._changed:
            try:
                each.write()
            except BlockingIOError:
                return
            except OSError as e:
                why = broke(e)
            if why or not each.leaving:
                self._loop.remove_writer(each.sock)
        if why:
            self._lost(each, why)
        self._moved(each)

    def _moved(self, each: LinkConnection) -> None:
        if each.data:
            self.movement.note()
        with self._changed:
            self._changed.notify_all()

    def _take(self, peer: LinkConnection, kind: Kind, payload: bytes) -> None:
        peer.heard_at = max(peer.heard_at, time.monotonic())
        if kind == Kind.BEAT:
            peer.sign, peer.heard_at = Sign(*json.loads(payload)), time.monotonic()
        elif kind == Kind.BLAME:
            rank, what = json.loads(payload)
            if rank not in range(self._me.size):
                raise ValueError(f"a verdict on rank {rank!r} of {self._me.size}")
            self._decide(Blame(rank, one_line(str(what))))
        elif kind == Kind.BYE:
            peer.ended = True
            peer.sock.shutdown(socket.SHUT_WR)  # so it knows
        else:
            self.inbox[kind, peer.rank].append(payload)

    def _lost(self, each: LinkConnection, why: str) -> None:
        """Nothing more comes by a connection; ``why``: empty where that is as it should be."""
        each.gone = True
        self._loop.remove_reader(each.sock)
        for peer in self.peers.values():
            if why and each.data and not peer.gone:
                self._read(peer)  # it may have been told whose fault it is
        if why and not self._closing:
            self.fail(Blame(each.rank, why))

    def _judge(self, sign: Sign) -> None:
        """Look whether anybody is silent, or does nothing though others wait for it."""
        me, limits = self._me, self._limits
        there = {rank: peer for rank, peer in self.peers.items() if not peer.gone}
        heard = {rank: peer.heard_at for rank, peer in there.items()}
        blame = silent(me.rank, me.names, heard, time.monotonic(), limits.silence)
        if blame is None and me.rank == 0:
            blame = stuck({0: sign} | {rank: peer.sign for rank, peer in there.items()}, limits.stall)
        if blame is None and (reason := self._alone()) is not None:
            blame = Blame(me.rank, reason)
        if blame is not None:
            self.fail(blame)

    def _decide(self, blame: Blame) -> None:
        with self._changed:
            if self.fault is not None or self._closing:
                return
            if blame.what == GONE and blame.rank in self.peers and self.peers[blame.rank].ended:
                blame = Blame(blame.rank, LEFT)
            self.fault = LinkError(f"{self._me.who(blame.rank)}: {blame.what}", blame.rank)
            self._changed.notify_all()
        if self._me.rank == 0:
            self.tell(Kind.BLAME, json.dumps(blame).encode())
        if self._leave is not None:
            threading.Thread(target=self._end, args=(self._leave,), name="outcore-link-end", daemon=True).start()

    def _end(self, leave: Callable[[int], None]) -> None:
        """Let the main thread end by itself, and end the process after that: it may sit in a call of C that takes no
        exception."""
        time.sleep(self._limits.grace)
        if not self._told:
            # Who reads it may have stopped, and Python's own streams may be locked for ever.
            line = f"{printable(f'outcore: {self.fault}')}\n".encode(errors="backslashreplace")
            telling = threading.Thread(target=os.write, args=(2, line), daemon=True)
            telling.start()
            telling.join(TELL_S)
        leave(1)
