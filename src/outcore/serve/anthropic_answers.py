"""Answers and errors of Anthropic's Messages API: content blocks that open, grow and close."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .api import ResponseWriter, decoded, server_sent
from .events import Begun, Called, Ended, Event, Finished, RequestError, TextPart
from .openai_answers import new_id

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

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


class MessageWriter(ResponseWriter):
    """Writes an answer as a stream of events or as one message.

    Args:
        stop: the request's stop sequences; an answer that ends at another string has ended its turn.
        shows_thinking: what was thought is sent, and not only that something was.
    """

    def __init__(
        self, streams: bool, ignored: Sequence[str] = (), *, stop: Sequence[str] = (), shows_thinking: bool = True
    ) -> None:
        super().__init__(streams, ignored)
        self._stop, self._shows_thinking = stop, shows_thinking
        self._open: str | None = None
        self._blocks, self._begun = 0, False
        self._end = Ended(0, "stop", 0)

    def event(self, event: Event) -> bytes:
        return b"".join(server_sent(e, e["type"]) for e in self._events(event))

    def closing(self) -> bytes:
        return server_sent({"type": "message_stop"}, "message_stop")

    def failed(self, error: RequestError) -> bytes:
        return server_sent(error_body(error), "error")

    def keepalive(self) -> bytes:
        # A client's first event is message_start whatever comes; before it a comment.
        return server_sent({"type": "ping"}, "ping") if self._begun else super().keepalive()

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The message that a client would make of the stream."""
        message: dict[str, Any] = {}
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
                        block["input"] = decoded(delta["partial_json"])
                case "message_delta":
                    message |= sent["delta"]
                    message["usage"] |= sent["usage"]
        return message

    def _events(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._begun = True
                message: dict[str, Any] = {
                    "id": new_id("msg_"), "type": "message", "role": "assistant", "model": event.model, "content": [],
                    "stop_reason": None, "stop_sequence": None,
                    "usage": _usage(Finished(event.prompt_tokens, 0, event.cached_tokens)),
                }  # fmt: skip
                yield {"type": "message_start", "message": message}
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
                    yield from self._part("text", {})
                yield from self._closed()
            case Finished():
                own = self._end.reason == "stop" and self._end.stop in self._stop
                delta = {"stop_reason": "stop_sequence" if own else REASONS[self._end.reason],
                         "stop_sequence": self._end.stop if own else None}  # fmt: skip
                yield {"type": "message_delta", "delta": delta, "usage": _usage(event)}

    def _part(self, kind: str, delta: dict[str, Any], start: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
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
