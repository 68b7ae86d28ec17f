"""The routes of this package: the page at ``/``, a chat with a live view of the server, and ``/metrics`` in
Prometheus's format."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from outcore.monitoring.publisher import board
from outcore.serve.api import EVENT_STREAM, server_sent
from outcore.serve.events import Event, Finished
from outcore.serve.site import Observer, Site

EVENTS = "/monitor/events"
PART = "/page/{name:path}"
# Files of the page that browsers look for at these addresses; the last is where an open tab of llama.cpp's page does.
AT_ROOT = ("/manifest.webmanifest", "/sw.js", "/_app/version.json")


def routes(site: Site) -> Sequence[Route]:
    counted = ServerMetrics(site)
    site.observers.append(counted)

    async def front(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):  # programs that probe for a server send */*
            return page(known=request.headers.get("if-none-match", ""))
        return PlainTextResponse("Outcore is running", headers={"Vary": "Accept"})

    async def part(request: Request) -> Response:
        name = request.path_params.get("name") or PurePosixPath(request.url.path).name
        return page(name, request.headers.get("if-none-match", ""))

    async def metrics(_: Request) -> Response:
        return counted.response()

    watched = Events(board.snapshot, lambda: site.closing).response
    answers = {"/": front, PART: part, EVENTS: watched, "/metrics": metrics}
    answers |= dict.fromkeys(AT_ROOT, part)
    return [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]


FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

STATE = {
    "running": "Answers being generated",
    "waiting": "Answers waiting to start",
    "memory_held_bytes": "Bytes that MLX holds, cached memory included, as the budget counts them",
    "memory_peak_bytes": "Peak of outcore_memory_held_bytes",
}
OF_MODELS = {
    "memory_bytes": "Bytes of a loaded model's plan",
    "sweeps": "Forward passes",
    "bytes_read": "Bytes of weights read from disk",
    "tokens": "Tokens generated",
    "drafted": "Tokens proposed by the drafter",
    "accepted": "Proposed tokens that were accepted",
}
OF_CONNECTIONS = {
    "turned_away": "Connections refused at the limit",
    "dropped": "Connections closed to make room for others",
    "late": "Connections closed because of a time-out",
}


class ServerMetrics(Collector, Observer):
    def __init__(self, site: Site) -> None:
        self._site, self._registry = site, CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("outcore_requests", "Requests answered", ("route", "status"), **own)
        self._prompt_tokens = Counter("outcore_prompt_tokens", "Tokens of answered prompts", **own)
        self._cached_tokens = Counter("outcore_prompt_tokens_cached", "Cached tokens of answered prompts", **own)
        text = "Seconds from a request to the first text of its answer"
        self._first_token = Histogram("outcore_first_token_seconds", text, buckets=FIRST_TOKEN_S, **own)
        self._registry.register(self)

    def responded(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def happened(self, event: Event, first_s: float | None) -> None:
        if first_s is not None:
            self._first_token.observe(first_s)
        if isinstance(event, Finished):
            self._prompt_tokens.inc(event.prompt_tokens)
            self._cached_tokens.inc(event.cached_tokens)

    def response(self) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterable[Metric]:
        state = self._site.service.state()
        for name, text in STATE.items():
            if name in state:
                yield GaugeMetricFamily(f"outcore_{name}", text, state[name])
        for name, text in OF_CONNECTIONS.items():
            yield CounterMetricFamily(f"outcore_connections_{name}", text, getattr(self._site, name))
        for name, text in OF_MODELS.items():
            kind = GaugeMetricFamily if name == "memory_bytes" else CounterMetricFamily
            family = kind(f"outcore_{name}", text, labels=["model"])
            for model, counters in state.get("models", {}).items():
                family.add_metric([model], counters[name])
            yield family


EVERY_S = 0.25


TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".md": "text/plain", ".txt": "text/plain",
         ".json": "application/json", ".webmanifest": "application/manifest+json"}  # fmt: skip
HEADERS = {
    # Only the page's own files and requests to its own server. Text becomes elements through DOMPurify or not at all.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # of links in answers, whose names would tell what is said
}


@cache
def contents() -> dict[str, tuple[bytes, str]]:
    """The page's files by their paths, each with its ETag."""
    folder = Path(__file__).with_name("page")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.suffix in TYPES}
    return {name: (data, f'"{hashlib.sha256(data).hexdigest()[:32]}"') for name, data in found.items()}


def page(name: str = "page.html", known: str = "") -> Response:
    """A file of the page; nothing but its ETag for a browser that says it knows that one."""
    if name not in contents():
        raise HTTPException(404)
    data, tag = contents()[name]
    # Names of libraries have their versions.
    cached = "public, max-age=31536000, immutable" if name.startswith("vendor/") else "no-cache"
    headers = HEADERS | {"Cache-Control": cached, "ETag": tag, "Vary": "Accept"}
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=TYPES[PurePosixPath(name).suffix], headers=headers)


class Events:
    """Sends snapshots as server-sent events; all clients share one snapshot.

    Args:
        snapshot: returns the server's state; must not block.
        closing: returns whether the server shuts down, which ends the streams.
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
