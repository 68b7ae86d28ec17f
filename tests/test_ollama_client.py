"""The official ollama client, unmodified, against the application in this process."""

import asyncio
import json
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from outcore.serve.app import all_apis
from outcore.serve.events import RequestError, TextPart
from scripted import CALLS, HELLO, THOUGHT, Scripted, said, served

USER = {"role": "user", "content": "Hello"}


def client(service: Scripted, keepalive_s: float = 10.0) -> ollama.AsyncClient:
    app = served(service, *all_apis(), keepalive_s=keepalive_s)
    return ollama.AsyncClient("http://localhost:11434", transport=httpx.ASGITransport(app=app))


def talk(service: Scripted, name: str, *args: Any, **options: Any) -> Any:
    """What one of the client's functions returns; all parts where it streams."""

    async def main() -> Any:
        async with client(service) as c:
            found = await getattr(c, name)(*args, **options)
            return [part async for part in found] if options.get("stream") else found

    return asyncio.run(main())


def test_a_chat() -> None:
    service = Scripted(THOUGHT)
    answer = talk(service, "chat", "demo", [USER], think=True, options={"num_ctx": 2048, "seed": 1}, keep_alive="5m")
    assert (answer.message.content, answer.message.thinking, answer.message.role) == ("Yes", "Hmm.", "assistant")
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "demo")
    assert (answer.prompt_eval_count, answer.eval_count, answer.eval_duration) == (12, 5, 2_000_000_000)
    assert service.asks[0].keep_alive == 300 and service.asks[0].sampling.seed == 1
    assert service.asks[0].template_options == {"enable_thinking": True}


def test_a_streamed_chat() -> None:
    parts = talk(Scripted(HELLO), "chat", "demo", [USER], stream=True)
    assert [part.message.content for part in parts] == ["Hel", "lo", ""]
    assert [part.done for part in parts] == [False, False, True]
    assert parts[-1].load_duration == 250_000_000 and parts[-1].total_duration > 0


def test_completions() -> None:
    service = Scripted(HELLO)
    whole = talk(service, "generate", "demo:latest", "Say it", system="Be brief.")
    parts = talk(service, "generate", "demo", "Say it", raw=True, stream=True)
    assert whole.response == "".join(part.response for part in parts) == "Hello"
    assert service.asks[0].messages == ({"role": "system", "content": "Be brief."}, USER | {"content": "Say it"})
    assert service.asks[1].prompt == "Say it"


def test_tools_there_and_back() -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where.
        """
        return city

    service = Scripted(CALLS)
    answer = talk(service, "chat", "demo", [USER], tools=[weather])
    calls = answer.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Paris"}), ("clock", {}),
    ]  # fmt: skip
    function = service.asks[0].tools[0]["function"]
    assert function["name"] == "weather" and function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    results = [{"role": "tool", "content": "18", "tool_name": call.function.name} for call in calls]
    streamed = talk(service, "chat", "demo", [USER, answer.message, *results], tools=[weather], stream=True)
    assert streamed[1].message.tool_calls[0].function.arguments == {"city": "Paris"}
    messages = service.asks[1].messages
    assert messages is not None and [m.get("tool_call_id") for m in messages[2:]] == ["call00000", "call00001"]


def test_structured_output() -> None:
    class City(BaseModel):
        name: str

    service = Scripted(said(TextPart(0, json.dumps({"name": "Paris"}))))
    answer = talk(service, "chat", "demo", [USER], format=City.model_json_schema())
    assert City.model_validate_json(answer.message.content) == City(name="Paris")
    schema = service.asks[0].form
    assert schema is not None and schema["required"] == ["name"]


def test_list_show_and_ps() -> None:
    service = Scripted(HELLO)
    listed, shown, running = talk(service, "list"), talk(service, "show", "demo"), talk(service, "ps")
    assert [model.model for model in listed.models] == ["demo:latest", "folder/other:4b"]
    assert listed.models[0].size == 5_000_000 and listed.models[0].modified_at.year == 2023
    assert "tools" in shown.capabilities and shown.modelinfo["qwen3.context_length"] == 4096
    assert shown.details.parameter_size == "8.0B"
    assert [(m.model, m.size_vram, m.context_length) for m in running.models] == [("demo:latest", 3_000_000, 4096)]
    assert running.models[0].expires_at.year == 2027


def test_loading_and_unloading() -> None:
    service = Scripted(HELLO)
    loaded = talk(service, "generate", "demo", keep_alive=-1)
    unloaded = talk(service, "chat", "demo", [], keep_alive=0, stream=True)
    assert loaded.done_reason == "load" and [part.done_reason for part in unloaded] == ["unload"]
    assert service.loads == [("demo", -1), ("demo", 0)]


@pytest.mark.parametrize("stream", [False, True])
def test_errors(stream: bool) -> None:
    with pytest.raises(ollama.ResponseError, match="no model none") as caught:
        talk(Scripted(HELLO), "chat", "none", [USER], stream=stream)
    assert caught.value.status_code == 404


def test_an_error_in_the_middle_of_a_stream() -> None:
    service = Scripted(HELLO[:2], RequestError("No memory.", status=503))
    with pytest.raises(ollama.ResponseError, match="No memory"):
        talk(service, "chat", "demo", [USER], stream=True)


def test_what_is_not_there_says_what_to_do() -> None:
    service = Scripted(HELLO)
    assert talk(service, "pull", "demo").status == "success"
    for name in ("pull", "embed", "embeddings", "delete", "copy", "push"):
        arguments = ["other", "x"] if name in ("embed", "embeddings", "copy") else ["other"]
        with pytest.raises(ollama.ResponseError, match=r".{30}") as caught:
            talk(service, name, *arguments)
        assert caught.value.status_code == (400 if name.startswith("embed") else 501)


def test_what_clients_probe() -> None:
    async def main() -> list[httpx.Response]:
        async with client(Scripted(HELLO)) as c:
            return [await c._client.request(method, path) for method, path in (
                ("GET", "/api/version"), ("HEAD", "/api/tags"), ("POST", "/api/none"), ("GET", "/api/chat"),
            )]  # fmt: skip

    version, tags, missing, wrong = asyncio.run(main())
    assert version.json()["version"].count(".") == 2
    assert [r.status_code for r in (version, tags, missing, wrong)] == [200, 200, 404, 405]
    assert set(missing.json()) == set(wrong.json()) == {"error"}


def test_ignored_options_are_named_in_a_header() -> None:
    async def main() -> httpx.Response:
        async with client(Scripted(HELLO)) as c:
            return await c._client.post(
                "/api/chat", json={"messages": [USER], "options": {"num_ctx": 1}, "stream": False}
            )

    assert asyncio.run(main()).headers["x-outcore-ignored"] == "options.num_ctx"
