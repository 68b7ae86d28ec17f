"""An answer as OpenAI's responses: items that open, grow and close, each step an event with a number."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .api import ResponseWriter, server_sent
from .events import Begun, Called, Ended, Event, Finished, RequestError, TextPart
from .openai_answers import logprob_entries, new_id

INPUT = "input"
"""The one argument of a custom tool's function."""


@dataclass(frozen=True)
class Known:
    """What a function of the chat template stands for: a function or a custom tool, of a namespace or none."""

    name: str
    custom: bool = False
    namespace: str = ""

    @property
    def function(self) -> str:
        """The name that the model sees."""
        return f"{self.namespace.rstrip('_')}__{self.name}" if self.namespace else self.name


@dataclass
class OpenItem:
    """An item of text that grows: of the answer, of what is thought, or of that as its summary."""

    item: dict[str, Any]
    part: Literal["output_text", "reasoning_text", "summary_text"]
    index: int
    text: str = ""
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

    def said(self) -> dict[str, Any]:
        """The part."""
        more = {"annotations": [], "logprobs": self.logprobs} if self.part == "output_text" else {}
        return {"type": self.part, "text": self.text, **more}


class ResponseObjectWriter(ResponseWriter):
    """Writes one response, as it grows or whole.

    Attributes:
        echoed: fields of the request that the response tells again.
        tools: what was offered, by the names that the model sees.
        summary: what is thought is told as its summary, which is what most apps show.
        logprobs: they are told.
    """

    def __init__(self, streams: bool, ignored: Sequence[str] = ()) -> None:
        super().__init__(streams, ignored)
        self.echoed: Mapping[str, Any] = {}
        self.tools: Mapping[str, Known] = {}
        self.summary = self.logprobs = False
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": ""}
        self._steps, self._status = 0, "completed"
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._waiting: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not come
        self._usage: dict[str, Any] | None = None

    def event(self, event: Event) -> bytes:
        return b"".join(server_sent(step, step["type"]) for step in self._steps_of(event))

    def failed(self, error: RequestError) -> bytes:
        steps = [] if self._steps else list(self._begin())
        # OpenAI's codes; and the one beside them by which Codex knows that it has to shorten a conversation.
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        code = error.code if error.code == "context_length_exceeded" else code
        failure = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        steps.append(self._step("failed", response=failure))
        return b"".join(server_sent(step, step["type"]) for step in steps)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            for _ in self._steps_of(event):
                pass
        return self._response(self._status)

    def _step(self, kind: str, **more: Any) -> dict[str, Any]:
        self._steps += 1
        kind = kind if kind.startswith("response.") else f"response.{kind}"
        return {"type": kind, "sequence_number": self._steps - 1, **more}

    def _steps_of(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._head["model"] = event.model
                yield from self._begin()
            case TextPart():
                if event.reasoning:
                    yield from self._grow("summary_text" if self.summary else "reasoning_text", event.reasoning)
                if self.logprobs and (event.text or not event.reasoning):
                    self._waiting += logprob_entries(event.logprobs)
                if event.text:
                    yield from self._grow("output_text", event.text)
            case Called():
                yield from self._close()
                yield from self._call(event)
            case Ended():
                self._status = "incomplete" if event.reason == "length" else "completed"
                yield from self._close(self._status)
            case Finished():
                self._usage = _usage(event)
                yield self._step(self._status, response=self._response(self._status))

    def _begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._step(kind, response=self._response("in_progress"))

    def _grow(self, part: Any, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open.part != part:
            yield from self._close()
            item: dict[str, Any] = {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
            if part != "output_text":
                item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
                item |= {"content": []} if part == "reasoning_text" else {}
            self._open = OpenItem(item | {"status": "in_progress"}, part, len(self._output))
            yield self._step("output_item.added", item=self._open.item, output_index=self._open.index)
            yield self._step(f"{self._open.names[0]}.added", part=self._open.said(), **self._open.place)
        open_item, more = self._open, {}
        open_item.text += text
        if part == "output_text":
            more = {"logprobs": self._waiting}
            open_item.logprobs += self._waiting
            self._waiting = []
        yield self._step(f"{open_item.names[1]}.delta", delta=text, **open_item.place, **more)

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open."""
        done, self._open = self._open, None
        if done is None:
            return
        more = {}
        if done.part == "output_text":
            done.logprobs += self._waiting
            self._waiting, more = [], {"logprobs": done.logprobs}
        yield self._step(f"{done.names[1]}.done", text=done.text, **done.place, **more)
        yield self._step(f"{done.names[0]}.done", part=done.said(), **done.place)
        held = "summary" if done.part == "summary_text" else "content"
        yield self._done(done.item | {held: [done.said()], "status": status})

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append(item)
        return self._step("output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: Called) -> Iterator[dict[str, Any]]:
        tool = self.tools.get(call.name, Known(call.name))
        kind, said, prefix = ("custom_tool_call", "input", "ctc_") if tool.custom else (
            "function_call", "arguments", "fc_")  # fmt: skip
        text = _custom_input(call.arguments) if tool.custom else call.arguments
        item: dict[str, Any] = {"id": new_id(prefix), "type": kind, "call_id": call.id, "name": tool.name, said: "",
                                "status": "in_progress"}  # fmt: skip
        item |= {"namespace": tool.namespace} if tool.namespace else {}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._step("output_item.added", output_index=len(self._output), item=item)
        yield self._step(f"{kind}_{said}.delta", delta=text, **place)
        yield self._step(f"{kind}_{said}.done", **{said: text}, **({} if tool.custom else {"name": tool.name}), **place)
        yield self._done(item | {said: text, "status": "completed"})

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self.echoed,
            **self._head,
            "completed_at": int(time.time()) if status in ("completed", "incomplete") else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
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


def _custom_input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments
