"""Whatever JSON a body is, OpenAI's addresses understand it or refuse it; nothing else is raised."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_json import changed, deep, places, values
from outcore import RequestError
from outcore.serve.endpoint import encoded
from outcore.serve.exchange import Called, TextPart
from outcore.serve.openai import API
from translated import asked, events, sent, token

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

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
}  # fmt: skip


VALUES = values(name for body in VALID.values() for name in body)

SAID = [
    TextPart(0, reasoning="hm", logprobs=(token("hm"),)),
    TextPart(0, "yes", logprobs=(token("yes", float("-inf"), token("\ud800", data=b"\xed")),)),
    Called(0, "patch", "not JSON", "c"),
    Called(0, "ns__look", '{"a": "\ud800"}', "d", 1),
]


def answered(path: str, body: dict[str, Any]) -> bool:
    """Whether a body is understood; its answer is written then, whole or streamed, and nothing of it is no JSON."""
    try:
        found = asked(API, path, body)
    except RequestError as e:
        assert e.status == 400
        encoded(API.error_body(e))
        return False
    assert found.asks and all((a.messages is None) != (a.prompt is None) for a in found.asks)
    assert all(name.isascii() and "," not in name for name in found.answering.ignored)
    if found.answering.streams:
        sent(found.answering, events(*SAID)).decode()
    else:
        encoded(found.answering.whole(events(*SAID)))
    return True


@pytest.mark.parametrize("path", PATHS)
def test_the_bodies_that_are_changed_below_are_understood(path: str) -> None:
    assert answered(path, VALID[path])
    assert not asked(API, path, {"n": 1, **VALID[path]}).answering.ignored or path == "/v1/responses"


@pytest.mark.parametrize("path", PATHS)
def test_any_json_is_understood_or_refused(path: str) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(sorted(VALID[path])), VALUES, max_size=6))
    def check(body: dict[str, Any]) -> None:
        answered(path, body)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_good_body_with_anything_anywhere_is_understood_or_refused(path: str) -> None:
    count = sum(1 for _ in places(VALID[path]))

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, count - 1), VALUES)
    def check(number: int, value: Any) -> None:
        answered(path, changed(VALID[path], number, value))

    check()


@pytest.mark.parametrize("path", PATHS)
def test_values_nested_deep_are_understood_or_refused(path: str) -> None:
    nested = deep()
    for number in range(sum(1 for _ in places(VALID[path]))):
        answered(path, changed(VALID[path], number, nested))


def test_orders_of_keys_say_nothing() -> None:
    chat = VALID["/v1/chat/completions"]
    names = list(chat)
    random.Random(1).shuffle(names)
    path = "/v1/chat/completions"
    assert asked(API, path, {name: chat[name] for name in names}).asks == asked(API, path, chat).asks
