"""Whatever JSON a body is, every API understands it or refuses it; nothing else is raised."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_json import changed, deep, places, values
from outcore import RequestError
from outcore.serve.api import HttpRequest, ParsedRequest, encoded
from outcore.serve.app import all_apis
from outcore.serve.events import Called, TextPart
from outcore.serve.requests import read_json
from outcore_apis.apis import OLLAMA
from scripted import Scripted, said
from translated import sent, token

ROUTES = {route.path: (api, route) for api in all_apis() for route in api.routes}
OPTIONS = {"temperature": 0.5, "top_k": 4.0, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["x"], "num_predict": 4,
           "repeat_last_n": -1, "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}  # fmt: skip
COMMON = {"model": "m", "options": OPTIONS, "format": {"type": "object"}, "think": "low", "keep_alive": "5m",
          "logprobs": True, "top_logprobs": 2, "stream": True}  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 0.5, "seed": 1,
        "messages": [
            {"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "content": None, "reasoning_content": "c", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": [1]}'}}]},
            {"role": "tool", "content": "d", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "logprobs": True, "top_logprobs": 2, "stop": ["x"], "logit_bias": {"5": 1}, "max_completion_tokens": 5,
        "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "modalities": ["text"],
    },
    "/v1/completions": {
        "model": "m", "prompt": [[1, 2], "b"], "n": 2, "best_of": 2, "logprobs": 2, "echo": False, "suffix": "",
        "stop": "x", "stream": True, "max_tokens": 4, "response_format": {"type": "json_object"},
    },
    "/v1/responses/compact": {
        "model": "m", "instructions": "i",
        "input": [{"type": "compaction", "encrypted_content": "a"}, {"role": "user", "content": "b"}],
    },
    "/v1/responses": {
        "model": "m", "instructions": "i", "stream": True, "max_output_tokens": 5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}], "summary": []},
            {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}", "namespace": "ns"},
            {"type": "custom_tool_call", "name": "patch", "call_id": "d", "input": "x"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "e"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "look", "parameters": {}}]},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "s"}},
            {"type": "web_search"},
        ],
        "tool_choice": "auto", "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "truncation": "auto",
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 5, "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
        "system": [{"type": "text", "text": "a"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "c", "signature": "d"}, {"type": "text", "text": "e"},
                {"type": "tool_use", "id": "t", "name": "look", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "is_error": True,
                 "content": [{"type": "text", "text": "f"}]},
                {"type": "text", "text": "g"}]},
            {"role": "system", "content": "h"},
            {"role": "assistant", "content": "i"},
        ],
        "tools": [{"name": "look", "description": "j", "input_schema": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "display": "omitted"}, "mcp_servers": [],
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "output_format": {"type": "json_schema", "schema": {}},
    },
    "/api/chat": {
        **COMMON,
        "messages": [
            {"role": "user", "content": "a", "images": []},
            {"role": "assistant", "content": "", "thinking": "b", "tool_calls": [
                {"id": "t", "function": {"name": "look", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "c", "tool_name": "look", "tool_call_id": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}],
    },
    "/api/generate": {**COMMON, "prompt": "a", "system": "b", "raw": False, "suffix": "", "template": "",
                      "context": []},
}  # fmt: skip
VALUES = values(name for body in VALID.values() for name in body)

SAID = said(
    TextPart(0, reasoning="hm", logprobs=(token("hm"),)),
    TextPart(0, "\ud800", logprobs=(token("yes", float("-inf"), token("\ud800", data=b"\xed")),)),
    Called(0, "patch", '{"input": 7}', "c"),
    Called(0, "ns__look", '{"a": "\ud800"}', "d", 1),
    reason="tool_calls",
)


def handled(path: str, body: dict[str, Any]) -> Any:
    """What a body comes to, by way of its bytes; None: Python writes no such JSON."""
    try:
        data = json.dumps(body).encode()
    except ValueError:  # a whole number of more than 4,300 digits
        return None
    return ROUTES[path][1].handle(HttpRequest(Scripted([]), read_json(data)))


def answered(path: str, body: dict[str, Any]) -> bool:
    """Whether a body is understood; its answer is written then, whole or streamed, and nothing of it is no JSON."""
    try:
        found = handled(path, body)
    except RequestError as e:
        assert e.status == 400
        encoded(ROUTES[path][0].error_body(e))
        return False
    if not isinstance(found, ParsedRequest):
        if isinstance(found, Awaitable):
            found.close()  # type: ignore[attr-defined]
        return True
    for ask in found.requests:
        assert (ask.messages is None) != (ask.prompt is None)
        parts = (ask.model, ask.messages, ask.prompt, ask.tools, ask.form, ask.stop, ask.template_options)
        json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()  # a template can write it, a tokenizer read it
    assert all(name.isascii() and "," not in name for name in found.writer.ignored)
    if found.writer.streams:
        sent(found.writer, SAID).decode()
    else:
        encoded(found.writer.whole(SAID))
    return True


@pytest.mark.parametrize("path", VALID)
def test_the_bodies_that_are_changed_below_are_understood(path: str) -> None:
    for streams in (True, False):
        more = {} if streams else {"stream_options": None}
        assert answered(path, VALID[path] | {"stream": streams} | more)
    assert not handled(path, VALID[path]).writer.ignored or path == "/v1/responses"


@pytest.mark.parametrize("path", VALID)
def test_any_json_is_understood_or_refused(path: str) -> None:
    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(sorted(VALID[path])), VALUES, max_size=6))
    def check(body: dict[str, Any]) -> None:
        answered(path, body)

    check()


@pytest.mark.parametrize("path", VALID)
def test_a_good_body_with_anything_anywhere_is_understood_or_refused(path: str) -> None:
    count = sum(1 for _ in places(VALID[path]))

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, count - 1), VALUES)
    def check(number: int, value: Any) -> None:
        answered(path, changed(VALID[path], number, value))

    check()


@pytest.mark.parametrize("path", VALID)
def test_a_nasty_value_anywhere_is_understood_or_refused(path: str) -> None:
    for value in (deep(90), "\ud800", "", {}, [], None, True, -1, 1e308, [None], {"\ud800": "\ud800"}):
        for number in range(sum(1 for _ in places(VALID[path]))):
            answered(path, changed(VALID[path], number, value))


@pytest.mark.parametrize("path", ["/api/show", "/api/pull"])
def test_any_name_is_found_or_refused(path: str) -> None:
    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(["model", "name", "verbose"]), VALUES))
    def check(body: dict[str, Any]) -> None:
        try:
            encoded(handled(path, body))
        except RequestError as error:
            assert error.status in (400, 404, 501)
            encoded(OLLAMA.error_body(error))

    check()


def test_orders_of_keys_say_nothing() -> None:
    path = "/v1/chat/completions"
    names = list(VALID[path])
    random.Random(1).shuffle(names)
    assert handled(path, {name: VALID[path][name] for name in names}).requests == handled(path, VALID[path]).requests
