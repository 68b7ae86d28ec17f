"""OpenAI's responses, none of which is kept: what their bodies ask, with items as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..checks import COUNT
from .api import HttpRequest, ParsedRequest, Route
from .events import GenerationRequest, Service
from .openai import (
    TEXT,
    Effort,
    Format,
    Message,
    OpenAIBody,
    Tokens,
    called,
    chosen_tool,
    continues,
    conversation,
    schema_of,
    texts,
)
from .requests import MOST_TOOLS, UNSUPPORTED, Function, Part, TopLogprobs, read, wrong
from .response_items import INPUT, Known, ResponseObjectWriter

LOGPROBS = "message.output_text.logprobs"


class Item(Part):
    """An item of the conversation, of whatever type."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Any = None
    summary: list[Any] = []
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""
    input: str = ""
    output: Any = None


class ToolFormat(Part):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


class Tool(Part):
    """A tool, or a namespace of tools."""

    type: str
    name: str = ""
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    format: ToolFormat | None = None
    tools: list[Tool] | None = None


class Reasoning(Part):
    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


class TextOptions(Part):
    format: Format | None = None
    verbosity: Any = None


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseBody(OpenAIBody):
    """A response."""

    refused = {"background": (False,), "moderation": ()}
    silent = OpenAIBody.silent | {"stream_options"}

    input: Annotated[list[Item], Field(min_length=1), BeforeValidator(_items)]
    instructions: str = ""
    tools: list[Tool] = []
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


@dataclass
class Tools:
    """The tools of a request.

    Attributes:
        functions: as ``GenerationRequest.tools``. ``known``: what each of them stands for, by its name.
        unused: where those stand that this server does not have.
    """

    functions: list[Mapping[str, Any]] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def add(self, tools: Sequence[Tool], where: str = "tools", namespace: str = "") -> None:
        """More of them, of the request or of a namespace."""
        for i, tool in enumerate(tools):
            at = f"{where}[{i}]"
            if tool.type == "namespace" and not namespace:
                if not tool.name or tool.tools is None:
                    raise wrong(f"{at}.tools", "a name, and a list of tools, are needed")
                self.add(tool.tools, f"{at}.tools", tool.name)
            elif tool.type in ("function", "custom"):
                self._function(tool, at, namespace)
            else:  # OpenAI runs it, or its own models were trained on it; Codex offers some of them to every model
                self.unused.append(f"{at} {tool.type}")

    def _function(self, tool: Tool, at: str, namespace: str) -> None:
        known = Known(tool.name, tool.type == "custom", namespace)
        if not 1 <= len(tool.name) <= 256:
            raise wrong(f"{at}.name", "a name of at most 256 characters is needed")
        if known.function in self.known:
            raise wrong(f"{at}.name", "there is another tool of this name")
        if len(self.functions) >= MOST_TOOLS:
            raise wrong("tools", f"more than {MOST_TOOLS}")
        self.known[known.function] = known
        description, parameters = tool.description, tool.parameters
        if known.custom:
            # It takes any text, as one argument; a grammar for it is described, not enforced.
            if tool.format is not None and tool.format.type == "grammar":
                description += f"\n\nThe input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
            parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        function = Function(name=tool.name, description=description, parameters=parameters, strict=tool.strict)
        self.functions.append(function.tool(name=known.function))


def respond(request: HttpRequest, service: Service) -> ParsedRequest:
    """``/v1/responses``."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if request.body.get(name) is not None:
            raise wrong(name, "nothing is kept here; send the whole conversation as input", UNSUPPORTED)
    body, tools = read(ResponseBody, request.body), Tools()
    tools.add(body.tools)
    messages = messages_of(body.instructions, body.input)
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = choice | {"type": "function"}
    ask = GenerationRequest(
        model=body.model,
        messages=messages,
        continued=continues(messages, "input"),
        tools=tuple(tools.functions),
        tool_choice=chosen_tool(choice, tools.known),
        parallel_tools=body.parallel_tool_calls,
        template_options=body.options(request.defaults, body.reasoning.effort),
        max_tokens=request.defaults.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
        sampling=body.sampling(request.defaults.sampling),
        logprobs=(body.top_logprobs or 0) if body.top_logprobs or LOGPROBS in body.include else None,
        schema=schema_of(body.text.format, "text.format"),
    )
    unused = [*tools.unused, *(f"include {name}" for name in body.include if name != LOGPROBS)]
    unused += ["text.verbosity"] * (body.text.verbosity is not None) + ["truncation"] * (body.truncation == "auto")
    writer = ResponseObjectWriter(body.stream, body.ignored(*unused))
    writer.tools, writer.echoed, writer.logprobs = tools.known, _echoed(request.body, ask), ask.logprobs is not None
    writer.summary = bool(body.reasoning.summary or body.reasoning.generate_summary)
    return ParsedRequest((ask,), writer)


def messages_of(instructions: str, items: Sequence[Item]) -> tuple[Message, ...]:
    """The messages that instructions and items come to: thoughts, text and calls of one turn are one message."""
    found: list[Message] = []

    def turn(*before: str) -> Message:
        """The assistant's message that an item belongs to: a new one if the last has one of these already."""
        if not found or found[-1]["role"] != "assistant" or any(found[-1].get(name) for name in before):
            found.append({"role": "assistant", "content": ""})
        return found[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item.type == "message" and item.role is not None:
            empty = item.role == "assistant" and item.content == []
            text = "" if empty else "".join(texts(item.content, f"{where}.content", TEXT))
            if item.role == "assistant":
                turn("content", "tool_calls")["content"] = text
            else:
                found.append({"role": "user" if item.role == "user" else "system", "content": text})
        elif item.type == "reasoning":
            turn("content", "tool_calls").setdefault("reasoning_content", []).append(_thought(item, where))
        elif item.type in ("function_call", "custom_tool_call"):
            custom = item.type == "custom_tool_call"
            if not item.name:
                raise wrong(f"{where}.name", "the name of the tool is needed")
            name = Known(item.name, custom, item.namespace).function
            arguments = json.dumps({INPUT: item.input}) if custom else item.arguments
            turn().setdefault("tool_calls", []).append(called(item.call_id, name, arguments, where))
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            output = "".join(texts(item.output, f"{where}.output", TEXT))
            found.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        elif item.type == "message":
            raise wrong(f"{where}.role", "user, assistant, system or developer is needed")
        else:
            raise wrong(f"{where}.type", "items of this type are not supported", UNSUPPORTED)
    for message in found:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    first = [{"role": "system", "content": instructions}] if instructions else []
    # Templates that take a system message in front only would refuse the whole conversation from then on.
    made = enumerate(conversation([*first, *found]))
    return tuple(m | {"role": "user"} if m["role"] == "system" and i else m for i, m in made)


def _thought(item: Item, where: str) -> str:
    """What was thought, whole if it is there, or its summary."""
    for name, parts, kind in (("content", item.content, "reasoning_text"), ("summary", item.summary, "summary_text")):
        if parts not in (None, []):
            if not isinstance(parts, list):
                raise wrong(f"{where}.{name}", "a list is needed")
            return "".join(texts(parts, f"{where}.{name}", (kind,)))
    return ""


def _echoed(body: Mapping[str, Any], ask: GenerationRequest) -> dict[str, Any]:
    """What the response tells of its request."""
    given = {
        name: body.get(name) for name in ("instructions", "max_tool_calls", "prompt_cache_key", "safety_identifier")
    }
    return given | {
        "background": False,
        "frequency_penalty": ask.sampling.frequency_penalty,
        "max_output_tokens": ask.max_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": ask.parallel_tools,
        "presence_penalty": ask.sampling.presence_penalty,
        "previous_response_id": None,
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": ask.sampling.temperature,
        "text": {"format": {"type": "text"}} | (body.get("text") or {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in body.get("tools") or []],
        "top_logprobs": ask.logprobs or 0,
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the response tells it: with all that the schema of a function has."""
    if tool["type"] == "function":
        given = {name: value for name, value in tool.items() if value is not None}
        return {"description": None, "parameters": None, "strict": False} | given
    if tool["type"] == "namespace":
        return {"description": ""} | tool | {"tools": [_tool(inner) for inner in tool["tools"]]}
    return tool


ROUTES = tuple(
    Route(path, respond, "POST", "Answer items and messages", ResponseBody) for path in ("/v1/responses", "/responses")
)
