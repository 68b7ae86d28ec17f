"""Whatever JSON a body is, Anthropic's and Ollama's addresses understand it or refuse it; nothing else is raised."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_json import changed, deep, places, values
from outcore import RequestError
from outcore.serve import anthropic_messages, ollama
from outcore.serve.endpoint import Direct, HttpRequest, encoded
from outcore.serve.exchange import Called, TextPart
from scripted import Scripted, said
from translated import sent, token

APIS = {"/v1/messages": anthropic_messages.API, "/api/chat": ollama.API, "/api/generate": ollama.API}
OPTIONS = {"temperature": 0.5, "top_k": 4.0, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["x"], "num_predict": 4,
           "repeat_last_n": -1, "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}  # fmt: skip
COMMON = {"model": "m", "options": OPTIONS, "format": {"type": "object"}, "think": "low", "keep_alive": "5m",
          "logprobs": True, "top_logprobs": 2, "stream": True}  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
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
    Called(0, "look", '{"a": "\ud800", "b": [NaN, 1e999]}', "c", 1),
    reason="tool_calls",
)


def answered(path: str, body: dict[str, Any]) -> bool:
    """Whether a body is understood; its answer is written then, whole or streamed, and nothing of it is no JSON."""
    endpoint = next(e for e in APIS[path].endpoints if e.path == path)
    try:
        found = endpoint.parse(HttpRequest(body))
    except RequestError as e:
        assert e.status == 400 and e.param is not None
        encoded(APIS[path].error_body(e))
        return False
    if isinstance(found, Direct):
        return True
    for ask in found.asks:
        assert (ask.messages is None) != (ask.prompt is None)
        parts = (ask.model, ask.messages, ask.prompt, ask.tools, ask.schema, ask.stop, ask.template_options)
        json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()  # a template can write it, a tokenizer read it
    assert all(name.isascii() and "," not in name for name in found.answering.ignored)
    if found.answering.streams:
        sent(found.answering, SAID).decode()
    else:
        encoded(found.answering.whole(SAID))
    return True


@pytest.mark.parametrize("path", APIS)
def test_the_bodies_that_are_changed_below_are_understood(path: str) -> None:
    for streams in (True, False):
        assert answered(path, VALID[path] | {"stream": streams})
    found = next(e for e in APIS[path].endpoints if e.path == path).parse(HttpRequest(VALID[path]))
    assert not isinstance(found, Direct) and not found.answering.ignored


@pytest.mark.parametrize("path", APIS)
def test_any_json_is_understood_or_refused(path: str) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(sorted(VALID[path])), VALUES, max_size=6))
    def check(body: dict[str, Any]) -> None:
        answered(path, body)

    check()


@pytest.mark.parametrize("path", APIS)
def test_a_good_body_with_anything_anywhere_is_understood_or_refused(path: str) -> None:
    count = sum(1 for _ in places(VALID[path]))

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, count - 1), VALUES)
    def check(number: int, value: Any) -> None:
        answered(path, changed(VALID[path], number, value))

    check()


@pytest.mark.parametrize("path", APIS)
def test_a_nasty_value_anywhere_is_understood_or_refused(path: str) -> None:
    for value in (deep(), "\ud800", "", {}, [], None, True, -1, 10**4000, 1e308, [None], {"\ud800": "\ud800"}):
        for number in range(sum(1 for _ in places(VALID[path]))):
            answered(path, changed(VALID[path], number, value))


@pytest.mark.parametrize("path", ["/api/show", "/api/pull"])
def test_any_name_is_found_or_refused(path: str) -> None:
    handle = next(route.handle for route in ollama.API.routes if route.path == path)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(["model", "name", "verbose"]), VALUES))
    def check(body: dict[str, Any]) -> None:
        try:
            encoded(asyncio.run(handle(HttpRequest(body), Scripted([]))))  # type: ignore[arg-type]
        except RequestError as error:
            assert error.status in (400, 404, 501)
            encoded(ollama.API.error_body(error))

    check()
