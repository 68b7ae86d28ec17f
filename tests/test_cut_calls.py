"""A call of a tool that ``max_tokens`` cuts: what clients of each API read, wherever in it the answer ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools

from chat_tokenizers import HERMES
from outcore.serve.api import Api, ResponseWriter
from outcore.serve.apis import ANTHROPIC, OLLAMA, OPENAI
from outcore.serve.events import Called, Ended, Event, GenerationRequest
from outcore.serve.parsing import Markers, TextParser
from test_service import heard, serving, text_of
from translated import asked, events, lines, sent

FIRST, SECOND = {"city": "Paris"}, {"city": "Rome", "days": 3}
SAID = "Let me look.\n"
CALLS = [
    f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"
    for arguments in (FIRST, SECOND)
]
WHOLE = "\n".join(CALLS)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
HI = [{"role": "user", "content": "hi"}]

Read = tuple[str, list[Any], Any]
"""Visible text, arguments of the calls, and why it ended."""


def chat_whole(answer: Any) -> Read:
    message = answer["choices"][0]["message"]
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or "", calls, answer["choices"][0]["finish_reason"]


def chat_stream(data: bytes) -> Read:
    choices = [chunk["choices"][0] for chunk in lines(data)[:-1]]
    arguments: dict[int, str] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls", ()):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [json.loads(arguments[n]) for n in sorted(arguments)], choices[-1]["finish_reason"]


def responses_whole(answer: Any) -> Read:
    assert all(item["status"] == "completed" for item in answer["output"] if item["type"] == "function_call")
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return text, calls, (answer["incomplete_details"] or {}).get("reason")


def responses_stream(data: bytes) -> Read:
    steps = lines(data)
    text = "".join(step["delta"] for step in steps if step["type"] == "response.output_text.delta")
    found = responses_whole(steps[-1]["response"])
    assert found[0] == text and steps[-1]["type"] == "response.incomplete"
    return found


def messages_whole(answer: Any) -> Read:
    blocks = answer["content"]
    calls = [block["input"] for block in blocks if block["type"] == "tool_use"]
    return "".join(b["text"] for b in blocks if b["type"] == "text"), calls, answer["stop_reason"]


def messages_stream(data: bytes) -> Read:
    text, calls, reason, opened = "", list[Any](), None, 0
    for event in lines(data):
        opened += (event["type"] == "content_block_start") - (event["type"] == "content_block_stop")
        if event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            calls += [json.loads(event["delta"]["partial_json"])] if "partial_json" in event["delta"] else []
        if event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    assert opened == 0
    return text, calls, reason


def ollama_whole(answer: Any) -> Read:
    message = answer["message"]
    return (
        message["content"],
        [c["function"]["arguments"] for c in message.get("tool_calls", ())],
        answer["done_reason"],
    )


def ollama_stream(data: bytes) -> Read:
    records = [json.loads(line) for line in data.splitlines()]
    calls = [c["function"]["arguments"] for r in records for c in r["message"].get("tool_calls", ())]
    return "".join(r["message"]["content"] for r in records), calls, records[-1]["done_reason"]


Way = tuple[Api, str, dict[str, Any], Callable[[Any], Read], Callable[[bytes], Read], str]
TOOL = {"type": "function", "function": FUNCTION}
WAYS: dict[str, Way] = {
    "chat": (
        OPENAI, "/v1/chat/completions", {"messages": HI, "tools": [TOOL]}, chat_whole, chat_stream, "length"
    ),
    "responses": (
        OPENAI, "/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION, "strict": False}]},
        responses_whole, responses_stream, "max_output_tokens",
    ),
    "anthropic": (
        ANTHROPIC, "/v1/messages",
        {"model": "m", "max_tokens": 9, "messages": HI, "tools": [{"name": "look", "input_schema": SCHEMA}]},
        messages_whole, messages_stream, "max_tokens",
    ),
    "ollama": (
        OLLAMA, "/api/chat", {"model": "m", "messages": HI, "tools": [TOOL]}, ollama_whole, ollama_stream, "length"
    ),
}  # fmt: skip


def answered(text: str) -> list[Event]:
    """An answer that was cut behind this text."""
    how = Markers(None, (json_tools.tool_call_start, json_tools.tool_call_end), json_tools.parse_tool_call)
    parser = TextParser(0, how, [TOOL])
    pieces = [piece for character in text for piece in parser.feed(character)]
    return events(*pieces, *parser.finish(True), reason="length")


def cuts(before: str) -> Iterator[tuple[str, int]]:
    """An answer that ends within a call, behind one or at its beginning; and the calls that it holds."""
    for end in range(1, len(WHOLE) + 1):
        yield before + WHOLE[:end], WHOLE[:end].count("</tool_call>")


@pytest.mark.parametrize("before", [SAID, ""], ids=["text", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_text_and_whole_calls_are_told_and_nothing_of_the_one_that_was_cut(way: str, before: str) -> None:
    api, path, body, read_whole, read_stream, reason = WAYS[way]

    def answering(stream: bool) -> ResponseWriter:
        return asked(api, path, body | {"stream": stream}).answering

    for text, calls in cuts(before):
        expected = before, [FIRST, SECOND][:calls], reason
        said = answered(text)
        assert read_whole(answering(False).whole(said)) == expected, text
        assert read_stream(sent(answering(True), said)) == expected, text


def test_a_served_models_call_is_told_when_it_is_whole_and_not_before(served: Path, tmp_path: Path) -> None:
    """A call that the model has to make, with fewer tokens than it takes."""
    folder = shutil.copytree(served, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(HERMES)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 2]}))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    tool["function"]["parameters"]["additionalProperties"] = False
    ask = GenerationRequest(messages=tuple(HI), tools=(tool,), tool_choice="look", max_tokens=60)
    with serving(folder, memory="60MB") as service:
        whole = asyncio.run(heard(service, ask))
        (call,), (end,) = ([e for e in whole if isinstance(e, kind)] for kind in (Called, Ended))
        assert (call.name, end.reason) == ("look", "tool_calls") and not text_of(whole)
        for tokens in range(1, end.tokens - 1, 2):
            said = asyncio.run(heard(service, replace(ask, max_tokens=tokens)))
            assert not text_of(said) and not any(isinstance(e, Called) for e in said)
            assert [e.reason for e in said if isinstance(e, Ended)] == ["length"]
