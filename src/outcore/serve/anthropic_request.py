"""Bodies of Anthropic's Messages API: what of them is understood, and what is refused with its reason."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .endpoint import Defaults
from .exchange import GenerationRequest, RequestError
from .fields import UNSUPPORTED, Fields, check_count, second

__all__ = ["asked", "prompt"]

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Effort, in the three words that chat templates know."""

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")

Message = dict[str, Any]


def asked(fields: Fields, defaults: Defaults) -> tuple[GenerationRequest, bool]:
    """What the engine is asked, and whether what is thought is to be shown.

    Raises:
        RequestError: the body is malformed, or asks for what is not supported.
    """
    ask, shown = prompt(fields, defaults)
    if (tokens := fields.number("max_tokens")) is None:
        raise fields.error("max_tokens", "the most tokens that the answer may have is needed")
    given = {name: fields.number(name) for name in ("temperature", "top_p", "top_k")}
    sampling = replace(ask.sampling, **{name: value for name, value in given.items() if value is not None})
    return replace(ask, max_tokens=tokens, sampling=sampling, stop=fields.stops("stop_sequences")), shown


def prompt(fields: Fields, defaults: Defaults) -> tuple[GenerationRequest, bool]:
    """The same of a body that says nothing about the answer's tokens."""
    fields.refuse(mcp_servers=([],), container=("",))
    messages, continued = _conversation(fields)
    tools = _tools(fields)
    choice, parallel = _choice(fields, [tool["function"]["name"] for tool in tools])
    options, shown = _thinking(fields)
    effort, schema = _output(fields)
    ask = GenerationRequest(
        model=fields.text("model"), messages=tuple(messages), continued=continued, tools=tools, tool_choice=choice,
        parallel_tools=parallel, template_options={**defaults.template_options, **options, **effort},
        max_tokens=defaults.max_tokens, sampling=defaults.sampling, schema=schema,
    )  # fmt: skip
    return ask, shown


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    given = fields.objects("tools")
    check_count(given, "tools")
    tools = [_tool(tool) for tool in given]
    if (twice := second([tool["function"]["name"] for tool in tools])) is not None:
        where = f"tools[{twice}].name"
        raise RequestError(f"{where}: there is another tool of this name", param=where)
    return tuple(tools)


def _tool(fields: Fields) -> dict[str, Any]:
    if fields.take("type") not in (None, "custom"):
        wanted = "only Anthropic's servers and models know this tool; give a name and an input_schema"
        raise fields.error("type", wanted, UNSUPPORTED)
    function: dict[str, Any] = {"name": fields.needed("name")}
    if description := fields.text("description"):
        function["description"] = description
    if (schema := fields.sound("input_schema")) is None:
        raise fields.error("input_schema", "a JSON schema is needed")
    function["parameters"] = schema
    if fields.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(fields: Fields, names: Sequence[str]) -> tuple[str, bool]:
    """``GenerationRequest.tool_choice``, and whether several tools may be called."""
    inner = fields.inner("tool_choice")
    if inner is None:
        return "auto", True
    if (kind := inner.word("type", CHOICES)) is None:
        raise inner.error("type", f"one of {', '.join(CHOICES)} is needed")
    if kind in ("any", "tool") and not names:
        raise fields.error("tool_choice", "there are no tools to choose from")
    name = inner.text("name")
    if kind == "tool" and (name not in names or name in CHOICES.values()):
        raise inner.error("name", "the name of one of the tools is needed")
    return CHOICES[kind] or name, not inner.flag("disable_parallel_tool_use")


def _thinking(fields: Fields) -> tuple[dict[str, Any], bool]:
    """Options of the template, and whether what is thought is shown. No model here keeps to a budget."""
    inner = fields.inner("thinking")
    if inner is None:
        return {}, True
    if (kind := inner.word("type", THINKING)) is None:
        raise inner.error("type", f"one of {', '.join(THINKING)} is needed")
    return {"enable_thinking": kind != "disabled"}, inner.word("display", ("summarized", "omitted")) != "omitted"


def _output(fields: Fields) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Options of the template, and the answer's schema."""
    output, form = fields.inner("output_config"), fields.inner("output_format")
    effort = None
    if output is not None:
        effort, form = output.word("effort", EFFORTS), output.inner("format") or form
    options = {} if effort is None else {"reasoning_effort": EFFORTS[effort]}
    if form is None:
        return options, None
    schema = form.sound("schema")
    if form.word("type", ("json_schema",)) is None or schema is None:
        raise form.error("schema", "type json_schema, and a schema, are needed")
    return options, schema


def _conversation(fields: Fields) -> tuple[list[Message], bool]:
    """The messages as chat templates take them, and whether the last is to be continued."""
    turns: list[Message] = []
    if system := _text(fields, "system", "\n\n"):
        turns.append({"role": "system", "content": system})
    called: dict[str, str] = {}
    begun = False  # with something else than system messages
    last = fields
    for last in fields.objects("messages"):
        match last.word("role", ("user", "assistant", "system")):
            case "user":
                turns += _user(last, called)
                begun = True
            case "assistant":
                turns.append(_assistant(last, called))
                begun = True
            case "system":
                turns.append(_system(_text(last, "content", "\n\n"), begun))
            case None:
                raise last.error("role", "one of user, assistant, system is needed")
    messages = _alternating(turns)
    continued = bool(messages) and _continued(messages, last)
    if all(message["role"] == "system" for message in messages):
        raise fields.error("messages", "at least one of the user is needed")
    return messages, continued


def _system(text: str, begun: bool) -> Message:
    """Many templates take one in front only: a later one is of the user's turn, marked as Anthropic's clients do."""
    if begun:
        return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
    return {"role": "system", "content": text}


def _continued(messages: list[Message], given: Fields) -> bool:
    """Whether an assistant's message is the last. An empty one is taken away."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise given.error("content", "each tool_use needs its tool_result in a message after it")
    if not last["content"] and "reasoning_content" in last:
        raise given.error("content", "thinking cannot be continued; end with text")
    if not last["content"]:
        messages.pop()
    return bool(last["content"])


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


def _blocks(fields: Fields, name: str, *kinds: str) -> list[tuple[str, Fields]]:
    """Content blocks and their types; a string is one of text.

    Raises:
        RequestError: one is of none of these kinds.
    """
    content = fields.take(name)
    if isinstance(content, str):
        content = [{"type": "text", "text": fields.text(name)}]
    if not isinstance(content, list):
        raise fields.error(name, "a string, or a list of content blocks, is needed")
    blocks = []
    for block in (fields.item(name, i, one) for i, one in enumerate(content)):
        kind = block.take("type")
        if kind in ("image", "document"):
            raise block.error("type", f"{kind} input is not supported: models here read text only", UNSUPPORTED)
        if not isinstance(kind, str) or kind not in kinds:
            raise block.error("type", f"one of {', '.join(kinds)} is needed here", UNSUPPORTED)
        blocks.append((kind, block))
    return blocks


def _text(fields: Fields, name: str, between: str) -> str:
    if fields.take(name) is None:
        return ""
    return between.join(block.needed("text", empty=True) for _, block in _blocks(fields, name, "text"))


def _user(message: Fields, called: Mapping[str, str]) -> list[Message]:
    """The results of tools first: they belong to the calls before."""
    texts: list[str] = []
    turns: list[Message] = []
    for kind, block in _blocks(message, "content", "text", "tool_result"):
        if kind == "text":
            texts.append(block.needed("text", empty=True))
        else:
            turns.append(_result(block, called))
    return [*turns, {"role": "user", "content": "".join(texts)}] if texts or not turns else turns


def _result(block: Fields, called: Mapping[str, str]) -> Message:
    used, content = block.needed("tool_use_id"), _text(block, "content", "\n")
    if block.flag("is_error") and not content.lower().startswith("error"):
        content = f"Error: {content}"
    turn = {"role": "tool", "tool_call_id": used, "content": content}
    return turn | ({"name": called[used]} if used in called else {})


def _assistant(message: Fields, called: dict[str, str]) -> Message:
    said: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[dict[str, Any]] = []
    for kind, block in _blocks(message, "content", "text", "thinking", "redacted_thinking", "tool_use"):
        if kind in said:
            said[kind].append(block.needed(kind, empty=True))
        elif kind == "tool_use":
            calls.append(_call(block))
            called[calls[-1]["id"]] = calls[-1]["function"]["name"]
    turn: Message = {"role": "assistant", "content": "".join(said["text"])}
    if thought := "".join(said["thinking"]):
        turn["reasoning_content"] = thought
    return turn | ({"tool_calls": calls} if calls else {})


def _call(block: Fields) -> dict[str, Any]:
    if (given := block.sound("input")) is None:
        raise block.error("input", "a JSON object is needed")
    function = {"name": block.needed("name"), "arguments": given}
    return {"id": block.needed("id"), "type": "function", "function": function}
