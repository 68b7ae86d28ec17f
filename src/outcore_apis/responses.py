"""OpenAI's Responses API without stored responses; an answer is a sequence of items, streamed as numbered events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outcore.checks import COUNT
from outcore.errors import RequestError
from outcore.serve.api import HttpRequest, ParsedRequest, ResponseWriter, Route, logprob_entries, new_id
from outcore.serve.events import Begun, Called, Ended, Event, Finished, GenerationRequest, TextPart
from outcore.serve.openai import Effort, OpenAIBody, ResponseFormat, Tokens, chosen_tool, schema_of
from outcore.serve.requests import Part, TopLogprobs, continues, read, sampling_of

from .response_items import INPUT, Item, ResponseTool, ToolName, Tools, messages_of

LOGPROBS = "message.output_text.logprobs"


class Reasoning(Part):
    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


class TextOptions(Part):
    format: ResponseFormat | None = None
    verbosity: Any = None


Items = Annotated[
    list[Item], Field(min_length=1),
    BeforeValidator(lambda v: [{"role": "user", "content": v}] if isinstance(v, str) else v),
]  # fmt: skip


class ResponseBody(OpenAIBody):
    refused = {
        "background": (False,), "moderation": (), "previous_response_id": (), "conversation": (), "prompt": (),
    }  # fmt: skip
    silent = OpenAIBody.silent | {"stream_options"}

    input: Items
    instructions: str = ""
    tools: list[ResponseTool] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_output_tokens: Tokens | None = None
    max_tool_calls: Annotated[int, Field(ge=0, le=COUNT)] | None = None
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    include: list[str] = []
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] = {}


def respond(http: HttpRequest) -> ParsedRequest:
    body, tools = read(ResponseBody, http.body), Tools()
    tools.add(body.tools)
    messages = messages_of(body.instructions, body.input)
    choice = body.tool_choice
    request = GenerationRequest(
        model=body.model,
        messages=messages,
        continued=continues(messages, "input"),
        tools=tuple(tools.functions),
        tool_choice=chosen_tool(choice),
        parallel_tools=body.parallel_tool_calls,
        template_options=body.options(http.defaults, body.reasoning.effort),
        max_tokens=http.defaults.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
        sampling=sampling_of(body, http.defaults.sampling),
        logprobs=(body.top_logprobs or 0) if body.top_logprobs or LOGPROBS in body.include else None,
        form=schema_of(body.text.format, "text.format"),
    )
    unused = [*tools.unused, *(f"include {name}" for name in body.include if name != LOGPROBS)]
    unused += ["text.verbosity"] * (body.text.verbosity is not None) + ["truncation"] * (body.truncation == "auto")
    return ParsedRequest((request,), ItemsWriter(body, body.ignored(*unused), _echoed(http.body, request), tools.known))


SUMMARIZE = (
    "Summarize this conversation, so that it can go on from the summary alone: facts, names, decisions, open tasks. "
    "Answer with the summary only."
)


class CompactBody(OpenAIBody):
    refused = {"previous_response_id": ()}

    model: str
    input: Items
    instructions: str = ""


def compact(http: HttpRequest) -> ParsedRequest:
    """Lets the model write the summary that stands for a conversation: an item of ``input`` from then on."""
    body = read(CompactBody, http.body)
    request = GenerationRequest(
        model=body.model,
        messages=messages_of(body.instructions, [*body.input, Item(role="user", content=SUMMARIZE)]),
        template_options=body.options(http.defaults, "none"),
        max_tokens=http.defaults.max_tokens,
        sampling=sampling_of(body, http.defaults.sampling),
    )
    return ParsedRequest((request,), SummaryWriter(streams=False, ignored=body.ignored()))


class SummaryWriter(ResponseWriter):
    def steps(self, event: Event) -> tuple[()]:
        return ()

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        text = "".join(event.text for event in events if isinstance(event, TextPart))
        item = {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": text}
        usage = next(_usage(event) for event in events if isinstance(event, Finished))
        head = {"id": new_id("resp_"), "object": "response.compaction", "created_at": int(time.time())}
        return head | {"output": [item], "usage": usage}


def _echoed(body: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
    names = ("instructions", "max_tool_calls", "prompt_cache_key", "safety_identifier")
    return {name: body.get(name) for name in names} | {
        "background": False,
        "frequency_penalty": request.sampling.frequency_penalty,
        "max_output_tokens": request.max_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": request.parallel_tools,
        "presence_penalty": request.sampling.presence_penalty,
        "previous_response_id": None,
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}} | (body.get("text") or {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in body.get("tools") or []],
        "top_logprobs": request.logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the response, with the fields of OpenAI's function schema that the request left out."""
    if tool["type"] == "function":
        given = {name: value for name, value in tool.items() if value is not None}
        return {"description": None, "parameters": None, "strict": False} | given
    if tool["type"] == "namespace":
        return {"description": ""} | tool | {"tools": [_tool(inner) for inner in tool.get("tools") or []]}
    return tool


class ItemsWriter(ResponseWriter):
    """Writes one response as events or as one object.

    Args:
        echoed: fields of the request that the response repeats.
        tools: the request's tools, by the names that the model sees.
    """

    named = True

    def __init__(
        self, body: ResponseBody, ignored: Sequence[str], echoed: Mapping[str, Any], tools: Mapping[str, ToolName]
    ) -> None:
        super().__init__(body.stream, ignored)
        self._echoed, self._tools = echoed, tools
        self._logprobs = body.top_logprobs or LOGPROBS in body.include
        # Most apps show only the summary; where one is requested, it has the whole reasoning.
        self._summary = bool(body.reasoning.summary or body.reasoning.generate_summary)
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": ""}
        self._steps, self._status = 0, "completed"
        self._output: list[dict[str, Any]] = []  # items, the last of which may be open
        self._open: dict[str, Any] | None = None  # the open item's part
        self._waiting: list[dict[str, Any]] = []  # log-probabilities of tokens without text so far
        self._usage: dict[str, Any] | None = None

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            for _ in self.steps(event):
                pass
        return self._response(self._status)

    def failure(self, error: RequestError, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._steps:
            yield from self._begin()
        # OpenAI's codes, and context_length_exceeded, by which Codex knows to shorten the conversation.
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        code = error.code if error.code == "context_length_exceeded" else code
        failed = self._response("failed") | {"error": {"code": code, "message": str(error)}}
        yield self._step("failed", response=failed)

    def steps(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._head["model"] = event.model
                yield from self._begin()
            case TextPart():
                if event.reasoning:
                    yield from self._grow("summary_text" if self._summary else "reasoning_text", event.reasoning)
                if self._logprobs and (event.text or not event.reasoning):
                    self._waiting += logprob_entries([event])
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

    def _step(self, kind: str, **more: Any) -> dict[str, Any]:
        self._steps += 1
        return {"type": f"response.{kind}", "sequence_number": self._steps - 1, **more}

    def _begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._step(kind, response=self._response("in_progress"))

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            item: dict[str, Any] = {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": []}
            if kind != "output_text":
                item = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
                item |= {"content": []} if kind == "reasoning_text" else {}
            yield self._opened(item)
            self._open = {"type": kind, "text": ""}
            self._open |= {"annotations": [], "logprobs": []} if kind == "output_text" else {}
            yield self._step(f"{self._names[0]}.added", part=self._open, **self._place)
        self._open["text"] += text
        more = self._logprobs_so_far()
        yield self._step(f"{self._names[1]}.delta", delta=text, **self._place, **more)

    def _logprobs_so_far(self) -> dict[str, Any]:
        """Moves the waiting log-probabilities to the open part, if that part has them; returns the event's field."""
        if self._open is None or "logprobs" not in self._open:
            return {}
        logprobs, self._waiting = self._waiting, []
        self._open["logprobs"] += logprobs
        return {"logprobs": logprobs}

    @property
    def _names(self) -> tuple[str, str]:
        if self._open is not None and self._open["type"] == "summary_text":
            return "reasoning_summary_part", "reasoning_summary_text"
        return "content_part", str((self._open or {}).get("type"))

    @property
    def _place(self) -> dict[str, Any]:
        number = "summary_index" if self._names[0] == "reasoning_summary_part" else "content_index"
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, number: 0}

    def _opened(self, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append(item | {"status": "in_progress"})
        return self._step("output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _done(self, status: str = "completed", **more: Any) -> dict[str, Any]:
        self._output[-1] |= {"status": status, **more}
        return self._step("output_item.done", output_index=len(self._output) - 1, item=self._output[-1])

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        part, more = self._open, {}
        if self._logprobs_so_far():
            more = {"logprobs": part["logprobs"]}
        yield self._step(f"{self._names[1]}.done", text=part["text"], **self._place, **more)
        yield self._step(f"{self._names[0]}.done", part=part, **self._place)
        held = "summary" if part["type"] == "summary_text" else "content"
        self._open = None
        yield self._done(status, **{held: [part]})

    def _call(self, call: Called) -> Iterator[dict[str, Any]]:
        tool = self._tools.get(call.name, ToolName(call.name))
        kind, field, prefix = ("function_call", "arguments", "fc_")
        text, name = call.arguments, {"name": tool.name}
        if tool.custom:
            kind, field, prefix, text, name = "custom_tool_call", "input", "ctc_", _custom_input(call.arguments), {}
        item = {"id": new_id(prefix), "type": kind, "call_id": call.id, "name": tool.name, field: ""}
        yield self._opened(item | ({"namespace": tool.namespace} if tool.namespace else {}))
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        yield self._step(f"{kind}_{field}.delta", delta=text, **place)
        yield self._step(f"{kind}_{field}.done", **{field: text}, **name, **place)
        yield self._done(**{field: text})

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._echoed,
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
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


ROUTES = tuple(
    Route(f"{root}/responses{path}", handle, "POST")
    for root in ("/v1", "")
    for path, handle in (("", respond), ("/compact", compact))
)
