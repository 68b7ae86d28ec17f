"""What is known of a rank at the other end of a control connection, and what is said of ranks at fault."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

from outcore.text import one_line

from .frames import FrameError, FrameParser, Kind, header
from .movement import Sign
from .watch import Blame


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
