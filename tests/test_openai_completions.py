"""OpenAI's completions of one prompt or several, and its list of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from fake_service import FakeService
from outcore import RequestError
from outcore.serve.api import HttpRequest
from outcore.serve.apis import OPENAI as API
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, Service, TextPart
from outcore.serve.several import AT_ONCE, answers
from translated import asked, events, streamed, token

PATH = "/v1/completions"


def ask(**body: Any) -> GenerationRequest:
    (found,) = asked(API, PATH, {"prompt": "x", **body}).asks
    return found


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([[1, 2], "b"], [(1, 2), "b"]),
    ],
)
def test_prompts_are_texts_or_tokens_one_or_several(prompt: Any, prompts: list[Any]) -> None:
    found = asked(API, PATH, {"prompt": prompt, "n": 2, "temperature": 1})
    assert [a.prompt for a in found.asks] == prompts
    assert all(a.choices == 2 and a.messages is None and a.sampling.temperature == 1 for a in found.asks)
    assert len(found.answering.whole(events())["choices"]) == 2 * len(prompts)


def test_a_whole_completion() -> None:
    answering = asked(API, PATH, {"prompt": "x"}).answering
    answer = answering.whole(events(TextPart(0, "a"), TextPart(0, "b"), reason="length"))
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "m"
    assert answer["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["completion_tokens"] == 7


def test_a_streamed_completion() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *parts, usage, done = streamed(
        asked(API, PATH, body).answering, events(TextPart(0, "a"), TextPart(0, reasoning="b"))
    )
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["total_tokens"] == 12
    assert [p["choices"][0]["text"] for p in parts] == ["a", "b", ""]
    assert [p["choices"][0]["finish_reason"] for p in parts] == [None, None, "stop"]


def test_logprobs_in_the_older_form_count_characters_not_bytes() -> None:
    whole, left, right = token("aé", -1, token("x", -2)), token("", data=b"\xf0\x9f"), token("🙂", data=b"\x99\x82")
    said = [TextPart(0, "aé", logprobs=(whole, left)), TextPart(0, "🙂!", logprobs=(right, token("!")))]
    expected = {
        "tokens": ["aé", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82", "!"],
        "token_logprobs": [-1, -0.5, -0.5, -0.5],
        "top_logprobs": [{"x": -2}, {}, {}, {}],
        "text_offset": [0, 2, 2, 3],
    }
    body = {"prompt": "x", "logprobs": 1}
    assert asked(API, PATH, body).answering.whole(events(*said))["choices"][0]["logprobs"] == expected
    first, second, _, _ = streamed(asked(API, PATH, body | {"stream": True}).answering, events(*said))
    told = [part["choices"][0]["logprobs"] for part in (first, second)]
    assert {name: told[0][name] + told[1][name] for name in expected} == expected


def test_logprobs_are_a_number() -> None:
    assert ask(logprobs=0).logprobs == 0 and ask(logprobs=5).logprobs == 5
    assert ask().logprobs is None and ask(logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        asked(API, PATH, {"prompt": "x", **body})
    assert raised.value.param == param and raised.value.status == 400
    ask(best_of=2, n=2, suffix="", echo=False)


async def gathered(service: Service, *prompts: str, choices: int = 1) -> list[Event]:
    return [e async for e in answers(service, [GenerationRequest(prompt=p, choices=choices) for p in prompts])]


def texts(found: list[Event]) -> dict[int, str]:
    said: dict[int, str] = {}
    for event in found:
        if isinstance(event, TextPart):
            said[event.index] = said.get(event.index, "") + event.text
    return said


async def two_choices(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    yield Begun("m", 3, 1)
    for index in range(ask.choices):
        await asyncio.sleep(0)
        yield TextPart(index, f"{ask.prompt}{index}")
        yield Ended(index, "stop", 4)
    yield Finished(3, 4 * ask.choices, 1, prompt_s=float(len(str(ask.prompt))), choices=ask.choices)


def test_several_prompts_are_one_answer_with_their_choices_in_order() -> None:
    found = asyncio.run(gathered(FakeService(two_choices), "a", "bb", "c", choices=2))
    assert isinstance(found[0], Begun) and sum(isinstance(e, Begun) for e in found) == 1
    assert texts(found) == {0: "a0", 1: "a1", 2: "bb0", 3: "bb1", 4: "c0", 5: "c1"}
    assert found[-1] == Finished(9, 24, 3, prompt_s=2.0, choices=6)


def test_prompts_of_one_request_leave_room_for_others() -> None:
    most = 0

    async def slow(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        nonlocal most
        most = max(most, service.under_way)
        async for event in two_choices(ask):
            yield event

    service = FakeService(slow)
    found = asyncio.run(gathered(service, *("x" * AT_ONCE * 3)))
    assert len(texts(found)) == AT_ONCE * 3 and most == AT_ONCE


def test_one_prompt_that_fails_ends_the_others() -> None:
    async def script(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("m", 1)
        if ask.prompt == "b":
            raise RequestError("too long", status=413)
        await asyncio.sleep(60)

    service = FakeService(script)
    with pytest.raises(RequestError, match="too long"):
        asyncio.run(gathered(service, "a", "b", "c"))
    assert service.under_way == 0 and service.closed == 2


def test_an_answer_that_is_closed_ends_all_prompts() -> None:
    async def script(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("m", 1)
        await asyncio.sleep(60)

    async def leave(*prompts: str) -> FakeService:
        service = FakeService(script)
        found = answers(service, [GenerationRequest(prompt=p) for p in prompts])
        await anext(found)
        assert service.under_way == len(prompts)
        await found.aclose()
        return service

    for prompts in (("a",), ("a", "b", "c")):
        service = asyncio.run(leave(*prompts))
        assert service.under_way == 0 and service.closed == len(prompts)


def test_models_are_listed_and_shown() -> None:
    routes = {route.path: route.handle for route in API.routes}
    service = FakeService()
    listed = routes["/v1/models"](HttpRequest(), service)
    (model,) = listed["data"]
    assert listed["object"] == "list" and (model["id"], model["object"]) == ("fake", "model")
    assert isinstance(model["created"], int) and model["owned_by"]
    one = routes["/v1/models/{model:path}"]
    assert one(HttpRequest(params={"model": "fake"}), service) == model
    with pytest.raises(RequestError) as raised:
        one(HttpRequest(params={"model": "org/other"}), service)
    assert raised.value.status == 404
