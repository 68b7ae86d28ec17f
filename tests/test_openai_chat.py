"""OpenAI's chats: what a body asks for, what is refused, and what clients read of an answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from outcore import RequestError
from outcore.checks import COUNT
from outcore.serve.api import Defaults
from outcore.serve.app import OPENAI as API
from outcore.serve.events import Called, Event, Finished, GenerationRequest, Sampling, TextPart
from outcore.serve.openai import timings
from outcore.serve.requests import SamplerFields
from translated import asked, events, streamed, token

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


def ask(defaults: Defaults | None = None, **body: Any) -> GenerationRequest:
    (found,) = asked(API, PATH, {"messages": HI, **body}, defaults).requests
    return found


def chunks(*said: Event, body: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    return streamed(asked(API, PATH, {"messages": HI, "stream": True, **(body or {})}).writer, events(*said, **more))


def whole(*said: Event, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return asked(API, PATH, {"messages": HI, **(body or {})}).writer.whole(events(*said, **more))


def deltas(found: list[Any]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in found[:-1] if chunk["choices"]]


def test_usage_comes_after_the_last_delta_and_before_done() -> None:
    found = chunks(TextPart(0, "x"), body={"stream_options": {"include_usage": True}}, thought=3)
    *others, last, done = found
    assert done == "[DONE]" and last["choices"] == []
    assert [chunk["usage"] for chunk in others] == [None, None, None]
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert last["timings"]["prompt_per_second"] == 6 and last["timings"]["predicted_per_second"] == 3


def test_each_choice_has_its_own_role_and_end() -> None:
    found = chunks(TextPart(1, "b"), TextPart(0, "a"), body={"n": 2}, choices=2)
    parts = [chunk["choices"][0] for chunk in found[:-1]]
    assert [p["index"] for p in parts if p["delta"].get("role")] == [0, 1]
    assert [(p["index"], p["delta"]["content"]) for p in parts if p["delta"].get("content")] == [(1, "b"), (0, "a")]
    assert [p["index"] for p in parts if p["finish_reason"]] == [0, 1]
    answer = whole(TextPart(1, "b"), TextPart(0, "a"), body={"n": 2}, choices=2)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "a"), (1, "b")]


def test_a_call_streams_its_name_first_and_its_arguments_as_a_string() -> None:
    calls = (Called(0, "look", '{"x": 1}', "call_a"), Called(0, "see", "{}", "call_b", 1))
    found = chunks(*calls, body={"tools": [TOOL]}, reason="tool_calls")
    parts = [d["tool_calls"][0] for d in deltas(found) if "tool_calls" in d]
    assert parts == [
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x": 1}'}},
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "see", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    message = whole(*calls, reason="tool_calls")["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][1] == {
        "id": "call_b",
        "type": "function",
        "function": {"name": "see", "arguments": "{}"},
    }


def test_reasoning_is_separate_under_both_names() -> None:
    said = (TextPart(0, reasoning="hm"), TextPart(0, "yes"))
    assert deltas(chunks(*said))[1:3] == [{"reasoning_content": "hm", "reasoning": "hm"}, {"content": "yes"}]
    message = whole(*said)["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("hm", "hm", "yes")
    assert "reasoning" not in whole(TextPart(0, "yes"))["choices"][0]["message"]


def test_logprobs_have_tokens_bytes_and_the_likeliest() -> None:
    first = token("é", -0.1, token("é", -0.1), token("x", float("-inf")))
    body = {"logprobs": True, "top_logprobs": 2}
    said = (TextPart(0, reasoning="hm", logprobs=(token("hm"),)), TextPart(0, "é", logprobs=(first,)), TextPart(0, "!"))
    (entry,) = whole(*said, body=body)["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "é",
        "logprob": -0.1,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.1, "bytes": [195, 169]},
            {"token": "x", "logprob": -9999.0, "bytes": [120]},
        ],
    }
    told = [c["choices"][0]["logprobs"] for c in chunks(*said, body=body)[:-1]]
    assert told[0] is None and told[-1] is None
    assert [len(t["content"]) for t in told[1:-1]] == [0, 1, 0]
    assert whole(*said)["choices"][0]["logprobs"] is None


def test_an_error_in_a_stream_is_an_error_object_without_done() -> None:
    answering = asked(API, PATH, {"messages": HI, "stream": True}).writer
    error = RequestError("the disk is gone", "internal_error", status=500)
    data = answering.sent(answering.failure(error, API.error_body(error)))
    assert (
        data.startswith(b'data: {"error":{"message":"the disk is gone","type":"server_error"') and b"DONE" not in data
    )
    assert answering.keepalive().startswith(b":") and answering.keepalive().endswith(b"\n\n")


def test_half_a_surrogate_in_an_answer_does_not_break_a_stream() -> None:
    found = chunks(Called(0, "look", '{"x": "\ud800"}', "c"))
    assert deltas(found)[2]["tool_calls"][0]["function"]["arguments"] == '{"x": "\ud800"}'


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RequestError("no", param="top_p"), "invalid_request_error", None),
        (RequestError("no", "model_not_found", status=404), "invalid_request_error", "model_not_found"),
        (RequestError("no", "invalid_api_key", status=401), "authentication_error", "invalid_api_key"),
        (RequestError("no", "queue_full", status=429), "rate_limit_error", "queue_full"),
        (RequestError("no", "shutting_down", status=503), "server_error", "shutting_down"),
    ],
)
def test_errors_are_openais_object(error: RequestError, kind: str, code: str | None) -> None:
    assert API.error_body(error) == {"error": {"message": "no", "type": kind, "param": error.param, "code": code}}


def test_numbers_reach_the_sampler_and_the_length() -> None:
    numbers = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 4, "seed": 3, "frequency_penalty": -1,
               "presence_penalty": 2, "xtc_probability": 0.5}  # fmt: skip
    found = ask(**numbers, logit_bias={"5": -100}, max_tokens=9, max_completion_tokens=8, stop="a")
    assert found.sampling == Sampling(**numbers, logit_bias={5: -100.0})
    assert {f.name for f in fields(Sampling)} - {"post_sampling_probs"} == set(SamplerFields.model_fields)
    assert (found.max_tokens, found.stop, found.choices) == (8, ("a",), 1)
    assert ask(max_tokens=9).max_tokens == 9 and ask(stop=["a", "b"]).stop == ("a", "b") and ask(n=3).choices == 3
    assert ask(repetition_penalty=0).sampling.repetition_penalty == 1
    assert ask(max_tokens=-1).max_tokens == COUNT  # LM Studio's and llama.cpp's word for no limit


def test_what_a_request_does_not_say_is_the_servers_default() -> None:
    defaults = Defaults(Sampling(0.7, top_k=9, logit_bias={1: 2.0}), 33, {"enable_thinking": False, "x": 1})
    found = ask(defaults, top_k=2, temperature=None, chat_template_kwargs={"x": 2})
    assert found.sampling == Sampling(0.7, top_k=2, logit_bias={1: 2.0}) and found.max_tokens == 33
    assert found.template_options == {"enable_thinking": False, "x": 2}
    assert ask(defaults, temperature=0, logit_bias={}).sampling == Sampling(0, top_k=9)
    assert ask().sampling.temperature == 0 and ask().max_tokens is None


def test_an_effort_is_said_to_templates_in_the_words_that_they_know() -> None:
    assert ask(reasoning_effort="none").template_options == {"enable_thinking": False}
    assert ask(reasoning_effort="low").template_options == {"enable_thinking": True, "reasoning_effort": "low"}
    assert ask(reasoning_effort="xhigh").template_options["reasoning_effort"] == "high"
    own = {"enable_thinking": False}
    assert ask(reasoning_effort="low", chat_template_kwargs=own).template_options["enable_thinking"] is False


def test_tools_reach_the_template() -> None:
    odd = {"type": "function", "function": {"name": "f", "strict": True, "more": 1}}
    found = ask(tools=[TOOL, odd], parallel_tool_calls=False)
    assert found.tools == (TOOL, {"type": "function", "function": {"name": "f", "strict": True}})
    assert found.tool_choice == "auto" and not found.parallel_tools
    assert ask(tools=[TOOL], tool_choice="required").tool_choice == "required"
    assert ask(tools=[TOOL], tool_choice="none").tool_choice == "none" and ask(tools=[]).tools == ()
    chosen = {"type": "function", "function": {"name": "look"}}
    assert ask(tools=[TOOL], tool_choice=chosen).tool_choice == "look"


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {}),
        ({"type": "json_object", "schema": {"const": 1}}, {"const": 1}),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"const": 1}}}, {"const": 1}),
        ({"type": "json_schema", "schema": {"const": 1}}, {"const": 1}),
    ],
)
def test_formats_are_schemas(form: Any, schema: Any) -> None:
    assert ask(response_format=form).form == schema
    assert ask(json_schema=schema).form == schema  # llama.cpp's


def test_unknown_fields_have_no_effect_and_are_named() -> None:
    body = {"messages": HI, "user": "me", "metadata": {}, "zap": 1, "verbosity": "low", "a,b\n": 2, "gone": None}
    found = asked(API, PATH, body)
    assert found.writer.ignored == ("zap", "verbosity", "ab")
    assert len(asked(API, PATH, {"messages": HI} | {f"x{i}": 1 for i in range(99)}).writer.ignored) == 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 10**5000}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"functions": [{}]}, "functions"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"model": 7}, "model"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        ask(**body)
    assert (raised.value.param, raised.value.status) == (param, 400) and str(raised.value).startswith(param)


def test_translating_needs_no_mlx() -> None:
    code = "import sys, outcore.serve.openai; sys.exit(any(m.split('.')[0] in ('mlx', 'mlx_lm') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_token_has_no_rate() -> None:
    """The first token comes with the prompt: N of them have N - 1 times between them."""

    def rate(tokens: int, choices: int) -> Any:
        return timings(Finished(5, tokens, generation_s=2.0, choices=choices))["predicted_per_second"]

    assert [rate(1, 1), rate(7, 1), rate(12, 2), rate(0, 1)] == [0, 3, 5, 0]
