"""A request's body, from bytes to a JSON object: bounded in size, depth and number of values before it is believed.

pydantic reads JSON at 50 MB a second and more and keeps Python's lock meanwhile, so the size that is taken by default
(``ClientLimits.body_bytes``) bounds how long others are not heard. Bodies of more than ``LARGE`` bytes are read and
translated in a thread, which lets others in between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from ..text import one_line
from .events import RequestError

if TYPE_CHECKING:
    from .site import Site

R = TypeVar("R")

LARGE = 1 << 16
"""Bytes of a body from which on it is read in a thread."""

DEPTH = 100
"""Brackets within brackets: templates and grammars go through them recursively."""

BOM = b"\xef\xbb\xbf"


class HeldBody:
    """A request's body, whose bytes count against the limit of all bodies until ``release``.

    Attributes:
        nbytes: that count now. ``received``: that came.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.nbytes = self.received = 0

    def release(self) -> None:
        """Count it no more: the request is answered, or has its prompt. Safe to call twice."""
        self._site.held_bytes -= self.nbytes
        self.nbytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body; an empty one if there is none.

        Raises:
            RequestError: 413 if it is too large, 415 if compressed, 503 if too much is held, 400 if it is not JSON.
            ClientDisconnect: the client has gone.
        """
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("a compressed body is not understood: send it as it is", status=415)
        site, most, data = self._site, self._site.limits.body_bytes, bytearray()
        declared = request.headers.get("content-length", "")
        large = RequestError(f"the body is larger than {most} bytes", "request_too_large", status=413)
        if declared.isdecimal() and int(declared[:20]) > most:
            raise large
        async for chunk in request.stream():
            if len(data) + len(chunk) > most:
                raise large
            if site.held_bytes + len(chunk) > 4 * most:
                why = "too many large requests are being read, or wait for their answers"
                raise RequestError(why, "overloaded", status=503, retry_after=1)
            site.held_bytes += len(chunk)
            self.nbytes += len(chunk)
            self.received += len(chunk)
            data += chunk
        return await self.work(read_json, data, site.limits.values)

    async def work(self, work: Callable[..., R], *args: Any) -> R:
        """What some work with the body returns or raises; in a thread if the body is large."""
        return await asyncio.to_thread(work, *args) if self.received > LARGE else work(*args)


def read_json(data: bytes | bytearray, values: int | None = None) -> dict[str, Any]:
    """The JSON object that some bytes say: of whole characters and finite numbers, at most ``DEPTH`` deep. An empty one
    if there are none.

    Args:
        values: at most, by its commas and brackets, of which a text may have some too; None: any number.

    Raises:
        RequestError: it is none (400), or has too many values (413).
    """
    data = data.removeprefix(BOM)
    if not data.strip():
        return {}
    if values is not None and sum(map(data.count, (b",", b"[", b"{"))) > values:
        raise RequestError(f"the body has more than {values} commas and brackets", "request_too_large", status=413)
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as e:
        raise RequestError(f"the body is not JSON in UTF-8: {one_line(e)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    # Level by level, so that no depth is too much.
    level: list[Any] = [value]
    for _ in range(DEPTH):
        held = [v for inner in level for v in (inner.values() if isinstance(inner, dict) else inner)]
        if any(type(v) is float and math.isinf(v) for v in held):
            raise RequestError("the body holds a number that is too large")
        level = [v for v in held if type(v) in (dict, list)]
        if not level:
            return value
    raise RequestError(f"the body has more than {DEPTH} brackets inside each other")
