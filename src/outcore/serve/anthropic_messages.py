"""Anthropic's Messages API: ``/v1/messages``, ``/v1/messages/count_tokens`` and its list of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from .anthropic_request import asked, prompt
from .endpoint import EVENT_STREAM, JSON, Api, Endpoint, HttpRequest, ParsedRequest, Route, decoded, server_sent
from .exchange import Begun, Called, Ended, Event, Finished, ModelCard, RequestError, Service, TextPart
from .fields import Fields
from .openai_fields import new_id

__all__ = ["API", "Message", "error_body"]

ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip

SIGNATURE = "unsigned"
"""Of what was thought. Nobody checks it here, but some clients send back no thinking without one."""

STARTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class Message:
    """An answer, as a stream of events or as one message.

    Args:
        stop: the request's stop sequences; the end of an answer at another string is an end of its turn.
        shows_thinking: whether what was thought is sent, or only that something was.
    """

    def __init__(
        self, *, streams: bool, stop: Sequence[str] = (), shows_thinking: bool = True, ignored: Sequence[str] = ()
    ) -> None:
        self._streams, self._stop, self._shows_thinking, self._ignored = streams, stop, shows_thinking, tuple(ignored)
        self._id = new_id("msg_")
        self._open: str | None = None
        self._blocks = 0
        self._begun = False
        self._end: Ended | None = None

    @property
    def streams(self) -> bool:
        return self._streams

    @property
    def media_type(self) -> str:
        return EVENT_STREAM if self._streams else JSON

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._ignored

    def opening(self) -> bytes:
        """Nothing: the first event has the prompt's tokens, which are not known yet."""
        return b""

    def event(self, event: Event) -> bytes:
        return b"".join(server_sent(e, e["type"]) for e in self._events(event))

    def closing(self) -> bytes:
        return server_sent({"type": "message_stop"}, "message_stop")

    def failed(self, error: RequestError) -> bytes:
        return server_sent(error_body(error), "error")

    def keepalive(self) -> bytes:
        """A ping; before the first event, which is ``message_start`` whatever comes, a comment."""
        return server_sent({"type": "ping"}, "ping") if self._begun else b": keepalive\n\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The message that a client would make of the stream."""
        message: dict[str, Any] = {}
        inputs: dict[int, str] = {}
        for sent in (e for event in events for e in self._events(event)):
            match sent["type"]:
                case "message_start":
                    message = sent["message"]
                case "content_block_start":
                    message["content"].append(dict(sent["content_block"]))
                case "content_block_delta":
                    block, delta = message["content"][sent["index"]], sent["delta"]
                    for name in ("text", "thinking", "signature"):
                        if name in delta:
                            block[name] += delta[name]
                    if "partial_json" in delta:
                        inputs[sent["index"]] = delta["partial_json"]
                case "message_delta":
                    message |= sent["delta"]
                    message["usage"] |= sent["usage"]
        for index, text in inputs.items():
            message["content"][index]["input"] = decoded(text)
        return message

    def _events(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._begun = True
                yield {"type": "message_start", "message": self._start(event)}
                yield {"type": "ping"}
            case TextPart():
                if event.reasoning:
                    shown = event.reasoning if self._shows_thinking else ""
                    yield from self._part("thinking", {"type": "thinking_delta", "thinking": shown})
                if event.text:
                    yield from self._part("text", {"type": "text_delta", "text": event.text})
            case Called():
                start = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                yield from self._part("tool_use", {"type": "input_json_delta", "partial_json": event.arguments}, start)
                yield from self._closed()
            case Ended():
                self._end = event
                if not self._blocks:  # clients take the first block without looking whether there is one
                    yield from self._part("text", None)
                yield from self._closed()
            case Finished():
                yield {"type": "message_delta", "delta": self._delta(), "usage": _usage(event)}

    def _part(
        self, kind: str, delta: dict[str, Any] | None, start: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._closed()
            self._open, self._blocks = kind, self._blocks + 1
            yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": start or STARTS[kind]}
        if delta and delta.get("thinking") != "":
            yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        index = self._blocks - 1
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        self._open = None
        yield {"type": "content_block_stop", "index": index}

    def _start(self, begun: Begun) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": begun.model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": _usage(Finished(begun.prompt_tokens, 0, begun.cached_tokens)),
        }  # fmt: skip

    def _delta(self) -> dict[str, Any]:
        end = self._end or Ended(0, "stop", 0)
        if end.reason == "stop" and end.stop in self._stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons[end.reason], "stop_sequence": None}


def _usage(of: Finished) -> dict[str, Any]:
    """Tokens of the prompt are those that were computed, plus those that were cached."""
    usage: dict[str, Any] = {
        "input_tokens": of.prompt_tokens - of.cached_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": of.cached_tokens, "output_tokens": of.tokens,
    }  # fmt: skip
    return usage | ({"output_tokens_details": {"thinking_tokens": of.reasoning_tokens}} if of.reasoning_tokens else {})


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as the API tells it; its type follows from the status."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _messages(request: HttpRequest) -> ParsedRequest:
    fields = Fields(request.body)
    streams = fields.flag("stream")
    ask, shown = asked(fields, request.defaults)
    thinking = fields.inner("thinking")
    budget = thinking is not None and thinking.take("budget_tokens") is not None
    ignored = fields.unused(*(["thinking.budget_tokens"] if budget else []))
    message = Message(streams=streams, stop=ask.stop, shows_thinking=shown, ignored=ignored)
    return ParsedRequest((ask,), message)


async def _count(request: HttpRequest, service: Service) -> dict[str, Any]:
    ask = await request.read(lambda request: prompt(Fields(request.body), request.defaults)[0])
    return {"input_tokens": await service.count(ask)}


async def _models(request: HttpRequest, service: Service) -> dict[str, Any]:
    models = [_model(card) for card in service.models()]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"data": models, "has_more": False, **ends}


async def _one_model(request: HttpRequest, service: Service) -> dict[str, Any]:
    return _model(service.card(request.params.get("model", "")))


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card.name, "display_name": card.name, "created_at": created, "lifecycle": "active",
            "max_input_tokens": card.context, "max_tokens": card.context}  # fmt: skip


API = Api(
    "anthropic",
    error_body,
    endpoints=(Endpoint("/v1/messages", _messages, summary="Answer a conversation"),),
    routes=(
        Route("/v1/messages/count_tokens", _count, "POST", "Count the tokens of a prompt"),
        Route("/v1/models", _models, summary="List the models"),
        Route("/v1/models/{model:path}", _one_model, summary="One of the models"),
    ),
    header="anthropic-version",
)  # fmt: skip
