"""Ollama's API as a translation: bodies to what the engine is asked, events to lines of JSON."""

import asyncio
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from outcore.checks import COUNT
from outcore.serve.api import Defaults, HttpRequest, ParsedRequest
from outcore.serve.events import GenerationRequest, RequestError, Sampling, TextPart, TokenLogprob
from outcore_apis import ollama
from outcore_apis.apis import OLLAMA as API
from outcore_apis.ollama import OllamaWriter
from outcore_apis.ollama_models import running, show, tags
from scripted import CALLS, CARD, HELLO, OTHER, THOUGHT, Scripted, said

DEFAULTS = Defaults(Sampling(temperature=0.3, top_k=7), 77, {"enable_thinking": False, "own": 1})
USER = {"role": "user", "content": "Hello"}
CHAT, GENERATE = API.routes[:2]
ROUTES = {route.path: route for route in API.routes}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def parsed(body: dict[str, Any], endpoint: Any = CHAT) -> ParsedRequest:
    found = endpoint.handle(HttpRequest(Scripted([]), body, defaults=DEFAULTS))
    assert isinstance(found, ParsedRequest)
    return found


def asked(**body: Any) -> GenerationRequest:
    return parsed({"messages": [USER]} | body).requests[0]


def prompted(**body: Any) -> GenerationRequest:
    return parsed({"prompt": "Hello"} | body, GENERATE).requests[0]


def refusal(body: dict[str, Any], endpoint: Any = CHAT) -> RequestError:
    with pytest.raises(RequestError) as caught:
        endpoint.handle(HttpRequest(Scripted([]), body, defaults=DEFAULTS))
    return caught.value


def lines(answer: Any, events: list[Any]) -> list[dict[str, Any]]:
    text = (b"".join(answer.sent(answer.steps(e)) for e in events) + answer.closing()).decode()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    assert TIME.fullmatch(record["created_at"])
    return {name: value for name, value in record.items() if name != "created_at"}


def test_what_a_request_does_not_say_is_the_servers() -> None:
    expected = GenerationRequest(
        "m", (USER,), max_tokens=77, sampling=DEFAULTS.sampling, template_options=DEFAULTS.template_options,
    )  # fmt: skip
    assert asked(model="m:latest") == asked(model="m") == asked(name="m") == expected
    assert prompted(model="m") == expected
    assert asked(model="m:4b").model == "m:4b"


def test_options_are_the_samplers() -> None:
    options = {
        "temperature": 0.7, "top_k": 40.0, "top_p": 0.9, "min_p": 0.05, "seed": 42, "repeat_penalty": 1.1,
        "repeat_last_n": 64, "presence_penalty": 0.5, "frequency_penalty": 0.6, "num_predict": 128, "stop": ["END", ""],
    }  # fmt: skip
    ask = asked(options=options)
    assert ask.sampling == Sampling(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=42, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.6, repetition_context_size=64, presence_context_size=64, frequency_context_size=64,
    )  # fmt: skip
    assert (ask.max_tokens, ask.stop) == (128, ("END",))
    assert asked(options={"stop": "END"}).stop == ("END",)
    assert asked(options=dict.fromkeys(options)) == asked()


def test_numbers_that_mean_none_or_any() -> None:
    assert asked(options={"seed": -1, "top_k": -1}).sampling == replace(DEFAULTS.sampling, seed=None, top_k=0)
    off = {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1.0}
    assert asked(options=off).sampling == DEFAULTS.sampling
    assert asked(options={"repeat_penalty": 0}).sampling.repetition_penalty == 1
    assert asked(options={"repeat_last_n": -1}).sampling.repetition_context_size == COUNT
    assert [asked(options={"num_predict": n}).max_tokens for n in (-1, -2, 0)] == [COUNT] * 3


def test_what_says_nothing_here_is_named() -> None:
    body = {"messages": [USER], "options": {"num_ctx": 8192, "mirostat": 1, "num_gpu": None, "top_k": 1}, "shift": True}
    assert parsed(body).writer.ignored == ("shift", "options.num_ctx", "options.mirostat")


@pytest.mark.parametrize(
    "think, options",
    [
        (None, {"enable_thinking": False}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_think_is_an_option_of_the_template(think: Any, options: dict[str, Any]) -> None:
    assert asked(think=think).template_options == {"own": 1, **options}


def test_format() -> None:
    assert [asked(format=f).form for f in (None, "", "json", {"type": "object"})] == [
        None,
        None,
        {},
        {"type": "object"},
    ]


@pytest.mark.parametrize(
    "given, seconds",
    [(None, None), (300, 300), (0, 0), (-1, -1), ("5m", 300), ("1h30m", 5400), ("-1", -1), ("-1m", -60), ("0", 0),
     ("1.5s", 1.5), ("100ms", 0.1), ("24h", 86400), ("2.5", 2.5)],
)  # fmt: skip
def test_keep_alive(given: Any, seconds: float | None) -> None:
    assert asked(keep_alive=given).keep_alive == (None if seconds is None else pytest.approx(seconds))


def test_logprobs() -> None:
    assert [asked(**b).logprobs for b in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3})] == [
        None,
        0,
        3,
    ]
    assert asked(top_logprobs=3).logprobs is None


def test_messages_tools_and_results() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    history = [
        {"role": "System", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm", "images": None,
         "tool_calls": [call, {"id": "c", "function": {"name": "clock"}}, call]},
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "18", "tool_name": "weather"},
        {"role": "tool", "content": "19"},
        {"role": "tool", "content": "20", "name": "other"},
        {"role": "tool", "content": "21", "tool_call_id": "x"},
    ]  # fmt: skip
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": parameters}}
    ask = asked(messages=history, tools=[tool, {"function": {"name": "clock", "parameters": None}}])
    arguments = {"city": "Paris"}
    assert [dict(m) for m in ask.messages or ()] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}},
            {"id": "c", "type": "function", "function": {"name": "clock", "arguments": {}}},
            {"id": "call00002", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "c", "name": "clock"},
        {"role": "tool", "content": "18", "tool_call_id": "call00000", "name": "weather"},
        {"role": "tool", "content": "19", "tool_call_id": "call00002", "name": "weather"},
        {"role": "tool", "content": "20", "name": "other"},
        {"role": "tool", "content": "21", "tool_call_id": "x"},
    ]  # fmt: skip
    assert ask.tools[0] == tool
    assert ask.tools[1]["function"] == {"name": "clock"}


def test_an_assistants_last_message_is_continued() -> None:
    assert asked(messages=[USER, {"role": "assistant", "content": "It is"}]).continued
    assert asked(messages=[USER, {"role": "assistant", "thinking": "Hm"}]).continued
    assert not asked(messages=[USER, {"role": "assistant", "content": ""}]).continued
    called = {"role": "assistant", "content": "Wait", "tool_calls": [{"function": {"name": "clock"}}]}
    assert not asked(messages=[USER, called]).continued
    assert not asked().continued


def test_a_prompt_with_a_system_message_and_a_raw_one() -> None:
    assert prompted(system="Be brief.").messages == ({"role": "system", "content": "Be brief."}, USER)
    raw = prompted(raw=True, context=[], suffix="", template="", images=[])
    assert (raw.prompt, raw.messages) == ("Hello", None)


@pytest.mark.parametrize(
    "path, endpoint, body",
    [
        ("messages[0].role", CHAT, {"messages": [{"role": "narrator"}]}),
        ("messages[0].images", CHAT, {"messages": [USER | {"images": ["aGk="]}]}),
        ("messages[0].tool_calls[0].function", CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("messages[0].tool_calls[0].function.arguments", CHAT, {"messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]}]}),
        ("tools[0].type", CHAT, {"messages": [USER], "tools": [{"type": "other"}]}),
        ("options.temperature", CHAT, {"messages": [USER], "options": {"temperature": 1e-40}}),
        ("options.top_k", CHAT, {"messages": [USER], "options": {"top_k": 1.5}}),
        ("options.repeat_last_n", CHAT, {"messages": [USER], "options": {"repeat_last_n": -2}}),
        ("format", CHAT, {"messages": [USER], "format": "xml"}),
        ("think", CHAT, {"messages": [USER], "think": "much"}),
        ("keep_alive", CHAT, {"messages": [USER], "keep_alive": "5 minutes"}),
        ("top_logprobs", CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}),
        ("images", GENERATE, {"prompt": "Hello", "images": ["aGk="]}),
        ("suffix", GENERATE, {"prompt": "Hello", "suffix": "!"}),
        ("template", GENERATE, {"prompt": "Hello", "template": "{{ .Prompt }}"}),
        ("context", GENERATE, {"prompt": "Hello", "context": [1, 2]}),
        ("system", GENERATE, {"prompt": "Hello", "raw": True, "system": "Be brief."}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_path(path: str, endpoint: Any, body: dict[str, Any]) -> None:
    error = refusal(body, endpoint)
    assert (error.status, error.param) == (400, path)
    assert API.error_body(error) == {"error": str(error)} and str(error).startswith(f"{path}: ")


FIGURES = {
    "done_reason": "stop", "load_duration": 250_000_000, "prompt_eval_count": 12, "prompt_eval_duration": 1_500_000_000,
    "eval_count": 5, "eval_duration": 2_000_000_000,
}  # fmt: skip


@pytest.mark.parametrize("shape", ["chat", "generate"])
def test_lines_of_an_answer(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.cycle([100.0, 107.25])  # of 7.25 seconds until the end of an answer
    monkeypatch.setattr(ollama.time, "monotonic", lambda: next(clock))

    def part(text: str) -> dict[str, Any]:
        return {"response": text} if shape == "generate" else {"message": {"role": "assistant", "content": text}}

    *pieces, last = lines(OllamaWriter(True, chat=shape == "chat", model="demo:latest"), HELLO)
    assert [untimed(piece) for piece in pieces] == [
        {"model": "demo:latest", **part(text), "done": False} for text in ("Hel", "lo")
    ]
    expected = {"model": "demo:latest", **part(""), "done": True, "total_duration": 7_250_000_000, **FIGURES}
    assert untimed(last) == expected
    whole = OllamaWriter(False, chat=shape == "chat", model="demo:latest").whole(HELLO)
    assert untimed(whole) == expected | part("Hello")


def test_what_was_thought_and_calls() -> None:
    thought = [line["message"] for line in lines(OllamaWriter(True, chat=True, model=""), THOUGHT)]
    assert thought[0] == {"role": "assistant", "content": "", "thinking": "Hm"}
    assert thought[2] == {"role": "assistant", "content": "Yes"}
    assert OllamaWriter(True, chat=False, model="").whole(THOUGHT)["thinking"] == "Hmm."
    assert OllamaWriter(True, chat=False, model="").whole(THOUGHT)["model"] == "demo"
    first = {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}}
    second = {"id": "call_2", "function": {"index": 1, "name": "clock", "arguments": {}}}
    called = lines(OllamaWriter(True, chat=True, model="demo"), CALLS)
    assert [line["message"].get("tool_calls") for line in called] == [None, [first], [second], None]
    assert called[-1]["done_reason"] == "stop"
    whole = OllamaWriter(True, chat=True, model="demo").whole(CALLS)
    assert whole["message"] == {"role": "assistant", "content": "Let me look.", "tool_calls": [first, second]}


def test_logprobs_of_tokens() -> None:
    token = TokenLogprob(5, "Hi", b"Hi", -0.5, (TokenLogprob(6, "Ho", b"Ho", -float("inf")),))
    other = {"token": "Ho", "logprob": -9999.0, "bytes": [72, 111]}
    expected = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [other]}]
    events = said(TextPart(0, "Hi", logprobs=(token,)))
    for record in (
        lines(OllamaWriter(True, chat=True, model="demo"), events)[0],
        OllamaWriter(True, chat=True, model="demo").whole(events),
    ):
        assert record["logprobs"] == expected
    assert "logprobs" not in OllamaWriter(True, chat=True, model="demo").whole(HELLO)


def test_what_keeps_a_stream_alive_is_a_record_and_a_failure_ends_it() -> None:
    answer = OllamaWriter(True, chat=False, model="demo")
    assert untimed(json.loads(answer.keepalive())) == {"model": "demo", "response": "", "done": False}
    told = API.error_body(RequestError("No."))
    assert answer.sent(answer.failure(RequestError("No."), told)) == b'{"error":"No."}\n'


def loaded(body: dict[str, Any], endpoint: Any, service: Scripted) -> dict[str, Any]:
    return untimed(asyncio.run(endpoint.handle(HttpRequest(service, body))))


def test_without_a_prompt_a_model_is_loaded_or_unloaded() -> None:
    service = Scripted([])
    empty = {"message": {"role": "assistant", "content": ""}, "done": True}
    assert loaded({"model": "demo:latest"}, CHAT, service) == {"model": "demo:latest", **empty, "done_reason": "load"}
    assert loaded({"model": "demo", "keep_alive": "0", "messages": []}, CHAT, service)["done_reason"] == "unload"
    found = loaded({"prompt": "", "keep_alive": 30, "stream": False}, GENERATE, service)
    assert found == {"model": "demo", "response": "", "done": True, "done_reason": "load"}
    assert service.loads == [("demo", None), ("demo", 0), ("", 30)]


def told(handle: Any, body: dict[str, Any] | None = None) -> Any:
    return handle(HttpRequest(Scripted([]), body or {}, defaults=DEFAULTS))


DETAILS = {
    "parent_model": "", "format": "safetensors", "family": "qwen3", "families": ["qwen3"], "parameter_size": "8.0B",
    "quantization_level": "4-bit", "context_length": 4096, "embedding_length": 2560,
}  # fmt: skip


def test_tags() -> None:
    first, second = told(tags)["models"]
    assert first == {
        "name": "demo:latest", "model": "demo:latest", "digest": CARD.digest, "details": DETAILS, "size": 5_000_000,
        "modified_at": "2023-11-14T22:13:20.000000Z", "capabilities": ["completion", "tools", "thinking"],
    }  # fmt: skip
    assert second["name"] == "folder/other:4b" and second["capabilities"] == ["completion"]
    assert second["details"]["quantization_level"] == "unknown" and second["details"]["parameter_size"] == "135M"


def test_models_in_memory() -> None:
    (one,) = told(running)["models"]
    assert one == {
        "name": "demo:latest", "model": "demo:latest", "digest": CARD.digest, "details": DETAILS, "size": 3_000_000,
        "size_vram": 3_000_000, "expires_at": "2027-01-15T08:00:00.500000Z", "context_length": 4096,
    }  # fmt: skip


def test_show() -> None:
    found = told(show, {"model": "demo:latest"})
    assert found["details"] == DETAILS and found["capabilities"] == ["completion", "tools", "thinking"]
    assert found["model_info"] == {
        "general.architecture": "qwen3", "general.basename": "demo", "general.parameter_count": 8_030_000_000,
        "qwen3.context_length": 4096, "qwen3.block_count": 36, "qwen3.embedding_length": 2560,
    }  # fmt: skip
    assert found["template"] == "{{ messages }}" and found["license"] == ""
    assert "FROM demo\nPARAMETER temperature 0.3\n" in found["modelfile"]
    with pytest.raises(RequestError, match="no model none"):
        told(show, {"name": "none"})


def test_lengths_are_found_where_a_model_with_vision_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"vision_config": {}, "text_config": {"num_hidden_layers": 3, "max_position_embeddings": 99}}
    monkeypatch.setattr(Scripted, "models", lambda self: [replace(OTHER, config=config)])
    info = told(show, {"model": OTHER.name})["model_info"]
    assert (info["llama.block_count"], info["llama.context_length"]) == (3, 99)


def test_what_ollama_has_and_this_server_has_not_says_what_to_do() -> None:
    for path in ("/api/create", "/api/push", "/api/copy", "/api/delete"):
        with pytest.raises(RequestError, match=f"{path} is not supported: .{{20}}") as caught:
            told(ROUTES[path].handle)
        assert caught.value.status == 501
    assert ROUTES["/api/delete"].method == "DELETE"
    assert told(ROUTES["/api/pull"].handle, {"model": "demo:latest"}) == {"status": "success"}
    assert told(ROUTES["/api/pull"].handle, {"model": "other:4b"}) == {"status": "success"}
    with pytest.raises(RequestError, match="other: this server downloads no models") as caught:
        told(ROUTES["/api/pull"].handle, {"model": "other"})
    assert caught.value.status == 501
