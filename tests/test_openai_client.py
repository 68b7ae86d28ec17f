"""OpenAI's own Python client, as it is published, against the HTTP application; the answers come from a script."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest
from pydantic import BaseModel

from fake_service import FakeService, Script
from outcore import RequestError
from outcore.serve.app import OPENAI, application
from outcore.serve.events import Begun, Called, Event, GenerationRequest, TextPart
from outcore.serve.site import Site
from outcore_apis.apis import RESPONSES
from outcore_embed.apis import OPENAI as EMBEDDINGS
from translated import Said, token

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Place(BaseModel):
    city: str
    people: int


PLACE = (TextPart(0, '{"city": "Bonn",'), TextPart(0, ' "people": 3}'))
CALL = (TextPart(0, reasoning="hm"), Called(0, "look", '{"x": 1}', "call_a"), Called(0, "look", "{}", "call_b", 1))


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """It takes a second to import, and only the process that runs these tests needs it, of all that collect them."""
    globals()["openai"] = importlib.import_module("openai")


def asking(script: Script, work: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    """What some work with a client gives."""

    async def run() -> T:
        transport = httpx.ASGITransport(application(Site(FakeService(script), (OPENAI, RESPONSES, EMBEDDINGS))))
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url="http://localhost/v1",
            http_client=httpx.AsyncClient(transport=transport),
            max_retries=0,
        ) as client:
            return await work(client)

    return asyncio.run(run())


async def failing(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    yield Begun("m", 1)
    yield TextPart(0, "x")
    await asyncio.sleep(0.02)  # what is there is sent before it fails
    raise RequestError("the disk is gone", "internal_error", status=500)


async def refusing(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    raise RequestError("no model of this name", "model_not_found", status=404, param="model")
    yield


def test_a_chat() -> None:
    said = Said(TextPart(0, reasoning="hm"), TextPart(0, "Hello", logprobs=(token("Hello", -1, token("Hi", -2)),)))

    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model="m", messages=HI, temperature=0.5, logprobs=True, top_logprobs=1, extra_body={"top_k": 3}
        )

    found = asking(said, work)
    choice = found.choices[0]
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("Hello", "hm", "stop")
    assert choice.logprobs.content[0].top_logprobs[0].token == "Hi" and found.usage.total_tokens == 12
    (ask,) = said.asks
    assert (ask.model, ask.sampling.temperature, ask.sampling.top_k, ask.logprobs) == ("m", 0.5, 3, 1)


def test_a_streamed_chat() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True, stream_options=options)
        return [chunk async for chunk in stream]

    found = asking(Said(TextPart(0, "Hel"), TextPart(0, "lö")), work)
    choices = [chunk.choices[0] for chunk in found if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hellö"
    assert [choice.delta.role for choice in choices] == ["assistant", None, None, None]
    assert choices[-1].finish_reason == "stop" and found[-1].choices == [] and found[-1].usage.prompt_tokens == 5


def test_tools_streamed_and_not() -> None:
    said = Said(*CALL, reason="tool_calls")

    async def work(client: openai.AsyncOpenAI) -> Any:
        whole = await client.chat.completions.create(model="m", messages=HI, tools=[TOOL], tool_choice="required")
        async with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            return whole, kinds, await stream.get_final_completion()

    whole, kinds, gathered = asking(said, work)
    assert "tool_calls.function.arguments.done" in kinds
    for found in (whole, gathered):
        choice = found.choices[0]
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("call_a", "look", '{"x": 1}'), ("call_b", "look", "{}")]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert said.asks[0].tool_choice == "required" and said.asks[0].tools[0]["function"]["name"] == "look"


def test_calls_and_results_go_back_as_the_client_has_them() -> None:
    said = Said(*CALL, reason="tool_calls")

    async def work(client: openai.AsyncOpenAI) -> None:
        first = await client.chat.completions.create(model="m", messages=HI, tools=[TOOL])
        message = first.choices[0].message
        result: Any = {"role": "tool", "tool_call_id": "call_a", "content": "7"}
        await client.chat.completions.create(model="m", messages=[*HI, message.model_dump(), result], tools=[TOOL])

    asking(said, work)
    _, answer, result = said.asks[1].messages or ()
    assert answer["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"x": 1}, {}]
    assert result == {"role": "tool", "tool_call_id": "call_a", "content": "7", "name": "look"}


def test_a_chat_parsed_into_a_class() -> None:
    said = Said(*PLACE)

    async def work(client: openai.AsyncOpenAI) -> Any:
        whole = await client.chat.completions.parse(model="m", messages=HI, response_format=Place)
        async with client.chat.completions.stream(model="m", messages=HI, response_format=Place) as stream:
            async for _ in stream:
                pass
            return whole, await stream.get_final_completion()

    for found in asking(said, work):
        assert found.choices[0].message.parsed == Place(city="Bonn", people=3)
    assert said.asks[0].form is not None and said.asks[0].form["required"] == ["city", "people"]


def test_completions_of_several_prompts_streamed_and_not() -> None:
    async def echo(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        async for event in Said(TextPart(0, f"{ask.prompt}!"))(ask):
            yield event

    async def work(client: openai.AsyncOpenAI) -> Any:
        whole = await client.completions.create(model="m", prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model="m", prompt=["a", "b"], stream=True)
        return whole, [part async for part in stream]

    whole, parts = asking(echo, work)
    assert [choice.text for choice in whole.choices] == ["a!", "b!"]
    texts = {i: "".join(p.choices[0].text for p in parts if p.choices[0].index == i) for i in (0, 1)}
    assert texts == {0: "a!", 1: "b!"} and sum(p.choices[0].finish_reason == "stop" for p in parts) == 2


def test_models() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")
        return [model.id async for model in client.models.list()], (await client.models.retrieve("fake")).id

    assert asking(Said(), work) == (["fake"], "fake")


def test_responses() -> None:
    said = Said(
        TextPart(0, reasoning="hm"), TextPart(0, "Hello"), Called(0, "look", "{}", "call_a"), reason="tool_calls"
    )
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}

    async def work(client: openai.AsyncOpenAI) -> Any:
        first = await client.responses.create(model="m", instructions="be", input="hi", tools=[tool])
        output: Any = {"type": "function_call_output", "call_id": "call_a", "output": "7"}
        await client.responses.create(model="m", input=[*HI, *first.output, output], tools=[tool])
        return first

    found = asking(said, work)
    assert found.output_text == "Hello" and [item.type for item in found.output] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert found.output[2].arguments == "{}" and found.usage.output_tokens == 7 and found.status == "completed"
    _, answer, result = said.asks[1].messages or ()
    assert (answer["content"], answer["reasoning_content"], len(answer["tool_calls"])) == ("Hello", "hm", 1)
    assert result["name"] == "look"


@pytest.mark.parametrize("summary", [None, "auto"])
def test_streamed_responses(summary: Any) -> None:
    said = Said(TextPart(0, reasoning="hm"), *PLACE, Called(0, "look", '{"x": 1}', "c"))

    async def work(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(
            model="m", input="hi", text_format=Place, reasoning={"summary": summary}
        ) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_response()

    kinds, found = asking(said, work)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert ("response.reasoning_summary_text.delta" in kinds) == (summary is not None)
    assert found.output_parsed == Place(city="Bonn", people=3) and found.output[2].arguments == '{"x": 1}'


def test_a_refusal_is_the_clients_own_error() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="m", messages=HI, temperature=-1)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="m", messages=HI, stream=True)
        return bad.value, missing.value

    bad, missing = asking(refusing, work)
    assert bad.param == "temperature" and "temperature: " in bad.message
    assert missing.code == "model_not_found" and missing.body["message"] == "no model of this name"


def test_a_failure_in_a_stream_is_the_clients_own_error() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.APIError, match="the disk is gone"):
            async for _ in await client.chat.completions.create(model="m", messages=HI, stream=True):
                pass
        return [event async for event in await client.responses.create(model="m", input="hi", stream=True)]

    found = asking(failing, work)
    assert found[-1].type == "response.failed" and found[-1].response.error.message == "the disk is gone"


def test_embeddings_are_refused_with_their_reason() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        # Not 501, which the client tries three times.
        with pytest.raises(openai.BadRequestError, match="demo writes text and makes no vectors"):
            await client.embeddings.create(model="m", input="a")

    asking(Said(), work)
