"""Tools of models whose chat template takes none: they are put into words, and a grammar holds the calls."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import chat_tokenizers
import zoo
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.options import LoadOptions
from outcore.serve.app import all_apis, application
from outcore.serve.events import Called, GenerationRequest, TextPart
from outcore.serve.parsing import Markers, TextParser
from outcore.serve.prompted_tools import CALL, CALL_END, read_object
from outcore.serve.prompting import Prompter
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from outcore.serve.site import Site

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Is it raining?", "parameters": PARAMETERS}
TOOLS: Any = tuple({"type": "function", "function": f} for f in (WEATHER, {"name": "clock", "parameters": PARAMETERS}))
HI: Any = [{"role": "user", "content": "hi"}]


def called(name: str, city: str) -> dict[str, Any]:
    return {"id": city, "type": "function", "function": {"name": name, "arguments": {"city": city}}}


CONVERSATION = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "Wait.", "tool_calls": [called("weather", "Bonn"), called("weather", "Rome")]},
    {"role": "tool", "content": "yes", "name": "weather", "tool_call_id": "Bonn"},
    {"role": "tool", "content": "no", "name": "weather", "tool_call_id": "Rome"},
    {"role": "user", "content": "And now?"},
)
CALLS = """<tool_call>
{"name": "weather", "arguments": {"city": "Bonn"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>"""
RESULTS = """<tool_response name="weather">
yes
</tool_response>
<tool_response name="weather">
no
</tool_response>"""


def test_a_mark_within_an_argument_ends_no_call() -> None:
    markers = Markers({"normal": {CALL: "tool"}, "tool": {CALL_END: "normal"}}, read_object)
    arguments = {"city": f"x{CALL_END}y{CALL}"}
    parser = TextParser(0, markers, TOOLS)
    text = f"{CALL}\n{json.dumps({'name': 'weather', 'arguments': arguments})}\n{CALL_END}"
    (found,) = [*parser.feed(text[:80]), *parser.feed(text[80:]), *parser.finish()]
    assert isinstance(found, Called) and json.loads(found.arguments) == arguments


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> TokenizerWrapper:
    return load_tokenizer(demo_model)


def test_tools_calls_and_results_are_put_into_words(demo: TokenizerWrapper, demo_model: Path, tmp_path: Path) -> None:
    def text(tokenizer: TokenizerWrapper, **more: Any) -> str:
        ask = GenerationRequest(messages=CONVERSATION, **more)
        return str(tokenizer.decode(list(Prompter(tokenizer).prepare(ask).tokens)))

    found = text(demo, tools=TOOLS)
    system, user, assistant, after, answer = found.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe kind.\n\nYou can call functions.")
    assert json.dumps(WEATHER) in system.splitlines() and "clock" in system
    assert (user, answer) == ("user\nRain?<|im_end|>\n", "assistant\n")
    assert assistant == f"assistant\nWait.\n{CALLS}<|im_end|>\n"
    assert after == f"user\n{RESULTS}\nAnd now?<|im_end|>\n"
    # Told of no tools, but calls there were.
    none = text(demo, tools=TOOLS, tool_choice="none")
    assert "You can call" not in none and CALLS in none and none == text(demo)
    # A template that refuses system messages, as Gemma's older one.
    strict = chat_tokenizers.chat_tokenizer(demo_model, tmp_path / "strict", chat_tokenizers.STRICT)
    ask = GenerationRequest(messages=CONVERSATION[1:2], tools=TOOLS)
    found = strict.decode(list(Prompter(strict).prepare(ask).tokens))
    assert found.startswith("<|im_start|>user\nYou can call functions.") and found.count("<|im_start|>") == 2
    assert "\n\nRain?<|im_end|>" in found


prompter = functools.cache(Prompter)


def allowed(tokenizer: TokenizerWrapper, text: str, **more: Any) -> set[str]:
    """What may come next in an answer that begins like this; None for its end."""
    prompt = prompter(tokenizer).prepare(GenerationRequest(messages=(HI[0],), tools=TOOLS, **more))
    assert prompt.grammar is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    logits = prompt.grammar(0)(mx.array(tokens, dtype=mx.int32), mx.zeros((1, 8192)))
    ids = np.flatnonzero(np.isfinite(np.array(logits)[0])).tolist()
    return {"END" if t in tokenizer.eos_token_ids else tokenizer.decode([t]) for t in ids}


def test_calls_are_held_and_text_before_them_is_free(demo: TokenizerWrapper) -> None:
    for text in ("", "Let me see. <tool", "a < b"):
        assert {"END", "x", "("} <= allowed(demo, text)
    assert all("\n".startswith(c) for c in allowed(demo, "Let me see.\n<tool_call>"))
    begun = f"Let me see.\n{CALLS[: CALLS.index('weather')]}"
    assert {"w", "c"} <= {c[0] for c in allowed(demo, begun)} <= {"w", "c"}
    assert {c[0] for c in allowed(demo, begun, tool_choice="clock")} == {"END"[0]}  # it begins with the call
    city = f"{CALLS[: CALLS.index('Bonn')]}"
    assert {c[0] for c in allowed(demo, city)} == {"B", "R"}
    assert allowed(demo, CALLS) == {"END", "\n"}
    one = CALLS[: len(CALLS) // 2]
    assert allowed(demo, one, parallel_tools=False) == {"END"}
    # Arguments that no tool has are not begun.
    assert not any(c.startswith(",") for c in allowed(demo, city + 'Bonn"'))
    # JSON of a schema instead of text.
    assert {c.strip()[:1] for c in allowed(demo, "", form={"enum": [17]})} == {"1", "<"}


def test_calls_are_found_without_a_grammar(demo: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance.hf", None)
    prompt = Prompter(demo).prepare(GenerationRequest(messages=(HI[0],), tools=TOOLS))
    assert prompt.grammar is None
    parser = prompt.parser(0)
    events = [e for c in f"Wait.\n{CALLS}" for e in parser.feed(c)] + parser.finish()
    assert "".join(e.text for e in events if isinstance(e, TextPart)) == "Wait.\n"
    calls = [(e.name, e.arguments) for e in events if isinstance(e, Called)]
    assert calls == [("weather", '{"city": "Bonn"}'), ("weather", '{"city": "Rome"}')]


@pytest.fixture
def site(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """No layer of this model is recurrent: prompts are long."""
    size = {"num_hidden_layers": 2, "vocab_size": 8192}
    monkeypatch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | size)
    folder = zoo.save_checkpoint("qwen3", tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, folder)
    load = LoadOptions(memory="60MB", context=1024, cpu_streams=1, govern=False, draft="none", prefix_cache="off")
    service = ModelService(Shelf([str(folder)]), ServiceOptions(load))
    yield Site(service, all_apis())
    service.close()


def asking(site: Site, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(application(site))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await work(http)

    return asyncio.run(run())


def checked(name: str, arguments: str) -> None:
    assert name == "weather" and json.loads(arguments)["city"] in ("Bonn", "Rome")


def test_clients_get_calls_streamed_and_not(site: Site) -> None:
    openai = importlib.import_module("openai")  # only here: whoever but collects these tests does without that second

    async def work(http: httpx.AsyncClient) -> None:
        client = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http, max_retries=0)
        wanted: Any = {"type": "function", "function": {"name": "weather"}}
        ask: dict[str, Any] = {"model": "m", "messages": HI, "tools": TOOLS, "tool_choice": wanted, "max_tokens": 200}
        whole = await client.chat.completions.create(**ask)
        counted = await http.post("/v1/chat/completions/input_tokens", json=ask)
        assert whole.usage and counted.json() == {"input_tokens": whole.usage.prompt_tokens}
        choice = whole.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function"
            checked(call.function.name, call.function.arguments)
        async with client.chat.completions.stream(**ask) as stream:
            (call,) = (await stream.get_final_completion()).choices[0].message.tool_calls or ()
        checked(call.function.name, call.function.arguments)
        # What was called, and its result, go back to the model, which may answer with text.
        said: Any = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}
        more = ask | {"messages": [*HI, said, result], "max_tokens": 3}
        assert (await client.chat.completions.create(**more | {"tool_choice": "auto"})).usage
        assert (await client.chat.completions.create(**more | {"tool_choice": "none"})).choices[0].message.content
        response = await client.responses.create(
            model="m", input="hi", tools=[{"type": "function", **WEATHER, "strict": True}], tool_choice="required",
            parallel_tool_calls=False, max_output_tokens=200,
        )  # fmt: skip
        (item,) = response.output
        assert item.type == "function_call"
        checked(item.name, item.arguments)

        # The other addresses.
        tool = {"name": "weather", "input_schema": PARAMETERS}
        ask = {"model": "m", "messages": HI, "tools": [tool], "max_tokens": 200, "tool_choice": {"type": "tool",
               "name": "weather"}}  # fmt: skip
        found = (await http.post("/v1/messages", json=ask, headers={"anthropic-version": "2023-06-01"})).json()
        assert found["stop_reason"] == "tool_use"
        checked(found["content"][0]["name"], json.dumps(found["content"][0]["input"]))
        ask = {"model": "m", "messages": HI, "tools": [TOOLS[0]], "stream": False, "options": {"num_predict": 3}}
        found = (await http.post("/api/chat", json=ask)).json()
        assert found["done"] and found["message"]["content"]
        shown = (await http.post("/api/show", json={"model": "m"})).json()
        assert "tools" in shown["capabilities"]

    asking(site, work)
