"""Reads a request's body into a JSON object of bounded size, depth and number of values.

pydantic parses 50 MB/s or more and holds the GIL meanwhile, so ``ClientLimits.body_bytes`` bounds how long other
requests wait. Bodies of more than ``LARGE`` bytes are parsed and translated in another thread.
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
DEPTH = 100
"""Limit of nesting, since templates and grammars recurse into a body's values."""

BOM = b"\xef\xbb\xbf"


class HeldBody:
    """A request's body; its ``nbytes`` count against the limit of all bodies until ``release``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.nbytes = self.received = 0

    def release(self) -> None:
        self._site.held_bytes -= self.nbytes
        self.nbytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of the body, empty without one.

        Raises:
            RequestError: 413 too large, 415 compressed, 503 too many bytes of bodies are held, 400 not JSON.
            ClientDisconnect: the client disconnected.
        """
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("compressed bodies are not supported: send the body uncompressed", status=415)
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
        """Call ``work``, in another thread if the body is large."""
        return await asyncio.to_thread(work, *args) if self.received > LARGE else work(*args)


def read_json(data: bytes | bytearray, values: int | None = None) -> dict[str, Any]:
    """The JSON object in ``data``, empty if there is none; all numbers are finite.

    Args:
        values: limit of its commas and brackets, those within strings included; None: no limit.

    Raises:
        RequestError: not a JSON object, or nested more than ``DEPTH`` deep (400), or too many values (413).
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
    # Level by level: recursion could exhaust the stack.
    level: list[Any] = [value]
    for _ in range(DEPTH):
        held = [v for inner in level for v in (inner.values() if isinstance(inner, dict) else inner)]
        if any(type(v) is float and math.isinf(v) for v in held):
            raise RequestError("the body holds a number that is too large")
        level = [v for v in held if type(v) in (dict, list)]
        if not level:
            return value
    raise RequestError(f"the body has more than {DEPTH} brackets inside each other")
