"""Frames: what goes over a connection once both sides have proven who they are.

    magic 4 | kind 1 | reserved 3 | sequence 8 | length 8 | payload

Big-endian. The sequence counts the frames of one direction of a connection from 0 on: TCP keeps their order, so a gap
is an error of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"OCLF"
_HEADER = struct.Struct("!4sB3xQQ")
HEADER_BYTES = _HEADER.size
MOST_CONTROL = 1 << 28
"""Payload bytes of a control frame: what ranks agree on is a request at most."""


class Kind(IntEnum):
    """What a frame is."""

    DATA = 1
    BEAT = 2
    AGREE = 3
    GATHER = 4
    GATHERED = 5
    FAULT = 6
    """To rank 0: whose fault it seems to be."""
    VERDICT = 7
    """From rank 0: whose fault it is."""
    BYE = 8
    """This rank's part is done."""
    SEEN = 9
    """So is noted."""


class FrameError(ValueError):
    """Bytes that are no frame, or not the next one."""


@dataclass(frozen=True)
class Frame:
    """A control frame."""

    kind: Kind
    payload: bytes


def header(kind: Kind, sequence: int, length: int) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(MAGIC, kind, sequence, length)


def opened(data: bytes, sequence: int) -> tuple[Kind, int]:
    """Kind and length of the frame whose header this is.

    Raises:
        FrameError: it is none, or not the one that comes next.
    """
    magic, kind, number, length = _HEADER.unpack(data)
    if magic != MAGIC or kind not in Kind.__members__.values():
        raise FrameError("bytes that are no frame")
    if number != sequence:
        raise FrameError(f"frame {number} where {sequence} was next")
    return Kind(kind), length


class FrameParser:
    """Control frames out of bytes as they come."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._sequence = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes complete.

        Raises:
            FrameError: they are none.
        """
        self._held += data
        while len(self._held) >= HEADER_BYTES:
            kind, length = opened(bytes(self._held[:HEADER_BYTES]), self._sequence)
            if length > MOST_CONTROL or kind == Kind.DATA:
                raise FrameError(f"a control frame of {length} bytes, kind {kind.name}")
            end = HEADER_BYTES + length
            if len(self._held) < end:
                return
            payload = bytes(self._held[HEADER_BYTES:end])
            del self._held[:end]
            self._sequence += 1
            yield Frame(kind, payload)
