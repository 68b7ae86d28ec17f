"""What an API is to the HTTP application: a table of routes, and the words that its errors are told in.

A route reads a request and says what is to be done: either a ``ParsedRequest``, which a model answers, or a JSON value
(or an awaitable of one), which is the answer. A ``ResponseWriter`` turns the events of a model's answer into JSON. To
add an API is to write a module with an ``Api``, and to name it in ``apis``.
"""

from __future__ import annotations

import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from .events import (
    Begun,
    Called,
    Ended,
    Event,
    Finished,
    GenerationRequest,
    RequestError,
    Sampling,
    TextPart,
    TokenLogprob,
)

if TYPE_CHECKING:
    from .service import ModelService

EVENT_STREAM, JSON_LINES = "text/event-stream", "application/x-ndjson"

LEAST_LOGPROB = -9999.0
"""OpenAI's number for what is as good as impossible; JSON has no infinity."""


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

    def options(self, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """Those arguments, and whether and how hard a model is to think; None: the request does not say."""
        options = dict(self.template_options)
        if thinks is not None:
            options["enable_thinking"] = thinks
        if effort is not None:
            options["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
        return options


@dataclass(frozen=True)
class HttpRequest:
    """A request whose body has been read.

    Attributes:
        service: that answers; its lists, cards and state never wait for the engine.
        body: a JSON object, as ``body.read_json`` gives it; empty if there was no body.
        params: of the path.
    """

    service: ModelService
    body: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = Defaults()


class ResponseWriter(ABC):
    """Writes one answer: a stream of JSON objects, event by event, or one of all events.

    Args:
        streams: events are sent as they come.
        ignored: names of the request's fields that have no effect; a header of the response carries them.

    Attributes:
        media_type: of a stream. ``named``: the type of each of its objects is the name of its event, too.
    """

    media_type, named = EVENT_STREAM, False

    def __init__(self, streams: bool, ignored: Sequence[str] = ()) -> None:
        self.streams, self.ignored = streams, tuple(ignored)

    @abstractmethod
    def steps(self, event: Event) -> Iterable[Any]:
        """What a stream sends for an event."""

    def failure(self, error: RequestError, told: dict[str, Any]) -> Iterable[Any]:
        """The end of a stream that fails after something was sent; ``told``: the error in the API's words."""
        return (told,)

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The body of an answer that does not stream."""

    def sent(self, steps: Iterable[Any]) -> bytes:
        """Objects as they go over the wire."""
        return b"".join(server_sent(step, step["type"] if self.named else "") for step in steps)

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

    requests: tuple[GenerationRequest, ...]
    writer: ResponseWriter


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
    handle: Callable[[HttpRequest], Handled]
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

    def handle(request: HttpRequest) -> Handled:
        raise RequestError(f"{path} is not supported: {why}", "not_implemented", status=501)

    return Route(path, handle, method, "Refused, with its reason")


@dataclass
class WholeChoice:
    """A whole choice."""

    parts: list[TextPart] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    reason: str = "stop"

    @property
    def text(self) -> str:
        """Of the answer; ``reasoning``: what was thought before it."""
        return "".join(part.text for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.reasoning for part in self.parts)


class Whole:
    """A whole answer, put together from its events."""

    def __init__(self, events: Iterable[Event], choices: int = 1) -> None:
        self.begun, self.finished = Begun("", 0), Finished(0, 0)
        self.choices = [WholeChoice() for _ in range(choices)]
        for event in events:
            match event:
                case Begun():
                    self.begun = event
                case TextPart():
                    self.choices[event.index].parts.append(event)
                case Called():
                    self.choices[event.index].calls.append(event)
                case Ended():
                    self.choices[event.index].reason = event.reason
                case Finished():
                    self.finished = event


def logprob_entries(parts: Iterable[TextPart]) -> list[dict[str, Any]]:
    """Tokens as OpenAI's chats and responses, and Ollama, tell them."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}

    tokens = [token for part in parts for token in part.logprobs]
    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


def encoded(value: Any) -> bytes:
    """Compact JSON in UTF-8, without a line break."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write: JSON can say it and UTF-8 cannot
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def server_sent(value: Any, event: str = "") -> bytes:
    """A server-sent event with this JSON as its data, and this name."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encoded(value) + b"\n\n"
