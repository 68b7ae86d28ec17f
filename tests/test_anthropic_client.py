"""The official anthropic client, unmodified, against the application in this process."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from outcore.serve.app import all_apis
from outcore.serve.events import RequestError, TextPart
from scripted import CALLS, HELLO, THOUGHT, Scripted, said, served

if TYPE_CHECKING:
    import anthropic

USER: Any = {"role": "user", "content": "Hello"}
TOOL: Any = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": {}}}
ASKED: Any = {"model": "demo", "max_tokens": 9, "messages": [USER]}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """It takes 2 seconds to import, and only the process that runs these tests needs it, of all that collect them."""
    globals()["anthropic"] = importlib.import_module("anthropic")


@asynccontextmanager
async def client(service: Scripted, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    # The client's own HTTP library, whichever it is in this version.
    http = importlib.import_module(anthropic.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    app = served(service, *all_apis(), **options)
    transport = http.ASGITransport(app=app)
    async with anthropic.AsyncAnthropic(
        api_key="any", base_url="http://localhost", max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(transport=transport),
    ) as found:  # fmt: skip
        yield found


def test_a_message() -> None:
    async def main() -> anthropic.types.Message:
        async with client(Scripted(THOUGHT)) as c:
            return await c.messages.create(**ASKED, system="Be brief.")

    message = asyncio.run(main())
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Hmm." and message.content[1].text == "Yes"
    assert (message.role, message.model, message.stop_reason) == ("assistant", "demo", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (8, 5)
    assert message.usage.cache_read_input_tokens == 4


def test_a_stream() -> None:
    async def main() -> tuple[list[str], Any]:
        async with client(Scripted(HELLO)) as c, c.messages.stream(**ASKED) as stream:
            return [text async for text in stream.text_stream], await stream.get_final_message()

    texts, message = asyncio.run(main())
    assert texts == ["Hel", "lo"]
    assert message.content[0].text == "Hello" and message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 5


def test_raw_events_of_a_stream_are_what_the_client_knows() -> None:
    async def main() -> list[Any]:
        async with client(Scripted(THOUGHT)) as c:
            stream = await c.messages.create(**ASKED, stream=True)
            return [event async for event in stream]

    events = asyncio.run(main())
    assert [event.type for event in events][:2] == ["message_start", "content_block_start"]
    assert isinstance(events[0], anthropic.types.RawMessageStartEvent)
    assert not any(event.model_extra for event in events)


def test_tools_there_and_back() -> None:
    service = Scripted(CALLS)

    async def main() -> Any:
        async with client(service) as c:
            async with c.messages.stream(**ASKED, tools=[TOOL], tool_choice={"type": "any"}) as stream:
                message = await stream.get_final_message()
            called = [block for block in message.content if block.type == "tool_use"]
            results: Any = [{"type": "tool_result", "tool_use_id": b.id, "content": f"of {b.name}"} for b in called]
            history: Any = [USER, {"role": "assistant", "content": message.content},
                            {"role": "user", "content": results}]  # fmt: skip
            await c.messages.create(model="demo", max_tokens=9, messages=history, tools=[TOOL])
            return message

    message = asyncio.run(main())
    assert message.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in message.content if b.type == "tool_use"] == [
        ("weather", {"city": "Paris"}), ("clock", {}),
    ]  # fmt: skip
    first, second = service.asks
    assert first.tool_choice == "required" and first.tools[0]["function"]["name"] == "weather"
    assert second.messages is not None
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool", "tool"]
    assert second.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert second.messages[3] == {"role": "tool", "tool_call_id": "call_2", "content": "of clock", "name": "clock"}


def test_structured_output() -> None:
    class City(BaseModel):
        name: str
        people: int

    service = Scripted(said(TextPart(0, json.dumps({"name": "Paris", "people": 2}))))

    async def main() -> Any:
        async with client(service) as c:
            return await c.messages.parse(**ASKED, output_format=City)

    assert asyncio.run(main()).parsed_output == City(name="Paris", people=2)
    schema = service.asks[0].form
    assert schema is not None and set(schema["properties"]) == {"name", "people"}


def test_tokens_are_counted() -> None:
    service = Scripted(HELLO)

    async def main() -> int:
        async with client(service) as c:
            counted = await c.messages.count_tokens(model="demo", messages=[USER], tools=[TOOL], system="Be brief.")
            return counted.input_tokens

    assert asyncio.run(main()) > 100
    assert service.asks[0].messages and service.asks[0].messages[0]["content"] == "Be brief."


def test_models_are_listed_in_the_clients_words() -> None:
    async def main() -> tuple[list[Any], Any]:
        async with client(Scripted(HELLO)) as c:
            return [model async for model in c.models.list()], await c.models.retrieve("folder/other:4b")

    models, one = asyncio.run(main())
    assert [model.id for model in models] == ["demo", "folder/other:4b"]
    assert (models[0].type, models[0].max_input_tokens, models[0].created_at.year) == ("model", 4096, 2023)
    assert one.display_name == "folder/other:4b"


@pytest.mark.parametrize("status, kind", [(404, "NotFoundError"), (429, "RateLimitError"), (400, "BadRequestError")])
def test_errors(status: int, kind: str) -> None:
    async def main() -> None:
        async with client(Scripted([], RequestError("Not now.", status=status, retry_after=2))) as c:
            await c.messages.create(**ASKED)

    with pytest.raises(getattr(anthropic, kind), match="Not now") as caught:
        asyncio.run(main())
    assert caught.value.body["type"] == "error"
    assert caught.value.response.headers["retry-after"] == "2"


def test_an_error_in_the_middle_of_a_stream() -> None:
    async def main() -> None:
        service = Scripted(HELLO[:2], RequestError("No memory.", status=503))
        async with client(service) as c, c.messages.stream(**ASKED) as stream:
            await stream.get_final_message()

    with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*No memory"):
        asyncio.run(main())
