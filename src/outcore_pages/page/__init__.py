"""The page at ``/``: a live view of the server, and a chat box.

The page loads nothing else, and shows a model's text only as text. Snapshots come as server-sent events from
``/monitor/events``; they are taken only while a page is open.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outcore.serve.api import EVENT_STREAM, server_sent

EVENTS = "/monitor/events"

EVERY_S = 0.25


@cache
def page() -> Response:
    """The page, with a policy that allows only its own script, its own style and requests to its own server."""
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    allowed = {}
    for kind in ("script", "style"):
        (inside,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        allowed[kind] = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed['script']}'; style-src 'sha256-{allowed['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Vary": "Accept",
    }
    return Response(html, media_type="text/html", headers=headers)


class Events:
    """Snapshots as server-sent events, one for all that look.

    Args:
        snapshot: what the server does now; must not wait for anything.
        closing: whether the server ends.
    """

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]], closing: Callable[[], bool]) -> None:
        self._snapshot, self._closing = snapshot, closing
        self._taken, self._event = 0.0, b""

    async def response(self, request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type=EVENT_STREAM, headers={"Cache-Control": "no-cache"})

    async def _stream(self) -> AsyncIterator[bytes]:
        while not self._closing():
            now = asyncio.get_running_loop().time()
            if not self._event or now - self._taken >= EVERY_S / 2:
                self._taken, self._event = now, server_sent(self._snapshot())
            yield self._event
            await asyncio.sleep(EVERY_S)
