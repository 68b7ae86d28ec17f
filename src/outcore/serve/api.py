"""What an API consists of: a table of routes and the form of its errors.

A route's handler returns a ``ParsedRequest`` if a model is to answer; otherwise the answer itself, as JSON; or an
awaitable of either. A ``ResponseWriter`` turns the events of a model's answer into JSON.
"""

from __future__ import annotations

import json
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

# OpenAI's value for minus infinity, which JSON cannot express.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Defaults:
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def options(self, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
        """The template options with a request's ``thinks`` (whether to reason) and ``effort`` where not None."""
        options = dict(self.template_options)
        if thinks is not None:
            options["enable_thinking"] = thinks
        if effort is not None:
            options["reasoning_effort"] = effort if effort in ("low", "medium") else "high"
        return options


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request after its body was read; ``params`` are those of the path."""

    service: ModelService
    body: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = Defaults()


class ResponseWriter(ABC):
    """Writes one answer, as a stream of JSON objects or as one object.

    Args:
        streams: send each event as it comes.
        ignored: names of request fields that have no effect; a response header lists them.

    Attributes:
        media_type: of the stream.
        named: each object's ``type`` is also the name of its server-sent event.
    """

    media_type, named = EVENT_STREAM, False

    def __init__(self, streams: bool, ignored: Sequence[str] = ()) -> None:
        self.streams, self.ignored = streams, tuple(ignored)

    @abstractmethod
    def steps(self, event: Event) -> Iterable[Any]:
        """The JSON objects that a stream sends for an event."""

    def failure(self, error: RequestError, body: dict[str, Any]) -> Iterable[Any]:
        """The last objects of a stream that fails after it began; ``body`` is the API's form of the error."""
        return (body,)

    @abstractmethod
    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The JSON object of an answer that is not streamed."""

    def sent(self, steps: Iterable[Any]) -> bytes:
        return b"".join(server_sent(step, step["type"] if self.named else "") for step in steps)

    def closing(self) -> bytes:
        """The bytes after a stream's last event."""
        return b""

    def keepalive(self) -> bytes:
        """The bytes that a stream sends when it was silent for long; clients skip them."""
        return b": keepalive\n\n"


@dataclass(frozen=True)
class ParsedRequest:
    """Requests to the model, and the writer of the one answer that has all their choices."""

    requests: tuple[GenerationRequest, ...]
    writer: ResponseWriter


async def counted(http: HttpRequest, request: GenerationRequest) -> dict[str, Any]:
    return {"input_tokens": len((await http.service.prompt(request)).tokens)}


Handled = ParsedRequest | Awaitable[Any] | dict[str, Any]


@dataclass(frozen=True)
class Route:
    """An address.

    Attributes:
        path: in Starlette's form: ``/v1/models/{model:path}``.
        handle: raises only RequestError, whatever the body is. Runs in another thread if the body is large.
    """

    path: str
    handle: Callable[[HttpRequest], Handled]
    method: str = "GET"


@dataclass(frozen=True)
class Api:
    """Routes that share a form of errors; where two APIs have the same path, ``header`` selects this one."""

    name: str
    error_body: Callable[[RequestError], dict[str, Any]]
    routes: tuple[Route, ...] = ()
    header: str | None = None


def refused(path: str, why: str, method: str = "POST", status: int = 501) -> Route:
    """A route that clients know and that answers with a reason; they may try again if the status is 500 or more."""

    def handle(http: HttpRequest) -> Handled:
        raise RequestError(f"{path} is not supported: {why}", "not_implemented", status=status)

    return Route(path, handle, method)


@dataclass
class WholeChoice:
    parts: list[TextPart] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    reason: str = "stop"

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.reasoning for part in self.parts)


class Whole:
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
    """Log-probabilities in the form that OpenAI's chats and responses and Ollama share."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}

    tokens = [token for part in parts for token in part.logprobs]
    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]


def finite(logprob: float) -> float:
    """The log-probability, or ``LEAST_LOGPROB`` for one that JSON cannot express."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def encoded(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape it
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def server_sent(value: Any, event: str = "") -> bytes:
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encoded(value) + b"\n\n"
