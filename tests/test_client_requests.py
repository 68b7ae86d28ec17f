"""Requests as Codex sends them: its fields were read in copies of its request's struct. One that met an error here, or
a stream without what it waits for, would show nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from outcore.serve.app import all_apis
from outcore.serve.events import Called, Event, TextPart
from scripted import HELLO, Scripted, said, served
from translated import lines


def sent(path: str, body: Any = None, events: list[Event] = HELLO, **headers: str) -> tuple[httpx.Response, Scripted]:
    """What the server answers an app, and what was asked of it."""
    service = Scripted(events)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(served(service, *all_apis()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            method = "GET" if body is None else "POST"
            return await client.request(method, path, json=body, headers=headers)

    response = asyncio.run(send())
    assert response.status_code == 200, response.text
    return response, service


CODEX = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}], "content": None,
         "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_0"},
        {"type": "function_call_output", "call_id": "call_0", "output": "a.py\nb.py"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": {
            "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"], "additionalProperties": False}},
        {"type": "custom", "name": "apply_patch", "description": "Changes files",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a-thread",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip


def codex(events: list[Event]) -> tuple[list[Any], Scripted]:
    """The events that Codex reads, and what was asked."""
    headers = {"session-id": "1", "originator": "codex_cli_rs", "accept": "text/event-stream"}
    response, service = sent("/v1/responses", CODEX, events, **headers)
    return lines(response.content), service


def test_codex_has_its_items_and_the_end_that_it_waits_for() -> None:
    found, service = codex(HELLO)
    assert found[0]["type"] == "response.created"
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert done[0]["content"][0]["text"] == "Hello"
    end = found[-1]
    assert end["type"] == "response.completed"
    assert end["response"]["id"]
    assert end["response"]["usage"]["total_tokens"] == 17
    ask = service.asks[0]
    assert ask.messages is not None
    assert [m["role"] for m in ask.messages] == ["system", "user", "user", "assistant", "tool"]
    assert ask.messages[3]["tool_calls"][0]["function"]["arguments"] == {"command": ["ls"]}
    assert [tool["function"]["name"] for tool in ask.tools] == ["shell", "apply_patch"]


def test_codex_has_its_calls() -> None:
    call = Called(0, "shell", '{"command":["cat","a.py"]}', "call_1")
    found, _ = codex(said(TextPart(0, reasoning="Hm."), call, reason="tool_calls"))
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "function_call"]
    assert (done[1]["name"], json.loads(done[1]["arguments"])) == ("shell", {"command": ["cat", "a.py"]})
    patch, _ = codex(said(Called(0, "apply_patch", '{"input":"*** Begin Patch"}', "call_2"), reason="tool_calls"))
    items = [e["item"] for e in patch if e["type"] == "response.output_item.done"]
    assert (items[0]["type"], items[0]["input"]) == ("custom_tool_call", "*** Begin Patch")
