"""What an API is to the HTTP application: a table of routes, and the words that its errors are told in.

A route reads a request and says what is to be done: either a ``ParsedRequest``, which a model answers, or a JSON value
(or an awaitable of one), which is the answer. A ``ResponseWriter`` turns the events of a model's answer into bytes.
"""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from .events import Event, GenerationRequest, RequestError, Sampling, Service

JSON, EVENT_STREAM, JSON_LINES = "application/json", "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True)
class Defaults:
    """The server's flags, which hold where a request does not say otherwise.

    Attributes:
        max_tokens: of an answer; None: the engine's own.
        template_options: arguments of the chat template, such as ``enable_thinking``; a request's come on top.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpRequest:
    """A request whose body has been read.

    Attributes:
        body: a JSON object, as ``body.read_json`` gives it; empty if there was no body.
        params: of the path.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = Defaults()


class ResponseWriter(ABC):
    """Writes one answer: a stream of bytes, event by event, or one JSON body of all events.

    Args:
        streams: events are sent as they come.
        ignored: names of the request's fields that have no effect; a header of the response carries them.
    """

    media_type = EVENT_STREAM
    """Of a stream."""

    def __init__(self, streams: bool, ignored: Sequence[str] = ()) -> None:
        self.streams, self.ignored = streams, tuple(ignored)

    @abstractmethod
    def event(self, event: Event) -> bytes:
        """What a stream sends for an event; may be empty."""

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The body of an answer that does not stream."""

    @abstractmethod
    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that fails after something was sent."""

    def closing(self) -> bytes:
        """What a stream sends after the last event."""
        return b""

    def keepalive(self) -> bytes:
        """What a stream sends when nothing was sent for long; clients pass over it."""
        return b": keepalive\n\n"


@dataclass(frozen=True)
class ParsedRequest:
    """What a model is asked, and how its answer is written.

    Attributes:
        asks: one, or several whose choices follow each other in one answer.
    """

    asks: tuple[GenerationRequest, ...]
    answering: ResponseWriter


Handled = ParsedRequest | Awaitable[Any] | dict[str, Any]


@dataclass(frozen=True)
class Route:
    """An address.

    Attributes:
        path: in Starlette's form: ``/v1/models/{model:path}``.
        handle: reads the request and says what is to be done; raises nothing but RequestError, whatever the body is.
            It runs in a thread if the body is large.
        summary, body: for ``/openapi.json``.
    """

    path: str
    handle: Callable[[HttpRequest, Service], Handled]
    method: str = "GET"
    summary: str = ""
    body: type[BaseModel] | None = None


@dataclass(frozen=True)
class Api:
    """A family of addresses whose errors look alike.

    Attributes:
        header: a request that has it means this family, if two have the same path.
    """

    name: str
    error_body: Callable[[RequestError], dict[str, Any]]
    routes: tuple[Route, ...] = ()
    header: str | None = None


def refused(path: str, why: str, method: str = "POST") -> Route:
    """An address that clients ask and that is not supported, with the reason."""

    def handle(request: HttpRequest, service: Service) -> Handled:
        raise RequestError(f"{path} is not supported: {why}", "not_implemented", status=501)

    return Route(path, handle, method, "Refused, with its reason")


def encoded(value: Any) -> bytes:
    """Compact JSON in UTF-8, without a line break."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write: JSON can say it and UTF-8 cannot
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decoded(arguments: str) -> dict[str, Any]:
    """The arguments of a call that a model wrote, as an object that ``encoded`` can write: a number that no float or
    int holds becomes text."""

    def real(digits: str) -> float | str:
        return value if math.isfinite(value := float(digits)) else digits

    def whole(digits: str) -> int | str:
        return int(digits) if len(digits) <= sys.int_info.str_digits_check_threshold else digits

    found: dict[str, Any] = json.loads(arguments, parse_constant=str, parse_float=real, parse_int=whole)
    return found


def server_sent(value: Any, event: str = "") -> bytes:
    """A server-sent event with this JSON as its data, and this name."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encoded(value) + b"\n\n"
