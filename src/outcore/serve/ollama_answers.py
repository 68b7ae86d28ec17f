"""Answers and errors of Ollama's API: lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from .api import JSON_LINES, ResponseWriter, decoded, encoded
from .events import Begun, Called, Ended, Event, Finished, RequestError, TextPart, TokenLogprob
from .openai_answers import logprob_entries


def timestamp(at: datetime) -> str:
    """RFC 3339 in UTC, with microseconds."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaWriter(ResponseWriter):
    """Writes an answer as lines of JSON or as one object.

    Args:
        chat: of a chat, else of a completion.
        model: its name as the client gave it.
        clock: seconds, of which the whole time that an answer took is made.
    """

    media_type = JSON_LINES

    def __init__(
        self, streams: bool, ignored: Sequence[str] = (), *, chat: bool, model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(streams, ignored)
        self._chat, self._model, self._clock, self._start = chat, model, clock, clock()
        self._begun, self._reason = Begun(model, 0), "stop"

    def event(self, event: Event) -> bytes:
        record = self._record(event)
        return encoded(record) + b"\n" if record else b""

    def failed(self, error: RequestError) -> bytes:
        return encoded(error_body(error)) + b"\n"

    def keepalive(self) -> bytes:
        """A record without text: clients parse every line, an empty one too."""
        return encoded(self._part()) + b"\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The last record, with all that those before it said."""
        pieces = [e for e in events if isinstance(e, TextPart)]
        calls = [_call(e) for e in events if isinstance(e, Called)]
        last: dict[str, Any] = {}
        for event in events:
            if not isinstance(event, TextPart | Called):
                last = self._record(event) or last
        text, thinking = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        return last | self._part(text, thinking, calls, [token for p in pieces for token in p.logprobs], done=True)

    def _record(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Begun():
                self._begun = event
            case TextPart():
                return self._part(event.text, event.reasoning, logprobs=event.logprobs)
            case Called():
                return self._part(calls=[_call(event)])
            case Ended():
                self._reason = "length" if event.reason == "length" else "stop"
            case Finished():
                return self._part(done=True) | self._figures(event)
        return None

    def _part(
        self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[TokenLogprob] = (), done: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        said: dict[str, Any] = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = list(calls)
        record: dict[str, Any] = {"model": self._model or self._begun.model, "created_at": timestamp(datetime.now(UTC))}
        record |= {"message": said} if self._chat else said
        if logprobs:
            record["logprobs"] = logprob_entries(logprobs)
        return record | {"done": done}

    def _figures(self, finished: Finished) -> dict[str, Any]:
        """Nanoseconds and tokens. What the cache had of the prompt counts to it."""
        seconds = {"total": self._clock() - self._start, "load": self._begun.load_s,
                   "prompt_eval": finished.prompt_s, "eval": finished.generation_s}  # fmt: skip
        return {
            "done_reason": self._reason,
            **{f"{name}_duration": round(value * 1e9) for name, value in seconds.items()},
            "prompt_eval_count": finished.prompt_tokens,
            "eval_count": finished.tokens,
        }


def _call(called: Called) -> dict[str, Any]:
    function = {"index": called.number, "name": called.name, "arguments": decoded(called.arguments)}
    return {"id": called.id, "function": function}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error as the API tells it."""
    return {"error": str(error)}
