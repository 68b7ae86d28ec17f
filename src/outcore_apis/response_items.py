"""Translates items of OpenAI's Responses API to chat messages, and its tools to functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.serve import requests

from .anthropic import result_of

# The argument of the function that stands for a custom tool.
INPUT = "input"


class Item(requests.Part):
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
    encrypted_content: str = ""


class ToolFormat(requests.Part):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


class ResponseTool(requests.Part):
    type: str
    name: str = ""
    description: str = ""
    parameters: requests.Parameters | None = None
    strict: bool = False
    format: ToolFormat | None = None
    tools: list[ResponseTool] = []


@dataclass(frozen=True)
class ToolName:
    """The function or custom tool that a function of the chat template stands for."""

    name: str
    custom: bool = False
    namespace: str = ""

    @property
    def function(self) -> str:
        return f"{self.namespace.rstrip('_')}__{self.name}" if self.namespace else self.name


@dataclass
class Tools:
    """The tools of a request.

    Attributes:
        functions: for ``GenerationRequest.tools``.
        known: the tool of each function, by the function's name.
        unused: paths and types of tools that are not supported.
    """

    functions: list[Mapping[str, Any]] = field(default_factory=list)
    known: dict[str, ToolName] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def add(self, tools: Sequence[ResponseTool], where: str = "tools", namespace: str = "") -> None:
        for i, tool in enumerate(tools):
            if tool.type == "namespace" and not namespace and tool.name:
                self.add(tool.tools, f"{where}[{i}].tools", tool.name)
            elif tool.type in ("function", "custom"):
                self._function(tool, f"{where}[{i}]", ToolName(tool.name, tool.type == "custom", namespace))
            else:  # a tool that OpenAI runs or trains its models for; Codex offers some of them to every model
                self.unused.append(f"{where}[{i}] {tool.type}")

    def _function(self, tool: ResponseTool, where: str, known: ToolName) -> None:
        if not 1 <= len(tool.name) <= 256:
            raise requests.wrong(f"{where}.name", "a name of 1 to 256 characters is needed")
        if len(self.functions) >= requests.MOST_TOOLS:
            raise requests.wrong("tools", f"give at most {requests.MOST_TOOLS}")
        self.known[known.function] = known
        description, parameters = tool.description, tool.parameters
        if known.custom:
            # It takes one text argument; its grammar is described, not enforced.
            if tool.format is not None and tool.format.type == "grammar":
                description += f"\n\nThe input follows this grammar ({tool.format.syntax}):\n{tool.format.definition}"
            parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        function = requests.Function(name=tool.name, description=description, parameters=parameters, strict=tool.strict)
        self.functions.append(function.tool(name=known.function))


def messages_of(instructions: str, items: Sequence[Item]) -> tuple[requests.Message, ...]:
    """The messages of a conversation; reasoning, text and calls of one turn become one message."""
    found: list[requests.Message] = []

    def turn(*before: str) -> requests.Message:
        """The assistant's message that an item belongs to; a new one if the last has one of these fields already."""
        if not found or found[-1]["role"] != "assistant" or any(found[-1].get(name) for name in before):
            found.append({"role": "assistant", "content": ""})
        return found[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.type:
            case "message" if item.role == "assistant":
                text = "" if item.content == [] else requests.text_of(item.content, f"{where}.content")
                turn("content", "tool_calls")["content"] = text
            case "message" if item.role is not None:
                text = requests.text_of(item.content, f"{where}.content", opaque=item.role == "user")
                found.append({"role": "user" if item.role == "user" else "system", "content": text})
            case "reasoning":
                turn("content", "tool_calls").setdefault("reasoning_content", []).append(_thought(item, where))
            case "function_call" | "custom_tool_call":
                custom = item.type == "custom_tool_call"
                if not item.name:
                    raise requests.wrong(f"{where}.name", "the name of the tool is needed")
                name = ToolName(item.name, custom, item.namespace).function
                at = f"{where}.arguments"
                arguments = {INPUT: item.input} if custom else requests.text_of_json(item.arguments, at)
                turn().setdefault("tool_calls", []).append(requests.called(item.call_id, name, arguments))
            case "function_call_output" | "custom_tool_call_output":
                output, images = result_of(requests.text_of(item.output, f"{where}.output", opaque=True))
                found.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
                found += [{"role": "user", "content": images}] if images else []
            case "compaction":  # made by /v1/responses/compact, which encrypts nothing
                found.append({"role": "system", "content": f"The conversation so far: {item.encrypted_content}"})
            case "message":
                raise requests.wrong(f"{where}.role", "user, assistant, system or developer is needed")
            case _:
                raise requests.wrong(f"{where}.type", "items of this type are not supported", requests.UNSUPPORTED)
    for message in found:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    first = [{"role": "system", "content": instructions}] if instructions else []
    # Many templates accept a system message only at the start, so later ones become the user's.
    made = enumerate(requests.conversation([*first, *found]))
    return tuple(m | {"role": "user"} if m["role"] == "system" and i else m for i, m in made)


def _thought(item: Item, where: str) -> str:
    if item.content not in (None, []):
        return str(requests.text_of(item.content, f"{where}.content", ("reasoning_text",)))
    return str(requests.text_of(item.summary, f"{where}.summary", ("summary_text",))) if item.summary else ""
