"""What a request to OpenAI's responses says: its items as messages of a chat, its tools as functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..decode.request_values import text_content
from .exchange import RequestError
from .fields import MOST_TOOLS, UNSUPPORTED, Fields, sound
from .openai_fields import function_tool
from .openai_messages import ROLES, TEXT, Message, systems_joined, tool_call, tools_named

INPUT = "input"
"""The one argument of a custom tool's function."""

HOSTED = {
    "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "local_shell", "mcp",
    "programmatic_tool_calling", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
    "web_search_preview_2025_03_11",
}  # fmt: skip
"""Tools that OpenAI runs, or that its own models were trained on. Codex offers some of them to every model."""


@dataclass(frozen=True)
class Tool:
    """What a function of the chat template stands for: a function or a custom tool, of a namespace or none."""

    name: str
    custom: bool = False
    namespace: str = ""

    @property
    def function(self) -> str:
        """The name that the model sees."""
        return f"{self.namespace.rstrip('_')}__{self.name}" if self.namespace else self.name


@dataclass
class Tools:
    """The tools of a request.

    Attributes:
        functions: as ``Ask.tools``; ``known``: what each of them stands for, by its name.
        unused: where those stand that this server does not have.
    """

    functions: list[Mapping[str, Any]] = field(default_factory=list)
    known: dict[str, Tool] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def add(self, value: Any, where: str, namespace: str = "") -> None:
        """A tool of the request, or a namespace's.

        Raises:
            RequestError: it is malformed, of an unknown type, or has another's name.
        """
        if not isinstance(value, dict):
            raise RequestError(f"{where}: an object is needed", param=where)
        fields = Fields(value, where)
        kind = fields.text("type")
        if kind == "namespace" and not namespace:
            self._namespace(fields)
        elif kind in HOSTED:
            self.unused.append(f"{where} {kind}")
        elif kind in ("function", "custom"):
            function = function_tool(fields) if kind == "function" else _custom(fields)
            tool = Tool(function["function"]["name"], kind == "custom", namespace)
            if tool.function in self.known:
                raise fields.error("name", "there is another tool of this name")
            self.known[tool.function] = tool
            if len(self.functions) >= MOST_TOOLS:
                raise RequestError(f"tools: more than {MOST_TOOLS}", param="tools")
            self.functions.append(function | {"function": function["function"] | {"name": tool.function}})
        else:
            raise fields.error("type", "only function, custom and namespace are supported", UNSUPPORTED)

    def _namespace(self, fields: Fields) -> None:
        name, tools = fields.text("name"), fields.take("tools")
        if not name or not isinstance(tools, list):
            raise fields.error("tools", "a name, and a list of tools, are needed")
        for i, tool in enumerate(tools):
            self.add(tool, f"{fields.at('tools')}[{i}]", name)


def _custom(fields: Fields) -> dict[str, Any]:
    """A tool that takes any text, as a function of one argument; a grammar for it can be described, not enforced."""
    name, description = fields.text("name"), fields.text("description")
    if not name or len(name) > 256:
        raise fields.error("name", "a name of at most 256 characters is needed")
    form = fields.inner("format")
    if form is not None and form.word("type", ("text", "grammar")) == "grammar":
        description += f"\n\nThe input follows this grammar ({form.text('syntax')}):\n{form.text('definition')}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def read_tools(value: Any) -> Tools:
    """The tools of a request; None: none.

    Raises:
        RequestError: one is malformed, or of an unknown type.
    """
    tools = Tools()
    if value is not None and not isinstance(value, list):
        raise RequestError("tools: a list is needed", param="tools")
    for i, tool in enumerate(sound(value or [], "tools")):
        tools.add(tool, f"tools[{i}]")
    return tools


def read_input(instructions: str, value: Any) -> tuple[Message, ...]:
    """The messages that instructions and input come to.

    Raises:
        RequestError: there are none, or one is malformed or has more than text; the error says which part of it.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise RequestError("input: a string, or a list of at least one item, is needed", param="input")
    chat = _Chat()
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"input[{i}]: an object is needed", param=f"input[{i}]")
        chat.add(Fields(item, f"input[{i}]"))
    first = [{"role": "system", "content": instructions}] if instructions else []
    for message in chat.messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    messages = systems_joined([*first, *tools_named(chat.messages)])
    # Templates that take a system message in front only would refuse the whole conversation from then on.
    return tuple(m | {"role": "user"} if m["role"] == "system" and i else m for i, m in enumerate(messages))


class _Chat:
    """Messages in the making: thoughts, text and calls of one turn are one message, whose thoughts are a list."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, item: Fields) -> None:
        """The next item."""
        kind = item.text("type", "message")
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._turn("content", "tool_calls").setdefault("reasoning_content", []).append(_thought(item))
        elif kind in ("function_call", "custom_tool_call"):
            self._turn().setdefault("tool_calls", []).append(_call(item, kind))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = text_content(item.take("output"), item.at("output"), TEXT)
            self.messages.append({"role": "tool", "content": output, "tool_call_id": item.text("call_id")})
        else:
            raise item.error("type", "items of this type are not supported", UNSUPPORTED)

    def _message(self, item: Fields) -> None:
        given = item.word("role", ("user", "assistant", "system", "developer"))
        if given is None:
            raise item.error("role", "user, assistant, system or developer is needed")
        content = item.take("content")
        text = "" if given == "assistant" and content == [] else text_content(content, item.at("content"), TEXT)
        if given == "assistant":
            self._turn("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": ROLES[given], "content": text})

    def _turn(self, *before: str) -> Message:
        """The assistant's message that an item belongs to: a new one if the last has one of these already."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in before):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _thought(item: Fields) -> str:
    """What was thought, whole if it is there, or its summary."""
    texts: list[str] = []
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.take(name)
        if parts is None or parts == []:
            continue
        if not isinstance(parts, list):
            raise item.error(name, "a list is needed")
        texts.append(text_content(parts, item.at(name), (kind,)))
    return texts[0] if texts else ""


def _call(item: Fields, kind: str) -> Message:
    """A call, under the name that the model knows it by."""
    tool = Tool(item.text("name"), kind == "custom_tool_call", item.text("namespace"))
    if not tool.name:
        raise item.error("name", "the name of the tool is needed")
    arguments = json.dumps({INPUT: item.text("input")}) if tool.custom else item.take("arguments")
    called = Fields({"name": tool.function, "arguments": arguments}, item.path)
    return tool_call(item.text("call_id"), called)
