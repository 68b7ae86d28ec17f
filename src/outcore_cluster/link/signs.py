"""The thread of a link: it moves bytes, gives and hears signs of life, and ends a run that has failed, on all ranks.

Every rank tells rank 0 each second that it lives and whom it waits for, and hears the same of rank 0, which decides:
who finds something wrong tells it, and takes its word for whose fault that is. So one rank's death is told everywhere
as that rank's, not as that of those who ended because of it. Who hears nothing of rank 0 blames rank 0.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from outcore.errors import LinkError
from outcore.machine import interrupts
from outcore.text import one_line, printable

from .connection import Kind, LinkConnection
from .link import LinkLimits
from .meeting import Identity
from .verdict import GONE, LEFT, Blame, Movement, Sign, broke, silent, stuck

POLL_S = 0.05
"""Seconds until a wait of the main thread looks for signals that are held."""
TELL_S = 0.5


@dataclass
class Peer:
    """A rank at the other end of a connection for signs.

    Attributes:
        heard_at: or by when it must begin to give signs, less the silence that is allowed.
        gone: nothing more comes from it. ``ended``: it said before that its part was done.
    """

    control: LinkConnection
    heard_at: float
    sign: Sign = field(default_factory=Sign)
    ended: bool = False
    gone: bool = False


class LinkThread:
    """One rank's.

    Args:
        control, data: sockets by rank; of signs rank 0 has one to each, others one to rank 0.
        until: by ``time.monotonic``; all must have begun to give signs by then.
        leave: ends the process once the run has failed and the grace is over; None: nothing does.
        alone: asked once a beat; a reason to end, such as a launcher that is gone.

    Attributes:
        inbox: values that were told, by kind and rank.
    """

    def __init__(
        self,
        me: Identity,
        limits: LinkLimits,
        control: Mapping[int, socket.socket],
        data: Mapping[int, socket.socket],
        until: float,
        leave: Callable[[int], None] | None,
        alone: Callable[[], str | None],
    ) -> None:
        self._me, self._limits, self._leave, self._alone = me, limits, leave, alone
        self.movement = Movement(limits.computing)
        self.inbox: defaultdict[tuple[Kind, int], deque[bytes]] = defaultdict(deque)
        self.data = {rank: LinkConnection(sock, rank, data=True) for rank, sock in data.items()}
        first = until - limits.silence
        self.peers = {rank: Peer(LinkConnection(sock, rank, data=False), first) for rank, sock in control.items()}
        self.fault: LinkError | None = None
        self._told = self._closing = False
        self._changed = threading.Condition()  # of what leaves, too
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()
        self._wake[0].setblocking(False)
        self._selector.register(self._wake[1], selectors.EVENT_READ, None)
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

    def put(self, to: LinkConnection, kind: Kind, payload: memoryview, *, at_once: bool = True) -> None:
        """Queue a frame; ``at_once``: it leaves now, as far as the connection takes it."""
        with self._changed:
            behind = bool(to.leaving)
            to.put(kind, payload)
            if at_once and not behind:
                with suppress(OSError):  # what is wrong is found by the thread
                    to.write()
            left = bool(to.leaving)
        if left:
            self.wake_up()

    def tell(self, kind: Kind, payload: bytes = b"") -> None:
        """Tell all ranks that this one has a connection for signs to: rank 0, or all others."""
        for peer in self.peers.values():
            if not peer.gone:
                self.put(peer.control, kind, memoryview(payload))

    def fail(self, blame: Blame) -> None:
        """The run cannot go on, for what seems to be a rank's fault. Rank 0 is told, which tells all."""
        if self._me.rank == 0 or blame.rank == 0 or self.peers[0].gone:
            self._decide(blame)
        else:
            self.tell(Kind.FAULT, blame.packed())

    def wake_up(self) -> None:
        """Have the thread see what there is to do."""
        with suppress(OSError):  # where there is no room, enough is there to wake it
            self._wake[0].send(b"!")

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
        self._wake[0].shutdown(socket.SHUT_WR)
        self._thread.join()
        for sock in (*self._wake, *(each.sock for each in self._connections)):
            sock.close()

    # The thread's own.

    @property
    def _connections(self) -> list[LinkConnection]:
        return [*self.data.values(), *(peer.control for peer in self.peers.values())]

    def _run(self) -> None:
        try:
            with self._selector:
                self._go_round()
        except Exception as e:
            # A thread that dies would look like a rank that is silent.
            self._decide(Blame(self._me.rank, f"its link broke: {one_line(e)}"))

    def _go_round(self) -> None:
        beat = time.monotonic()
        while True:
            for key, _ in self._selector.select(self._pause(beat)):
                if key.data is not None:
                    self._serve(key.data)
                elif not self._wake[1].recv(4096):
                    return
            if time.monotonic() >= beat:
                beat = time.monotonic() + self._limits.beat
                sign = self.movement.look()
                self.tell(Kind.BEAT, sign.packed())
                if not self._closing and self.fault is None:
                    self._judge(sign)

    def _pause(self, beat: float) -> float:
        """Have connections watched for what is wanted of them; seconds until the next beat."""
        for each in self._connections:
            events = 0 if each.lost else each.wanted * selectors.EVENT_READ | bool(each.leaving) * selectors.EVENT_WRITE
            if each.data and self.fault is not None:
                events = 0
            if events != each.events:
                if each.events:
                    self._selector.unregister(each.sock)
                if events:
                    self._selector.register(each.sock, events, each)
                each.events = events
        return max(0.0, beat - time.monotonic())

    def _serve(self, each: LinkConnection) -> None:
        why, moved = None, False
        try:
            with self._changed:
                moved = each.write() > 0
            while each.wanted and not each.lost:
                frame = each.read()
                moved = True
                if frame is None:
                    break
                if not each.data:
                    self._take(each.rank, *frame)
        except BlockingIOError:
            pass
        except (OSError, EOFError) as e:
            why = broke(e)
        except (ValueError, TypeError, struct.error) as e:
            why = one_line(e)
        if moved and each.data:
            self.movement.note()
        if why is not None:
            self._lost(each, why)
        with self._changed:
            self._changed.notify_all()

    def _lost(self, each: LinkConnection, why: str) -> None:
        """A connection is over; ``why``: empty where that is as it should be."""
        each.lost = True
        if not each.data:
            self.peers[each.rank].gone = True
        if why and not self._closing:
            self.fail(Blame(each.rank, why))

    def _take(self, rank: int, kind: Kind, payload: bytes) -> None:
        peer, size = self.peers[rank], self._me.size
        peer.heard_at = max(peer.heard_at, time.monotonic())
        if kind == Kind.BEAT:
            peer.sign, peer.heard_at = Sign.unpacked(payload), time.monotonic()
        elif kind == Kind.BYE:
            peer.ended = True
            peer.control.sock.shutdown(socket.SHUT_WR)  # so it knows
            self._lost(peer.control, "")
        elif kind == (Kind.VERDICT if self._me.rank else Kind.FAULT):
            self._decide(Blame.unpacked(payload, size))
        elif kind in ((Kind.AGREE, Kind.GATHERED) if self._me.rank else (Kind.GATHER,)):
            self.inbox[kind, rank].append(payload)
        else:
            raise ValueError(f"{kind.name} from rank {rank} at rank {self._me.rank}")

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
            self.tell(Kind.VERDICT, blame.packed())
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
