"""A request's body, from bytes to a JSON object: bounded in size, depth and number of values before it is believed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from ..text import one_line
from .exchange import RequestError
from .limits import ClientLimits
from .off_loop import LARGE, off_loop
from .slow_json import decoded, too_many

__all__ = ["Bodies", "HeldBody", "parsed"]

BOM = b"\xef\xbb\xbf"

MAYBE_ENDLESS = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{200}")
"""Without these no number is too large for a float."""


class Bodies:
    """Reads bodies, of which only so many bytes are held at a time."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """What one request's body takes, from its first byte on."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            held.release()


class HeldBody:
    """A request's body, whose bytes count until the request needs it no more: it is answered, or has its prompt.

    Attributes:
        received: bytes that came. ``nbytes``: those of them that count.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.nbytes = self.received = 0

    @property
    def large(self) -> bool:
        """Whether what is done with it is done off the event loop."""
        return self.received > LARGE

    def release(self) -> None:
        """Count it no more. Safe to call twice."""
        self._bodies.held_bytes -= self.nbytes
        self.nbytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body; an empty one where there is none.

        Raises:
            RequestError: 413 where it is too large, 415 where it is compressed, 503 where too much is held, 400.
            ClientDisconnect: the client has gone.
        """
        limits = self._bodies.limits
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError("a compressed body is not understood: send it as it is", status=415)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
            raise _too_large(limits)
        data = bytearray()
        async for chunk in request.stream():
            if len(data) + len(chunk) > limits.body_bytes:
                raise _too_large(limits)
            self._take(len(chunk))
            data += chunk
        return await off_loop(parsed, data, limits) if self.large else parsed(data, limits)

    def _take(self, nbytes: int) -> None:
        if self._bodies.held_bytes + nbytes > self._bodies.limits.all_bodies_bytes:
            why = "too many large requests are being read, or wait for their answers"
            raise RequestError(why, "overloaded", status=503, retry_after=1)
        self._bodies.held_bytes += nbytes
        self.nbytes += nbytes
        self.received += nbytes


def _too_large(limits: ClientLimits) -> RequestError:
    return RequestError(
        f"the body is larger than {limits.body_bytes} bytes, the most that is taken here",
        "request_too_large",
        status=413,
    )


def parsed(data: bytes | bytearray, limits: ClientLimits) -> dict[str, Any]:
    """The JSON object that some bytes say; an empty one if there are none.

    Raises:
        RequestError: it is none, holds NaN, infinity or text that is not UTF-8 (400), or is too large (413).
    """
    if data.startswith(BOM):
        data = data[len(BOM) :]
    if not data.strip():
        return {}
    large = len(data) > LARGE
    # Each of them costs 60 bytes or more, from 2 bytes of the body.
    if not large and sum(map(data.count, (b",", b"[", b"{"))) > limits.values:
        raise too_many(limits.values)
    try:
        value = decoded(data.decode(), limits.depth, limits.values) if large else from_json(data, allow_inf_nan=False)
    except RequestError:
        raise
    except ValueError as e:
        raise RequestError(f"the body is not JSON in UTF-8: {one_line(e)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    if not large:
        _check(value, limits.depth, finite=MAYBE_ENDLESS.search(data) is None)
    return value


def _check(value: Mapping[str, Any], depth: int, finite: bool) -> None:
    """Refuse what is too deep or infinite, level by level, so that no depth is too much for it."""
    level: list[Any] = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for container in level:
            held = container.values() if isinstance(container, dict) else container
            inner += [v for v in held if isinstance(v, dict | list)]
            if not finite and any(isinstance(v, float) and math.isinf(v) for v in held):
                raise RequestError("the body holds a number that is too large")
        if not inner:
            return
        level = inner
    raise RequestError(f"the body has more than {depth} brackets inside each other")
