"""A request's body, from bytes to a JSON object: bounded in size, depth and number of values before it is believed."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from ..text import one_line
from .exchange import RequestError
from .limits import Limits

__all__ = ["Bodies", "parsed"]

BOM = b"\xef\xbb\xbf"

MAYBE_ENDLESS = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{200}")
"""Without these no number is too large for a float."""


class Bodies:
    """Reads bodies, of which only so many bytes are held at a time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held_bytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body; an empty one where there is none.

        Raises:
            RequestError: 413 where it is too large, 415 where it is compressed, 503 where too much is being read, 400.
            ClientDisconnect: the client has gone.
        """
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError("a compressed body is not understood: send it as it is", status=415)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.limits.body_bytes:
            raise self._too_large()
        data = bytearray()
        with self._held() as more:
            async for chunk in request.stream():
                if len(data) + len(chunk) > self.limits.body_bytes:
                    raise self._too_large()
                more(len(chunk))
                data += chunk
            return parsed(bytes(data), self.limits)

    @contextmanager
    def _held(self) -> Iterator[Any]:
        taken = 0

        def more(nbytes: int) -> None:
            nonlocal taken
            if self.held_bytes + nbytes > self.limits.all_bodies_bytes:
                raise RequestError("too many large requests are being read", "overloaded", status=503, retry_after=1)
            self.held_bytes += nbytes
            taken += nbytes

        try:
            yield more
        finally:
            self.held_bytes -= taken

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self.limits.body_bytes} bytes, the most that is taken here (--max-body)",
            "request_too_large",
            status=413,
        )


def parsed(data: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object that some bytes say; an empty one if there are none.

    Raises:
        RequestError: it is none, holds NaN, infinity or text that is not UTF-8 (400), or is too large (413).
    """
    data = data.removeprefix(BOM)
    if not data.strip():
        return {}
    # Each of them costs 60 bytes or more, from 2 bytes of the body, and time in which nobody else is heard.
    if sum(map(data.count, (b",", b"[", b"{"))) > limits.values:
        raise RequestError(f"the body holds more than {limits.values} values", "request_too_large", status=413)
    try:
        with _no_collection():
            value = from_json(data, allow_inf_nan=False)
    except ValueError as e:
        raise RequestError(f"the body is not JSON in UTF-8: {one_line(e)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python looking, again and again, whether a million new lists are garbage."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
