"""Bodies that mean ill: read in time that grows with their length, while others are heard, and bounded."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_service import FakeService, exchange, posted, running
from outcore.errors import RequestError
from outcore.serve.api import HttpRequest, ParsedRequest
from outcore.serve.app import all_apis
from outcore.serve.connection import ClientLimits
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, TextPart
from outcore.serve.prompting import Prompter
from test_service import heard, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OLLAMA, ANTHROPIC, RESPONSES = "/api/chat", "/v1/messages", "/v1/responses"
ROUTES = {route.path: route for api in all_apis() for route in api.routes}
USER = {"role": "user", "content": "x"}
SYSTEM = {"role": "system", "content": "x"}


def parsed(path: str, body: dict[str, Any]) -> GenerationRequest:
    """What a body comes to."""
    found = ROUTES[path].handle(HttpRequest(FakeService(), body))
    assert isinstance(found, ParsedRequest)
    return found.requests[0]


def call(n: int) -> dict[str, Any]:
    return {"id": f"c{n}", "function": {"name": f"f{n}", "arguments": {}}}


def results(n: int) -> list[dict[str, Any]]:
    """Of calls, five hundred in each answer, in the other order."""
    said = [{"role": "tool", "tool_call_id": f"c{i}", "content": "x"} for i in reversed(range(500))]
    calls = {"role": "assistant", "content": "", "tool_calls": [call(i) for i in range(500)]}
    return [USER, *([calls, *said] * (n // 500))]


def messages(of: dict[str, Any], n: int) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": [of] * n + [USER]}


THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 500}]}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "x" * 500}]}

LONG: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "results of calls (Ollama)": (OLLAMA, lambda n: {"model": "m", "messages": results(n)}),
    "system messages": (CHAT, lambda n: messages(SYSTEM, 8 * n)),
    "system messages (Anthropic)": (ANTHROPIC, lambda n: messages(SYSTEM, 2 * n)),
    "messages of one role (Anthropic)": (ANTHROPIC, lambda n: messages(SAID, 4 * n)),
    "thoughts (responses)": (RESPONSES, lambda n: {"input": [THOUGHT] * (8 * n)}),
}


@pytest.mark.parametrize("name", LONG)
def test_reading_takes_time_by_the_length(name: str) -> None:
    """Four times the length takes four times as long, not sixteen."""
    path, make = LONG[name]

    def seconds(n: int) -> float:
        body = make(n)
        found = []
        for _ in range(2):
            began = time.thread_time()
            parsed(path, body)
            found.append(time.thread_time() - began)
        return min(found)

    for _ in range(3):  # once is enough: others may compute beside
        ratio = seconds(2000) / seconds(500)
        if ratio < 8:
            return
    raise AssertionError(f"{ratio:.1f} times as long for four times the length")


TOOLS = {
    CHAT: {"type": "function", "function": {"name": "f%d"}},
    OLLAMA: {"type": "function", "function": {"name": "f%d"}},
    ANTHROPIC: {"name": "f%d", "input_schema": {}},
    RESPONSES: {"type": "function", "name": "f%d"},
}


@pytest.mark.parametrize("path", TOOLS)
def test_more_tools_than_any_prompt_can_hold_are_refused(path: str) -> None:
    def body(count: int) -> dict[str, Any]:
        tools = [json.loads(json.dumps(TOOLS[path]).replace("%d", str(n))) for n in range(count)]
        return messages(USER, 1) | {"input": "x", "tools": tools}

    assert len(parsed(path, body(1024)).tools) == 1024
    with pytest.raises(RequestError, match=r"tools: .*1024") as told:
        parsed(path, body(1025))
    assert told.value.status == 400 and told.value.param == "tools"


@pytest.mark.parametrize("path", TOOLS)
def test_a_tool_takes_an_object(path: str) -> None:
    def body(schema: Any) -> dict[str, Any]:
        tool = json.loads(json.dumps(TOOLS[path]).replace("%d", ""))
        tool.get("function", tool)["input_schema" if path == ANTHROPIC else "parameters"] = schema
        return messages(USER, 1) | {"input": "x", "tools": [tool]}

    for schema in ({}, {"type": None}, {"type": "object"}, {"type": ["object", "null"]}):
        assert len(parsed(path, body(schema)).tools) == 1
    for schema in ({"type": "string"}, {"type": ["array"]}, {"type": 5}, [], "x"):
        with pytest.raises(RequestError, match="object") as refused:
            parsed(path, body(schema))
        assert refused.value.status == 400


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC, OLLAMA])
def test_a_stop_string_has_a_thousand_characters_at_most(path: str) -> None:
    def body(stop: str) -> dict[str, Any]:
        own: dict[str, Any] = {"stop": ["a", stop]}
        if path in (ANTHROPIC, OLLAMA):
            own = {"stop_sequences": ["a", stop]} if path == ANTHROPIC else {"options": own}
        return messages(USER, 1) | own | ({"prompt": "x"} if path == TEXT else {})

    assert parsed(path, body("x" * 1000)).stop == ("a", "x" * 1000)
    with pytest.raises(RequestError, match="longer than 1000 characters") as told:
        parsed(path, body("x" * 1001))
    assert told.value.status == 400


# Large bodies


def test_others_are_heard_while_a_large_body_is_read() -> None:
    body = json.dumps({"prompt": "x", "more": [{"a": {}} for _ in range(60_000)]}).encode()

    async def test() -> None:
        async with running() as server, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            await client.get(f"{server.url}/health")
            began = time.perf_counter()
            asked = asyncio.create_task(exchange(server.port, posted("/v1/say", body)))
            longest, count = 0.0, 0
            while not asked.done():
                at = time.perf_counter()
                await client.get(f"{server.url}/health")
                longest, count = max(longest, time.perf_counter() - at), count + 1
            lasted = time.perf_counter() - began
            assert b" 200 " in (await asked)[:20]
            assert count >= 4, (count, longest, lasted)

    asyncio.run(test())


def test_bytes_count_until_a_request_has_its_prompt() -> None:
    """A body that was read is still there, as what was asked."""
    go: list[asyncio.Event] = []

    async def waits(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        await go[0].wait()
        yield Begun("fake", 1)
        yield TextPart(0, "x")
        await asyncio.sleep(0.2)
        yield Ended(0, "stop", 1)
        yield Finished(1, 1)

    async def test() -> None:
        go.append(asyncio.Event())
        async with running(waits, ClientLimits(body_bytes=25_000)) as server:
            body = posted("/v1/say", {"prompt": "x" * 24_000})
            two = [asyncio.create_task(exchange(server.port, body)) for _ in range(4)]
            while server.service.under_way < 4:
                await asyncio.sleep(0.01)
            refused = await exchange(server.port, body)
            assert b" 503 " in refused[:20] and b"too many large requests" in refused and b"retry-after: 1" in refused
            go[0].set()
            assert [answer.split()[1] for answer in await asyncio.gather(*two)] == [b"200"] * 4
            assert server.site.held_bytes == 0
            assert b" 200 " in (await exchange(server.port, body))[:20]

    asyncio.run(test())


# Heads


def test_headers_beyond_their_size_are_refused_in_one_piece_too() -> None:
    one = "x: " + "y" * 65_536 + "\r\n"
    several = "".join(f"x{n}: {'y' * 1000}\r\n" for n in range(65))

    async def test() -> None:
        async with running() as server:
            for more in (one, several):
                for path, word in (("/v1/say", b'"message"'), ("/v1/messages", b'"told"')):
                    answer = await exchange(server.port, posted(path, {"prompt": "a"}, headers=more, close=False))
                    # h11 sees it before there is a path, where it does not come in one piece.
                    assert answer.split()[1] == b"431" and (word in answer or b'"message"' in answer), answer[:300]
                    assert b"connection: close" in answer.lower()
            fits = posted("/v1/say", {"prompt": "a"}, headers="x: " + "y" * 30_000 + "\r\n")
            assert b" 200 " in (await exchange(server.port, fits))[:20]

    asyncio.run(test())


def test_a_body_has_one_length() -> None:
    """Else a proxy in front sees the next request begin elsewhere."""
    body = b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"

    async def test() -> None:
        async with running() as server:
            sent = b"POST /v1/say HTTP/1.1\r\nhost: localhost\r\n" + body
            answer = await exchange(server.port, sent + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert answer.split()[1] == b"400" and b"Content-Length" in answer and answer.count(b"HTTP/1.1 ") == 1

    asyncio.run(test())


# Behind the engine


@pytest.fixture(scope="module")
def chats(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers that know the demo model's form of a chat."""
    folder = Path(shutil.copytree(quick_models(3), tmp_path_factory.mktemp("models") / "chats"))
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


def refused(service: Any, ask: GenerationRequest) -> RequestError:
    with pytest.raises(RequestError) as told:
        asyncio.run(heard(service, ask))
    return told.value


def test_a_prompt_is_refused_by_its_characters_before_it_is_made_into_tokens(chats: Path) -> None:
    with serving(chats, memory="200MB", most_context=100) as service:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}, "description": "word " * 400}}
        asks = [
            GenerationRequest(prompt="word " * 400),
            GenerationRequest(prompt=(1,) * 101),
            GenerationRequest(messages=({"role": "user", "content": "word " * 400},)),
            GenerationRequest(messages=(USER, {"role": "assistant", "content": "x"}) * 60 + (USER,)),
            GenerationRequest(messages=(USER,), tools=(tool,)),
        ]
        for ask in asks:
            error = refused(service, ask)
            assert error.code == "context_length_exceeded" and "characters" in str(error), error
            assert error.counts["n_ctx"] == 100 < error.counts["n_prompt_tokens"]
        # What fits is answered; and what is only counted may be longer.
        assert asyncio.run(heard(service, GenerationRequest(prompt="word " * 8, max_tokens=2)))
        assert len(asyncio.run(service.prompt(GenerationRequest(prompt="word " * 1000))).tokens) > 900


def test_requests_are_counted_when_they_come(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when their prompts are made: before that, too, each is held."""
    go, begun, prepare = threading.Event(), [], Prompter.prepare

    def slow(self: Prompter, *args: Any) -> Any:
        begun.append(1)
        go.wait(30)
        return prepare(self, *args)

    monkeypatch.setattr(Prompter, "prepare", slow)
    with serving(chats, memory="200MB", most=1, most_waiting=2) as service:

        async def ask_all() -> list[Any]:
            asks = [asyncio.create_task(heard(service, GenerationRequest(prompt="x", max_tokens=1))) for _ in range(20)]
            async with asyncio.timeout(30):
                while not begun or sum(one.done() for one in asks) < 17:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert sum(one.done() for one in asks) == 17 and len(begun) == 1
            go.set()
            return await asyncio.gather(*asks, return_exceptions=True)

        found = asyncio.run(ask_all())
        errors = [e for e in found if isinstance(e, RequestError)]
        # Of those that have prompts, the engine takes as many as its own bound allows.
        assert 17 <= len(errors) < 20 and {e.status for e in errors} == {429} and all(e.retry_after for e in errors)
        assert all(isinstance(one[-1], Finished) for one in found if not isinstance(one, Exception))


def test_a_grammar_has_64_kb_at_most(chats: Path) -> None:
    large = {"type": "object", "properties": {f"name{n}": {"type": "string"} for n in range(5000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    with serving(chats, memory="200MB") as service:
        for ask in (
            GenerationRequest(prompt="x", form=large),
            GenerationRequest(prompt="x", form="root ::= " + " | ".join(['"abcdefgh"'] * 7000)),
            GenerationRequest(messages=(USER,), tools=(tool,), tool_choice="required"),
        ):
            error = refused(service, ask)
            assert error.status == 400 and ("65536 characters" in str(error) or "tools" in str(error)), error
