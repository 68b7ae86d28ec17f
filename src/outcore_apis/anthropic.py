"""Anthropic's Messages API; an answer is a sequence of content blocks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from outcore.checks import COUNT
from outcore.errors import RequestError
from outcore.serve import requests
from outcore.serve.api import Defaults, HttpRequest, ParsedRequest, ResponseWriter, Route, counted, new_id
from outcore.serve.events import Begun, Called, Ended, Event, Finished, GenerationRequest, ModelCard, TextPart

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip

# Signature of thinking blocks. It is not checked, but some clients drop thinking without one.
SIGNATURE = "unsigned"


class ContentBlock(requests.Part):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Any = ""
    is_error: bool = False

    def plain(self, where: str, *, opaque: bool = False) -> Any:
        return requests.part_of(self.model_dump(exclude_unset=True), where, ("text",), opaque=opaque)


class MessageParam(requests.Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[ContentBlock], BeforeValidator(lambda v: [{"type": "text", "text": v}] if isinstance(v, str) else v)
    ]


class AnthropicTool(requests.Function):
    type: str = "custom"
    input_schema: requests.Parameters | None = None


class ToolChoice(requests.Part):
    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(requests.Part):
    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(requests.Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(requests.Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptBody(requests.Body):
    refused = {"mcp_servers": ([],), "container": ("",)}

    model: str = ""
    system: Any = ""
    messages: list[MessageParam]
    tools: Annotated[list[AnthropicTool], Field(max_length=requests.MOST_TOOLS)] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None


class MessageBody(PromptBody, requests.SamplerFields):
    stream: bool = False
    max_tokens: Annotated[int, Field(ge=1, le=COUNT)]
    stop_sequences: requests.Stops = ()


def message(http: HttpRequest) -> ParsedRequest:
    body = requests.read(MessageBody, http.body)
    sampling = requests.sampling_of(body, http.defaults.sampling)
    request = _prompt(body, http.defaults)
    request = replace(request, max_tokens=body.max_tokens, sampling=sampling, stop=body.stop_sequences)
    shows = body.thinking is None or body.thinking.display != "omitted"
    return ParsedRequest(
        (request,), MessageWriter(body.stream, body.ignored(), stop=request.stop, shows_thinking=shows)
    )


def count(http: HttpRequest) -> Awaitable[dict[str, Any]]:
    return counted(http, _prompt(requests.read(PromptBody, http.body), http.defaults))


def _prompt(body: PromptBody, defaults: Defaults) -> GenerationRequest:
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    form, messages = body.output_config.format or body.output_format, _conversation(body)
    if (choice := body.tool_choice).type == "tool" and choice.name in ("", "auto", "none", "required"):
        raise requests.wrong("tool_choice.name", "the name of one of the tools is needed")
    return GenerationRequest(
        model=body.model,
        messages=tuple(messages),
        continued=messages[-1]["role"] == "assistant",
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)),
        tool_choice=TOOL_CHOICES.get(choice.type, choice.name),
        parallel_tools=not choice.disable_parallel_tool_use,
        template_options=defaults.options(thinks, body.output_config.effort),
        max_tokens=defaults.max_tokens,
        sampling=defaults.sampling,
        form=None if form is None else form.schema_,
    )


def _tool(tool: AnthropicTool, where: str) -> dict[str, Any]:
    if tool.type != "custom":
        why = "Anthropic's own tools are not supported; define a tool with a name and an input_schema"
        raise requests.wrong(f"{where}.type", why, requests.UNSUPPORTED)
    if tool.input_schema is None:
        raise requests.wrong(f"{where}.input_schema", "a JSON schema is needed")
    return tool.tool(parameters=tool.input_schema)


def _conversation(body: PromptBody) -> list[requests.Message]:
    """The messages in the form of chat templates; the last is the assistant's only if the answer continues it."""
    turns: list[requests.Message] = []
    if body.system not in ("", []):
        turns.append({"role": "system", "content": requests.text_of(body.system, "system", ("text",), "\n\n")})
    begun = False  # a message that is not the system's was seen
    for i, turn in enumerate(body.messages):
        where = f"messages[{i}].content"
        if turn.role == "system":
            text = "\n\n".join(block.plain(f"{where}[{n}]") for n, block in enumerate(turn.content))
            # Many templates accept a system message only at the start; a later one becomes the user's, as in clients.
            marked = {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
            turns.append(marked if begun else {"role": "system", "content": text})
            continue
        begun = True
        turns += _user(turn, where) if turn.role == "user" else [_assistant(turn, where)]
    messages = list(requests.conversation(_alternating(turns)))
    if messages[-1:] == [{"role": "assistant", "content": ""}]:
        messages.pop()
    if not body.messages:
        messages.append({"role": "user", "content": ""})  # as llama.cpp: the answer is to the system prompt alone
    if all(message["role"] == "system" for message in messages):
        raise requests.wrong("messages", "at least one message of the user is needed")
    return messages


def _alternating(turns: Sequence[requests.Message]) -> list[requests.Message]:
    """Joins consecutive messages of one role, since many templates require alternating roles."""
    messages: list[requests.Message] = []
    for role, group in itertools.groupby(turns, lambda turn: str(turn["role"])):
        same = list(group)
        if role == "tool" or len(same) == 1:
            messages += same
            continue
        made: requests.Message = {"role": role}
        for name in ("content", "reasoning_content"):
            if any(name in turn for turn in same):
                made[name] = requests.joined([text for turn in same if (text := turn.get(name))], "\n\n")
        if calls := [call for turn in same for call in turn.get("tool_calls", ())]:
            made["tool_calls"] = calls
        messages.append(made)
    return messages


def _user(turn: MessageParam, where: str) -> list[requests.Message]:
    """A user's messages: tool results first, since they belong to the calls before."""
    parts: list[Any] = []
    turns: list[requests.Message] = []
    for i, block in enumerate(turn.content):
        at = f"{where}[{i}]"
        if block.type != "tool_result":
            parts.append(block.plain(at, opaque=True))
            continue
        if not block.tool_use_id:
            raise requests.wrong(f"{at}.tool_use_id", "a string is needed")
        found = block.content or ""
        content, images = result_of(requests.text_of(found, f"{at}.content", ("text",), "\n", opaque=True))
        parts += images
        if block.is_error and not content.lower().startswith("error"):
            content = f"Error: {content}"
        turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    return [*turns, {"role": "user", "content": requests.joined(parts)}] if parts or not turns else turns


def result_of(content: Any) -> tuple[str, list[Any]]:
    """A tool's result as text, and its images, which models read in messages of the user only."""
    if isinstance(content, str):
        return content, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    return "\n".join(texts), [part for part in content if part["type"] != "text"]


def _assistant(turn: MessageParam, where: str) -> requests.Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        if block.type == "tool_use":
            for name in ("input", "name", "id"):
                if getattr(block, name) in (None, ""):
                    raise requests.wrong(f"{where}[{i}].{name}", "is required")
            calls.append(requests.called(block.id, block.name, block.input or {}))
        elif block.type not in ("thinking", "redacted_thinking"):
            texts.append(block.plain(f"{where}[{i}]"))
    made: requests.Message = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(block.thinking for block in turn.content):
        made["reasoning_content"] = thought
    return made | ({"tool_calls": calls} if calls else {})


class MessageWriter(ResponseWriter):
    """Writes an answer as a stream of events or as one message.

    Args:
        stop: the request's stop sequences; other stop strings are reported as ``end_turn``.
        shows_thinking: thinking blocks contain the text.
    """

    named = True

    def __init__(
        self, streams: bool, ignored: Sequence[str] = (), *, stop: Sequence[str] = (), shows_thinking: bool = True
    ) -> None:
        super().__init__(streams, ignored)
        self._stop, self._shows_thinking = stop, shows_thinking
        self._message: dict[str, Any] = {}
        self._open = False  # the last block is not closed
        self._end = Ended(0, "stop", 0)

    def closing(self) -> bytes:
        return self.sent([{"type": "message_stop"}])

    def keepalive(self) -> bytes:
        # Clients expect message_start as the first event; before it a comment is sent.
        return self.sent([{"type": "ping"}]) if self._message else super().keepalive()

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            for _ in self.steps(event):
                pass
        return self._message

    def steps(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._message = {
                    "id": new_id("msg_"), "type": "message", "role": "assistant", "model": event.model, "content": [],
                    "stop_reason": None, "stop_sequence": None,
                    "usage": _usage(Finished(event.prompt_tokens, 0, event.cached_tokens)),
                }  # fmt: skip
                yield {"type": "message_start", "message": self._message}
                yield {"type": "ping"}
            case TextPart():
                if event.reasoning:
                    shown = event.reasoning if self._shows_thinking else ""
                    yield from self._grow("thinking", shown, "thinking_delta", {"signature": ""})
                if event.text:
                    yield from self._grow("text", event.text, "text_delta")
            case Called():
                yield from self._close()
                yield self._opened({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
                self._message["content"][-1]["input"] = json.loads(event.arguments)
                yield from self._close()
            case Ended():
                self._end = event
                if not self._message["content"]:  # clients assume that there is a first block
                    yield from self._grow("text", "", "text_delta")
                yield from self._close()
            case Finished():
                own = self._end.reason == "stop" and self._end.stop in self._stop
                delta = {"stop_reason": "stop_sequence" if own else REASONS[self._end.reason],
                         "stop_sequence": self._end.stop if own else None}  # fmt: skip
                self._message |= delta | {"usage": _usage(event)}
                yield {"type": "message_delta", "delta": delta, "usage": self._message["usage"]}

    def _grow(self, kind: str, text: str, delta: str, more: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        if not self._open or self._message["content"][-1]["type"] != kind:
            yield from self._close()
            yield self._opened({"type": kind, kind: "", **(more or {})})
        if text:
            if not self.streams:
                self._message["content"][-1][kind] += text
            yield self._delta({"type": delta, kind: text})

    def _opened(self, block: dict[str, Any]) -> dict[str, Any]:
        self._message["content"].append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self._message["content"]) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._message["content"]) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        self._open, block = False, self._message["content"][-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": len(self._message["content"]) - 1}


def _usage(of: Finished) -> dict[str, Any]:
    """``input_tokens`` counts only computed tokens; cached ones are ``cache_read_input_tokens``."""
    usage: dict[str, Any] = {
        "input_tokens": of.prompt_tokens - of.cached_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": of.cached_tokens, "output_tokens": of.tokens,
    }  # fmt: skip
    return usage | ({"output_tokens_details": {"thinking_tokens": of.reasoning_tokens}} if of.reasoning_tokens else {})


def error_body(error: RequestError) -> dict[str, Any]:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def models(http: HttpRequest) -> dict[str, Any]:
    found = [_model(card) for card in http.service.models()]
    return {"data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}


def model(http: HttpRequest) -> dict[str, Any]:
    return _model(http.service.card(http.params["model"]))


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card.name, "display_name": card.name, "created_at": created, "lifecycle": "active",
            "max_input_tokens": card.context, "max_tokens": card.context}  # fmt: skip


ROUTES = (
    Route("/v1/messages", message, "POST"),
    Route("/v1/messages/count_tokens", count, "POST"),
    Route("/v1/models", models),
    Route("/v1/models/{model:path}", model),
)
