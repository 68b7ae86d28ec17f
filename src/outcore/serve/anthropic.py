"""Anthropic's Messages API: bodies to what the engine is asked, and its models."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..checks import COUNT
from .anthropic_answers import MessageWriter
from .api import Defaults, HttpRequest, ParsedRequest, Route
from .events import GenerationRequest, ModelCard, Service
from .requests import (
    MOST_TOOLS,
    UNSUPPORTED,
    Body,
    Count,
    Function,
    Part,
    Share,
    Stops,
    Temperature,
    once,
    opaque,
    read,
    sampling_of,
    wrong,
)

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Effort, in the three words that chat templates know."""

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
"""Anthropic's choices of a tool, and ``GenerationRequest``'s."""

Message = dict[str, Any]


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Block(Part):
    """A content block, of whatever type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Blocks = []
    is_error: bool = False


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]
"""Content: a string is one block of text."""


class Turn(Part):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(Function):
    type: str = "custom"
    input_schema: dict[str, Any] | None = None


class ToolChoice(Part):
    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Part):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] = "summarized"
    budget_tokens: Any = None  # no model here keeps to one


class Format(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class Output(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class PromptBody(Body):
    """What is asked, without how it is to be answered."""

    refused = {"mcp_servers": ([],), "container": ("",)}

    model: str = ""
    system: Blocks = []
    messages: list[Turn]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: Output = Output()
    output_format: Format | None = None


class MessageBody(PromptBody):
    """All of a message's body."""

    stream: bool = False
    max_tokens: Annotated[int, Field(ge=1, le=COUNT)]
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    stop_sequences: Stops = ()


def message(request: HttpRequest, service: Service) -> ParsedRequest:
    """``/v1/messages``."""
    body = read(MessageBody, request.body)
    sampling = sampling_of(body, request.defaults.sampling)
    ask = replace(
        _asked(body, request.defaults), max_tokens=body.max_tokens, sampling=sampling, stop=body.stop_sequences
    )
    budget = body.thinking is not None and body.thinking.budget_tokens is not None
    ignored = body.ignored(*(["thinking.budget_tokens"] if budget else []))
    shows = body.thinking is None or body.thinking.display != "omitted"
    return ParsedRequest((ask,), MessageWriter(body.stream, ignored, stop=ask.stop, shows_thinking=shows))


def count(request: HttpRequest, service: Service) -> Awaitable[dict[str, Any]]:
    """``/v1/messages/count_tokens``."""
    ask = _asked(read(PromptBody, request.body), request.defaults)

    async def counted() -> dict[str, Any]:
        return {"input_tokens": await service.count(ask)}

    return counted()


def _asked(body: PromptBody, defaults: Defaults) -> GenerationRequest:
    tools = once([_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)], ".name")
    options = dict(defaults.template_options)
    if body.thinking is not None:
        options["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config.effort is not None:
        options["reasoning_effort"] = EFFORTS[body.output_config.effort]
    form, messages = body.output_config.format or body.output_format, _conversation(body)
    return GenerationRequest(
        model=body.model,
        messages=tuple(messages),
        continued=messages[-1]["role"] == "assistant",
        tools=tools,
        tool_choice=_choice(body.tool_choice, [tool["function"]["name"] for tool in tools]),
        parallel_tools=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        template_options=options,
        max_tokens=defaults.max_tokens,
        sampling=defaults.sampling,
        schema=None if form is None else form.schema_,
    )


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "custom":
        why = "only Anthropic's servers and models know this tool; give a name and an input_schema"
        raise wrong(f"{where}.type", why, UNSUPPORTED)
    if tool.input_schema is None:
        raise wrong(f"{where}.input_schema", "a JSON schema is needed")
    return tool.tool(parameters=tool.input_schema)


def _choice(choice: ToolChoice | None, names: Sequence[str]) -> str:
    """``GenerationRequest.tool_choice``."""
    if choice is None:
        return "auto"
    if choice.type in ("any", "tool") and not names:
        raise wrong("tool_choice", "there are no tools to choose from")
    if choice.type == "tool" and (choice.name not in names or choice.name in CHOICES.values()):
        raise wrong("tool_choice.name", "the name of one of the tools is needed")
    return CHOICES[choice.type] or choice.name


def _conversation(body: PromptBody) -> list[Message]:
    """The messages as chat templates take them; the last is an assistant's only if it is to be continued."""
    turns: list[Message] = []
    if system := _text(body.system, "system", "\n\n"):
        turns.append({"role": "system", "content": system})
    called: dict[str, str] = {}
    begun = False  # with something else than system messages
    for i, turn in enumerate(body.messages):
        where = f"messages[{i}].content"
        if turn.role == "system":
            turns.append(_system(_text(turn.content, where, "\n\n"), begun))
            continue
        begun = True
        turns += _user(turn, where, called) if turn.role == "user" else [_assistant(turn, where, called)]
    messages = _alternating(turns)
    last, where = messages[-1] if messages else {"role": ""}, f"messages[{len(body.messages) - 1}].content"
    if last["role"] == "assistant":
        if "tool_calls" in last:
            raise wrong(where, "each tool_use needs its tool_result in a message after it")
        if not last["content"] and "reasoning_content" in last:
            raise wrong(where, "thinking cannot be continued; end with text")
        if not last["content"]:
            messages.pop()
    if all(message["role"] == "system" for message in messages):
        raise wrong("messages", "at least one of the user is needed")
    return messages


def _system(text: str, begun: bool) -> Message:
    """Many templates take one in front only: a later one is of the user's turn, marked as Anthropic's clients do."""
    if begun:
        return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
    return {"role": "system", "content": text}


def _alternating(turns: Sequence[Message]) -> list[Message]:
    """Turns of one role that follow each other are one: many templates want them to alternate."""
    messages: list[Message] = []
    for role, group in itertools.groupby(turns, lambda turn: str(turn["role"])):
        same = list(group)
        if role == "tool" or len(same) == 1:
            messages += same
            continue
        joined: Message = {"role": role}
        for name in ("content", "reasoning_content"):
            if any(name in turn for turn in same):
                joined[name] = "\n\n".join(text for turn in same if (text := turn.get(name)))
        if calls := [call for turn in same for call in turn.get("tool_calls", ())]:
            joined["tool_calls"] = calls
        messages.append(joined)
    return messages


def _placed(blocks: Sequence[Block], where: str, *kinds: str) -> Iterator[tuple[str, Block]]:
    """The blocks with their places.

    Raises:
        RequestError: one is of none of these kinds, or is text without a text.
    """
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block.type not in kinds:
            raise opaque(block.type, f"{at}.type", kinds)
        if block.type in ("text", "thinking") and getattr(block, block.type) is None:
            raise wrong(f"{at}.{block.type}", "a string is needed")
        yield at, block


def _text(blocks: Sequence[Block], where: str, between: str) -> str:
    return between.join(block.text or "" for _, block in _placed(blocks, where, "text"))


def _user(turn: Turn, where: str, called: Mapping[str, str]) -> list[Message]:
    """The results of tools first: they belong to the calls before."""
    texts: list[str] = []
    turns: list[Message] = []
    for at, block in _placed(turn.content, where, "text", "tool_result"):
        if block.type == "text":
            texts.append(block.text or "")
            continue
        content = _text(block.content, f"{at}.content", "\n")
        if not block.tool_use_id:
            raise wrong(f"{at}.tool_use_id", "a string is needed")
        if block.is_error and not content.lower().startswith("error"):
            content = f"Error: {content}"
        named = {"name": called[block.tool_use_id]} if block.tool_use_id in called else {}
        turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content, **named})
    return [*turns, {"role": "user", "content": "".join(texts)}] if texts or not turns else turns


def _assistant(turn: Turn, where: str, called: dict[str, str]) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in _placed(turn.content, where, "text", "thinking", "redacted_thinking", "tool_use"):
        said.append(block.text or "" if block.type == "text" else "")
        thought.append(block.thinking or "" if block.type == "thinking" else "")
        if block.type == "tool_use":
            for name in ("input", "name", "id"):
                if getattr(block, name) in (None, ""):
                    raise wrong(f"{at}.{name}", "it is needed")
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
            called[block.id] = block.name
    made: Message = {"role": "assistant", "content": "".join(said)}
    if reasoning := "".join(thought):
        made["reasoning_content"] = reasoning
    return made | ({"tool_calls": calls} if calls else {})


def models(request: HttpRequest, service: Service) -> dict[str, Any]:
    """``/v1/models``."""
    found = [_model(card) for card in service.models()]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"data": found, "has_more": False, **ends}


def model(request: HttpRequest, service: Service) -> dict[str, Any]:
    """``/v1/models/NAME``."""
    return _model(service.card(request.params["model"]))


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card.name, "display_name": card.name, "created_at": created, "lifecycle": "active",
            "max_input_tokens": card.context, "max_tokens": card.context}  # fmt: skip


ROUTES = (
    Route("/v1/messages", message, "POST", "Answer a conversation", MessageBody),
    Route("/v1/messages/count_tokens", count, "POST", "Count the tokens of a prompt", PromptBody),
    Route("/v1/models", models, summary="List the models"),
    Route("/v1/models/{model:path}", model, summary="One of the models"),
)
