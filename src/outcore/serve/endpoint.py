"""What the HTTP application and the APIs say to each other. An API is a table of these; it knows no HTTP, no engine.

A request that a model answers: its ``Endpoint`` parses it to a ``ParsedRequest``: what the engine is asked (mostly one
``GenerationRequest``), and a ``ResponseWriter``, which turns the events of ``several.answers(service, asked.asks)``
into what is sent. If that streams:

    opening(), event(e) for every event, closing()      keepalive() in between, whenever nothing was sent for long
    failed(error) instead of what is left of them       where a RequestError is raised after something was sent

and else ``whole(events)`` of all of them. A RequestError raised before anything was sent is told by HTTP's status and
``Api.error_body``. Whatever else is asked for (models, versions, counts of tokens) is a ``Route``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from .exchange import Event, GenerationRequest, RequestError, Sampling, Service
from .off_loop import off_loop

__all__ = [
    "EVENT_STREAM",
    "JSON",
    "JSON_LINES",
    "Api",
    "Defaults",
    "Direct",
    "Endpoint",
    "HttpRequest",
    "ParsedRequest",
    "ResponseWriter",
    "Route",
    "decoded",
    "encoded",
    "server_sent",
]  # fmt: skip

T = TypeVar("T")

JSON, EVENT_STREAM, JSON_LINES = "application/json", "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True)
class Defaults:
    """What holds where a request does not say: the server's flags.

    Attributes:
        max_tokens: of an answer; None: the engine's own.
        template_options: arguments of the chat template, such as ``enable_thinking``; a request's come on top.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpRequest:
    """A request that was read whole.

    Attributes:
        body: a JSON object, without NaN or Infinity; empty where there was no body.
        headers: by their names in small letters. ``params``: of the path. ``query``: of the address.
        large: reading it takes long.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = Defaults()
    large: bool = False

    async def read(self, parse: Callable[[HttpRequest], T]) -> T:
        """What the request comes to by ``parse``, which raises what it raises; a large one is read off the loop."""
        return await off_loop(parse, self) if self.large else parse(self)


class ResponseWriter(Protocol):
    """One answer being written. It remembers what it has sent, so it serves one request."""

    @property
    def streams(self) -> bool:
        """Whether events are sent as they come; else ``whole`` is, at the end."""
        ...

    @property
    def media_type(self) -> str:
        """One of ``JSON``, ``EVENT_STREAM``, ``JSON_LINES``."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that are unknown, or say nothing here; a header of the response names them."""
        ...

    def opening(self) -> bytes:
        """What is sent before any event; may be empty."""
        ...

    def event(self, event: Event) -> bytes:
        """What is sent for an event; may be empty."""
        ...

    def closing(self) -> bytes:
        """What is sent after the last event; may be empty."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """How a stream ends that something was sent of already."""
        ...

    def keepalive(self) -> bytes:
        """What clients pass over, so that they and proxies see a connection that lives; may come at any time."""
        ...

    def whole(self, events: Sequence[Event]) -> dict[str, Any] | list[Any]:
        """The body where nothing is streamed."""
        ...


@dataclass(frozen=True)
class ParsedRequest:
    """What a request comes to.

    Attributes:
        asks: one, or several whose choices follow each other in one answer (``several.answers`` makes one of them).
    """

    asks: tuple[GenerationRequest, ...]
    answering: ResponseWriter


@dataclass(frozen=True)
class Direct:
    """What a request comes to that asks for no tokens: Ollama loads a model by an empty prompt.

    Attributes:
        handle: gives the body. Raises RequestError.
    """

    handle: Callable[[Service], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Endpoint:
    """An address that a model answers.

    Attributes:
        path: in Starlette's form.
        parse: raises nothing but RequestError, whatever the body is.
        summary: one line, for the API's description; ``schema``: of the body, in JSON Schema.
    """

    path: str
    parse: Callable[[HttpRequest], ParsedRequest | Direct]
    method: str = "POST"
    summary: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """An address that is answered without generating.

    Attributes:
        path: in Starlette's form: ``/v1/models/{model:path}``.
        handle: gives the body. Raises RequestError.
    """

    path: str
    handle: Callable[[HttpRequest, Service], Awaitable[dict[str, Any] | list[Any]]]
    method: str = "GET"
    summary: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Api:
    """A family of addresses whose errors look alike.

    Attributes:
        header: where two families have the same path, that of which a request has this header is asked.
    """

    name: str
    error_body: Callable[[RequestError], dict[str, Any]]
    endpoints: tuple[Endpoint, ...] = ()
    routes: tuple[Route, ...] = ()
    header: str | None = None


def refused(path: str, why: str, method: str = "POST") -> Route:
    """An address that clients ask, and that nothing here answers: told with its reason."""

    async def handle(request: HttpRequest, service: Service) -> dict[str, Any]:
        raise RequestError(f"{path} is not supported: {why}", "not_implemented", status=501)

    return Route(path, handle, method, "Refused, with its reason")


def encoded(value: Any) -> bytes:
    """Compact JSON in UTF-8, without a line break."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say and UTF-8 cannot
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decoded(arguments: str) -> dict[str, Any]:
    """The object that a model wrote, so that ``encoded`` can write it: numbers that are none to all become text."""
    found: dict[str, Any] = json.loads(arguments, parse_constant=str, parse_float=_finite, parse_int=_short)
    return found


def _finite(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def _short(digits: str) -> int | str:
    return int(digits) if len(digits) <= sys.int_info.str_digits_check_threshold else digits


def server_sent(value: Any, event: str = "") -> bytes:
    """A server-sent event with this JSON as its data, and this name."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encoded(value) + b"\n\n"
