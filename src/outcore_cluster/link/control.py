"""The thread of signs: heartbeats to every rank, what all ranks agree on, and the end of a run that has failed.

Every pair of ranks tells each other each second that it lives (``LinkLimits.beat``), so a link that is cut is seen at
both of its ends. Rank 0 decides: who finds something wrong tells it, and takes its word for whose fault that is, if it
comes in time. So one rank's death is told everywhere as that rank's, not as that of those who ended because of it.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outcore.errors import LinkError
from outcore.text import one_line

from .board import LinkBoard
from .frames import Frame, FrameError, FrameParser, Kind, header
from .limits import LinkLimits
from .meeting import Identity
from .movement import Sign
from .watch import GONE, Blame, broke, silent, stuck

LATE_S = 2.0
"""Seconds beyond a beat: a thread that comes so late was itself stopped, and cannot tell who was silent."""

OVERDUE_S = 0.5
"""Seconds for which somebody may wait for a rank that has ended: what it sent may not have been looked at yet."""


@dataclass
class Peer:
    """A rank at the other end of a control connection, which does not block.

    Attributes:
        ended_at: when it said that its part was done. gone: nothing more comes from it.
        beats: it has begun to give signs.
        knows: that this rank's part is done.
    """

    sock: socket.socket
    heard_at: float
    sign: Sign = field(default_factory=Sign)
    parser: FrameParser = field(default_factory=FrameParser)
    leaving: bytearray = field(default_factory=bytearray)
    sequence: int = 0
    ended_at: float | None = None
    gone: bool = False
    beats: bool = False
    knows: bool = False

    def queue(self, kind: Kind, payload: bytes) -> None:
        """Send a frame, as far as the connection takes it; the rest stays in ``leaving``."""
        self.leaving += header(kind, self.sequence, len(payload)) + payload
        self.sequence += 1
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self.leaving:
                del self.leaving[: self.sock.send(self.leaving)]
        except BlockingIOError:
            pass
        except OSError:
            self.leaving.clear()  # reading tells what is wrong


@dataclass(frozen=True)
class Suspicion:
    """That a rank is at fault, and which other rank said so, if it was one."""

    blame: Blame
    reporter: int | None
    since: float


def packed(blame: Blame) -> bytes:
    """As the payload of a frame."""
    return json.dumps([blame.rank, blame.what]).encode()


def unpacked(payload: bytes, size: int) -> Blame:
    """Back from it.

    Raises:
        ValueError: it is none.
    """
    rank, what = json.loads(payload)
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise FrameError(f"a verdict on rank {rank!r} of {size}")
    return Blame(rank, one_line(str(what)))


class ControlLink:
    """One rank's part.

    Args:
        sockets: the control connections, by rank.
        heard: told of each frame that is not the thread's own business: ``AGREE``, ``GATHER``, ``GATHERED``.
        failed: told when the run has failed, after the others were.
        alone: asked once a beat; a reason to end, such as a launcher that is gone.
    """

    def __init__(
        self,
        me: Identity,
        sockets: dict[int, socket.socket],
        board: LinkBoard,
        limits: LinkLimits,
        heard: Callable[[int, Frame], None],
        failed: Callable[[LinkError], None],
        alone: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._me, self._board, self._limits = me, board, limits
        self._heard, self._failed, self._alone = heard, failed, alone
        now = time.monotonic()
        self._peers = {rank: Peer(sock, now) for rank, sock in sockets.items()}
        self._lock = threading.Lock()
        self._suspected: Suspicion | None = None
        self._expected_by: float | None = None
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for rank, peer in self._peers.items():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="outcore-link-control", daemon=True)

    def start(self) -> None:
        """From here on, ranks are watched."""
        self._thread.start()

    def tell(self, rank: int, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame; at once, as far as the connection takes it."""
        peer = self._peers[rank]
        with self._lock:
            if peer.gone:
                return
            peer.queue(kind, payload)
            left = bool(peer.leaving)
        if left:
            self._wake_up()

    def tell_all(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame to every other rank."""
        for rank in self._peers:
            self.tell(rank, kind, payload)

    def expect_all(self, until: float | None) -> None:
        """Who has not begun to give signs of life must be there in time, and is not watched until then; None: all are.

        Args:
            until: by ``time.monotonic``.
        """
        now = time.monotonic()
        for peer in self._peers.values():
            peer.heard_at = now
        self._expected_by = until
        self._wake_up()

    def suspect(self, blame: Blame, reporter: int | None = None) -> None:
        """Something is wrong with a rank, or seems to be. Called by any thread; the first counts, unless rank 0 knows
        better."""
        with self._lock:
            if self._suspected is not None:
                return
            self._suspected = Suspicion(blame, reporter, time.monotonic())
        if self._me.rank:
            self.tell(0, Kind.FAULT, packed(blame))
        self._wake_up()

    def fail(self, blame: Blame) -> None:
        """This rank cannot go on. The others know when this returns, as far as their connections take it."""
        if self._me.rank == 0:
            self._decide(blame)
        else:
            self.suspect(blame)

    def close(self) -> None:
        """Tell the others that this rank has done its part, and stop watching them once they know."""
        self.tell_all(Kind.BYE)
        end = time.monotonic() + self._limits.parting
        with self._board.changed:
            while self._board.fault is None and not all(peer.knows or peer.gone for peer in self._peers.values()):
                if (left := end - time.monotonic()) <= 0:
                    break
                self._board.changed.wait(left)
        self._over = True
        self._wake_up()
        self._thread.join()
        for peer in self._peers.values():
            peer.sock.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _wake_up(self) -> None:
        # Where there is no room, enough is there to wake it.
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        try:
            self._go_round()
        except Exception as e:
            # A thread that dies would look like a rank that is silent.
            self._decide(Blame(self._me.rank, f"its thread of signs broke: {one_line(e)}"))

    def _go_round(self) -> None:
        last = beat = time.monotonic()
        while not self._over:
            for key, _ in self._selector.select(self._pause(beat)):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._serve(key.data, self._peers[key.data])
            now = time.monotonic()
            if now - last > self._limits.beat + LATE_S:
                for peer in self._peers.values():
                    peer.heard_at = now
            last = now
            if now >= beat:
                beat = now + self._limits.beat
                self._beat()
            if self._board.fault is None and not self._board.closing:
                self._judge(now)

    def _pause(self, beat: float) -> float:
        """Seconds until there is something to do; connections with bytes that could not leave are watched for room."""
        until = beat
        with self._lock:
            for rank, peer in self._peers.items():
                if not peer.gone:
                    writing = selectors.EVENT_WRITE if peer.leaving else 0
                    self._selector.modify(peer.sock, selectors.EVENT_READ | writing, rank)
                    if peer.ended_at is None:
                        until = min(until, peer.heard_at + self._limits.silence + 0.01)
            if self._suspected is not None:
                until = min(until, self._suspected.since + self._patience + 0.01)
        # What is overdue already is judged once a beat, where nothing came of it.
        left = until - time.monotonic()
        return left if left > 0 else (0.0 if until == beat else 0.05)

    @property
    def _patience(self) -> float:
        return self._limits.verdict if self._me.rank else self._limits.report

    def _serve(self, rank: int, peer: Peer) -> None:
        with self._lock:
            peer.flush()
        why = self._received(rank, peer)
        if why is None:
            return
        with self._lock:
            peer.gone = True
            self._selector.unregister(peer.sock)
        if peer.ended_at is None and not self._board.closing:
            self._sure(Blame(rank, why))
        self._board.notify()

    def _received(self, rank: int, peer: Peer) -> str | None:
        """Take what has come from a rank; why nothing more will come, or None."""
        try:
            while data := peer.sock.recv(1 << 18):
                peer.heard_at = time.monotonic()
                for frame in peer.parser.feed(data):
                    self._take(rank, peer, frame)
            return GONE
        except BlockingIOError:
            return None
        except (FrameError, struct.error, ValueError, TypeError) as e:
            return one_line(e)
        except OSError as e:
            return broke(e)

    def _take(self, rank: int, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.BEAT:
            peer.sign, peer.beats = Sign.unpacked(frame.payload), True
        elif frame.kind == Kind.BYE:
            peer.ended_at = time.monotonic()
            self.tell(rank, Kind.SEEN)
        elif frame.kind == Kind.SEEN:
            peer.knows = True
            self._board.notify()
        elif frame.kind == Kind.FAULT:
            self.suspect(unpacked(frame.payload, self._me.size), rank)
        elif frame.kind == Kind.VERDICT:
            if rank == 0:
                self._decide(unpacked(frame.payload, self._me.size))
        else:
            self._heard(rank, frame)

    def _beat(self) -> None:
        self._board.movement.look()
        self.tell_all(Kind.BEAT, self._board.movement.sign().packed())
        if (reason := self._alone()) is not None:
            self.suspect(Blame(self._me.rank, reason))

    def _judge(self, now: float) -> None:
        watched = {rank: peer for rank, peer in self._peers.items() if peer.ended_at is None and not peer.gone}
        wait, signs = self._board.movement.wait, {rank: peer.sign for rank, peer in watched.items()}
        quiet_s = self._board.movement.quiet_s
        # Who has not begun to give signs has until ``expected_by``.
        signing = {r: p for r, p in watched.items() if self._expected_by is None or p.beats}
        heard = {rank: peer.heard_at for rank, peer in signing.items()}
        if (blame := silent(self._me.rank, self._me.names, heard, now, self._limits.silence)) is not None:
            self._sure(blame)
        if self._expected_by is not None and now > self._expected_by and wait is not None:
            self._sure(Blame(wait.rank, f"was not ready within {self._limits.start:.3g} s of the start"))
        elif wait is not None and (ended := self._peers[wait.rank].ended_at) is not None:
            if not wait.due and now - max(ended, wait.since) > OVERDUE_S:
                self.suspect(self._left_early(wait.rank))
        elif (blame := stuck(self._me.rank, wait, signs, now, self._limits.stall, quiet_s)) is not None:
            self.suspect(blame)
        if self._suspected is not None and now - self._suspected.since > self._patience:
            blame = self._suspected.blame
            left = blame.what == GONE and blame.rank in self._peers and self._peers[blame.rank].ended_at is not None
            self._decide(self._left_early(blame.rank) if left else blame)

    def _left_early(self, rank: int) -> Blame:
        return Blame(rank, "has ended, while others wait for it")

    def _sure(self, blame: Blame) -> None:
        """What the connection of signs shows needs no second opinion, where there is nobody to ask."""
        if self._me.rank == 0 or blame.rank == 0:
            # Who reports another one and is gone then has ended because of it.
            told = self._suspected
            self._decide(told.blame if told is not None and told.reporter == blame.rank else blame)
        else:
            self.suspect(blame)

    def _decide(self, blame: Blame) -> None:
        if self._board.fault is not None or self._board.closing:
            return
        if self._me.rank == 0:
            self.tell_all(Kind.VERDICT, packed(blame))
        error = LinkError(f"{self._me.who(blame.rank)}: {blame.what}", blame.rank)
        self._board.fail(error)
        self._failed(error)
