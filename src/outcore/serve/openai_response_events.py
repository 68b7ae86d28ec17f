"""An answer as OpenAI's responses: items that open, grow and close, each step an event with a number."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .endpoint import EVENT_STREAM, JSON, server_sent
from .exchange import Begun, Called, Ended, Event, Finished, RequestError, TextPart
from .openai_chunks import COMMENT
from .openai_fields import logprob_entries, new_id
from .openai_response_input import INPUT, Tool

Step = dict[str, Any]


@dataclass
class _OpenItem:
    """An item of text in the making: of the answer, of what is thought, or of that as its summary."""

    item: dict[str, Any]
    part: str
    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        number = "summary_index" if self.part == "summary_text" else "content_index"
        return {"item_id": self.item["id"], "output_index": self.index, number: 0}

    @property
    def names(self) -> tuple[str, str]:
        """What the events of the part, and of its text, begin with."""
        if self.part == "summary_text":
            return "response.reasoning_summary_part", "response.reasoning_summary_text"
        return "response.content_part", f"response.{self.part}"

    def said(self, text: str) -> dict[str, Any]:
        """The part with this text."""
        more = {"annotations": [], "logprobs": self.logprobs} if self.part == "output_text" else {}
        return {"type": self.part, "text": text, **more}


@dataclass
class ResponseAnswer:
    """One answer, which is written as it comes or whole.

    Attributes:
        echoed: fields of the request that the response tells again.
        tools: what was offered, by the names that the model sees.
        summary: what is thought is told as its summary, which is what most apps show.
        logprobs: whether they are told.
    """

    streams: bool = False
    ignored: tuple[str, ...] = ()
    model: str = ""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    summary: bool = False
    logprobs: bool = False
    id: str = field(default_factory=lambda: new_id("resp_"), init=False)
    created: int = field(default_factory=lambda: int(time.time()), init=False)
    _steps: int = field(default=0, init=False)
    _output: list[dict[str, Any]] = field(default_factory=list, init=False)
    _open: _OpenItem | None = field(default=None, init=False)
    _waiting: list[dict[str, Any]] = field(default_factory=list, init=False)
    _cut: bool = field(default=False, init=False)
    _usage: dict[str, Any] | None = field(default=None, init=False)

    @property
    def media_type(self) -> str:
        return EVENT_STREAM if self.streams else JSON

    def opening(self) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        return self._sent(self._steps_of(event))

    def closing(self) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return COMMENT

    def failed(self, error: RequestError) -> bytes:
        return self._sent(self._failure(error))

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            for _ in self._steps_of(event):
                pass
        return self._response(self._status)

    def _sent(self, steps: Iterator[Step]) -> bytes:
        return b"".join(server_sent(step, step["type"]) for step in steps)

    def _step(self, kind: str, **more: Any) -> Step:
        step = {"type": kind, "sequence_number": self._steps, **more}
        self._steps += 1
        return step

    def _steps_of(self, event: Event) -> Iterator[Step]:
        if isinstance(event, Begun):
            self.model = event.model
            yield from self._begin()
        elif isinstance(event, TextPart):
            yield from self._piece(event)
        elif isinstance(event, Called):
            yield from self._close()
            yield from self._called(event)
        elif isinstance(event, Ended):
            self._cut = event.reason == "length"
            yield from self._close("incomplete" if self._cut else "completed")
        else:
            self._usage = _usage(event)
            yield self._step(f"response.{self._status}", response=self._response(self._status))

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _begin(self) -> Iterator[Step]:
        for kind in ("response.created", "response.in_progress"):
            yield self._step(kind, response=self._response("in_progress"))

    def _failure(self, error: RequestError) -> Iterator[Step]:
        if not self._steps:
            yield from self._begin()
        failure = {"error": {"code": _failure_code(error), "message": str(error)}}
        yield self._step("response.failed", response=self._response("failed") | failure)

    def _piece(self, piece: TextPart) -> Iterator[Step]:
        if piece.reasoning:
            yield from self._said("summary_text" if self.summary else "reasoning_text", piece.reasoning)
        if self.logprobs and (piece.text or not piece.reasoning):
            self._waiting += logprob_entries(piece.logprobs)
        if piece.text:
            yield from self._said("output_text", piece.text)

    def _said(self, part: str, text: str) -> Iterator[Step]:
        if self._open is None or self._open.part != part:
            yield from self._close()
            self._open = self._new(part)
            place = {name: value for name, value in self._open.place.items() if name == "output_index"}
            yield self._step("response.output_item.added", item=self._open.item, **place)
            yield self._step(f"{self._open.names[0]}.added", part=self._open.said(""), **self._open.place)
        item = self._open
        item.text.append(text)
        more = {"logprobs": self._waiting} if part == "output_text" else {}
        if more:
            item.logprobs += self._waiting
            self._waiting = []
        yield self._step(f"{item.names[1]}.delta", delta=text, **item.place, **more)

    def _new(self, part: str) -> _OpenItem:
        if part == "output_text":
            item = {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
            item |= {"content": []} if part == "reasoning_text" else {}
        return _OpenItem(item | {"status": "in_progress"}, part, len(self._output))

    def _close(self, status: str = "completed") -> Iterator[Step]:
        """End the item that is open."""
        item, self._open = self._open, None
        if item is None:
            return
        text, more = "".join(item.text), {}
        if item.part == "output_text":
            item.logprobs += self._waiting
            self._waiting = []
            more = {"logprobs": item.logprobs}
        part = item.said(text)
        yield self._step(f"{item.names[1]}.done", text=text, **item.place, **more)
        yield self._step(f"{item.names[0]}.done", part=part, **item.place)
        held = "summary" if item.part == "summary_text" else "content"
        done = item.item | {held: [part], "status": status}
        self._output.append(done)
        yield self._step("response.output_item.done", output_index=item.index, item=done)

    def _called(self, call: Called) -> Iterator[Step]:
        tool, index = self.tools.get(call.name, Tool(call.name)), len(self._output)
        kind, said, events = ("custom_tool_call", "input", "response.custom_tool_call_input") if tool.custom else (
            "function_call", "arguments", "response.function_call_arguments")  # fmt: skip
        text = _custom_input(call.arguments) if tool.custom else call.arguments
        item: dict[str, Any] = {"id": new_id("ctc_" if tool.custom else "fc_"), "type": kind, "call_id": call.id,
                                "name": tool.name, said: "", "status": "in_progress"}  # fmt: skip
        item |= {"namespace": tool.namespace} if tool.namespace else {}
        place = {"item_id": item["id"], "output_index": index}
        yield self._step("response.output_item.added", output_index=index, item=item)
        yield self._step(f"{events}.delta", delta=text, **place)
        named = {} if tool.custom else {"name": tool.name}
        yield self._step(f"{events}.done", **{said: text}, **named, **place)
        done = item | {said: text, "status": "completed"}
        self._output.append(done)
        yield self._step("response.output_item.done", output_index=index, item=done)

    def _response(self, status: str) -> dict[str, Any]:
        done = status in ("completed", "incomplete")
        return {
            **self.echoed,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(self._output),
            "usage": self._usage,
        }


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.tokens,
    }


def _failure_code(error: RequestError) -> str:
    """One of those of OpenAI's schema; and the one beside them that Codex knows by which to shorten a conversation."""
    if error.code == "context_length_exceeded":
        return error.code
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


def _custom_input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
