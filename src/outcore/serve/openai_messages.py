"""Messages of OpenAI's chats as chat templates take them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..decode.request_values import text_content
from .exchange import RequestError
from .fields import UNSUPPORTED, Fields, json_object

Message = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

TEXT = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text, in any of OpenAI's APIs."""


def chat_messages(value: Any, where: str = "messages") -> tuple[Message, ...]:
    """The messages of a chat.

    Raises:
        RequestError: there are none, or one is malformed or has more than text; the error says which part of it.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where}: a list of at least one message is needed", param=where)
    messages = [_message(message, f"{where}[{i}]") for i, message in enumerate(value)]
    if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # apps keep a place for the answer so
    return systems_joined(tools_named(messages))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"{where}: an object with a role and a content is needed", param=where)
    fields = Fields(value, where)
    given = fields.word("role", ROLES)
    if given is None:
        raise fields.error("role", f"one of {', '.join(ROLES)} is needed")
    fields.refuse(audio=(), function_call=())
    message: Message = {"role": ROLES[given], "content": _content(fields, given)}
    if name := fields.text("name"):
        message["name"] = name
    if given == "tool" and (call := fields.text("tool_call_id")):
        message["tool_call_id"] = call
    return message | (_assistant(fields) if given == "assistant" else {})


def _content(fields: Fields, role: str) -> str:
    content = fields.take("content")
    if role == "assistant" and (content is None or content == []):
        return fields.text("refusal")
    return text_content(content, fields.at("content"), TEXT)


def _assistant(fields: Fields) -> Message:
    """What else an answer had: what was thought, and calls."""
    more: Message = {}
    if thought := fields.text("reasoning_content") or _thought(fields):
        more["reasoning_content"] = thought
    calls = fields.take("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise fields.error("tool_calls", "a list is needed")
    if calls:
        more["tool_calls"] = [_call(call, f"{fields.at('tool_calls')}[{i}]") for i, call in enumerate(calls)]
    return more


def _thought(fields: Fields) -> str:
    # Others write an object here, or details for their own use.
    return fields.text("reasoning") if isinstance(fields.take("reasoning"), str) else ""


def _call(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise RequestError(f"{where}: only calls of functions are supported", UNSUPPORTED, param=where)
    fields = Fields(value, where)
    function = fields.inner("function")
    if function is None:
        raise fields.error("function", "an object is needed")
    return tool_call(fields.text("id"), function)


def tool_call(call_id: str, function: Fields) -> Message:
    """A call that an answer had, of an object with ``name`` and ``arguments``."""
    name = function.text("name")
    if not name:
        raise function.error("name", "the name of the function is needed")
    arguments = function.take("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise function.error("arguments", "a JSON object, written as a string, is needed")
    called = {"name": name, "arguments": json_object(arguments or "", function.at("arguments"))}
    return {"id": call_id, "type": "function", "function": called}


def tools_named(messages: list[Message]) -> list[Message]:
    """Results with the name of the function that was called, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call["id"]}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and name and "name" not in message:
            message["name"] = name
    return messages


def systems_joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The same with one system message in front, where there are several: many templates take only one."""
    given = list(messages)
    first = [m["content"] for m in itertools.takewhile(lambda m: m["role"] == "system", given)]
    joined = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    return (*joined, *given[len(first) :])


def continues(messages: Sequence[Mapping[str, Any]], where: str = "messages") -> bool:
    """Whether the last message is an answer's beginning.

    Raises:
        RequestError: the last two are answers.
    """
    last = [m["role"] == "assistant" and bool(m["content"]) and not m.get("tool_calls") for m in messages[-2:]]
    if last == [True, True]:
        raise RequestError(f"{where}: the last two are of the assistant; one can be continued", param=where)
    return last[-1:] == [True]
