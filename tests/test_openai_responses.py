"""OpenAI's responses: items of a conversation, tools of several kinds, and the events of an answer in their order."""

from __future__ import annotations

import importlib
from typing import Any

import pydantic
import pytest

from outcore import RequestError
from outcore.serve.api import Defaults, ResponseWriter
from outcore.serve.events import Called, Event, GenerationRequest, Sampling, TextPart
from outcore_apis.apis import RESPONSES as API
from translated import asked, events, streamed, token

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def client_types() -> Any:
    """OpenAI's client's own: whoever but collects these tests does without the second in which it is imported."""
    return importlib.import_module("openai.types.responses")


def ask(**body: Any) -> GenerationRequest:
    (found,) = asked(API, PATH, {"input": "hi", **body}).requests
    return found


def answering(**body: Any) -> ResponseWriter:
    return asked(API, PATH, {"input": "hi", **body}).writer


def failed(writer: ResponseWriter, error: RequestError) -> bytes:
    return writer.sent(writer.failure(error, {}))


def stream(*said: Event, body: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    return streamed(answering(stream=True, **(body or {})), events(*said, **more))


def whole(*said: Event, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return answering(**(body or {})).whole(events(*said, **more))


def test_thoughts_text_and_calls_are_items_in_the_order_that_they_came_in() -> None:
    calls = (Called(0, "look", '{"x": 1}', "call_a"), Called(0, "look", "{}", "call_b", 1))
    said = (TextPart(0, reasoning="hm"), TextPart(0, "yes"), *calls)
    found = stream(*said, body={"tools": [TOOL]}, reason="tool_calls")
    kinds = [step["type"].removeprefix("response.") for step in found]
    thought = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
               "content_part.done", "output_item.done"]  # fmt: skip
    text = [kind.replace("reasoning_text", "output_text") for kind in thought]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *thought, *text, *called, *called, "completed"]
    assert [step["output_index"] for step in found if step["type"].endswith("item.done")] == [0, 1, 2, 3]
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and output[0]["summary"] == []
    first = output[2]
    assert first == {
        "id": first["id"], "type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"x": 1}',
        "status": "completed",
    }  # fmt: skip
    deltas = [step for step in found if step["type"] == "response.function_call_arguments.delta"]
    assert [step["delta"] for step in deltas] == ['{"x": 1}', "{}"] and deltas[0]["item_id"] == first["id"]
    assert found[14]["item"]["arguments"] == "" and found[14]["item"]["status"] == "in_progress"


def test_a_summary_that_is_asked_for_is_what_was_thought() -> None:
    found = stream(TextPart(0, reasoning="hm"), body={"reasoning": {"effort": "low", "summary": "auto"}})
    kinds = [step["type"].removeprefix("response.") for step in found[2:-1]]
    assert kinds == ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
                     "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"]  # fmt: skip
    assert all(step["summary_index"] == 0 for step in found[3:7])
    (item,) = found[-1]["response"]["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}] and "content" not in item


def test_a_whole_response_is_what_the_last_event_has() -> None:
    said = (TextPart(0, reasoning="hm"), TextPart(0, "yes"))
    streamed_, at_once = stream(*said)[-1]["response"], whole(*said)
    for response in (streamed_, at_once):
        for item in (response, *response["output"]):
            item.pop("id")
    assert at_once.pop("completed_at") and streamed_.pop("completed_at")
    at_once.pop("created_at"), streamed_.pop("created_at")
    assert streamed_ == at_once


ASKED = {
    "frequency_penalty": 0.5, "max_tool_calls": 3, "presence_penalty": 0.25, "prompt_cache_key": "k",
    "safety_identifier": "s", "service_tier": "default",
}  # fmt: skip
USUAL = ASKED | {"frequency_penalty": 0, "max_tool_calls": None, "presence_penalty": 0, "prompt_cache_key": None,
                 "safety_identifier": None}  # fmt: skip
TOOLS = [
    {"type": "function", "name": "bare"},
    TOOL,
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "inner"}]},
]


def test_a_response_has_all_fields_of_the_published_schema() -> None:
    given = {name: value for name, value in ASKED.items() if name != "service_tier"}
    for body, wanted in ((given | {"tools": TOOLS}, ASKED), ({}, USUAL)):
        found = whole(body=body)
        assert {name: found[name] for name in wanted} == wanted
    bare, described, _, namespace = whole(body={"tools": TOOLS})["tools"]
    assert bare == {"type": "function", "name": "bare", "description": None, "parameters": None, "strict": False}
    assert described == TOOL and namespace["tools"][0] == bare | {"name": "inner"}
    for name in ("max_tool_calls", "prompt_cache_key", "safety_identifier"):
        with pytest.raises(RequestError, match=name):
            ask(**{name: [1]})


ANSWERS: dict[str, tuple[tuple[Event, ...], dict[str, Any]]] = {
    "text": ((TextPart(0, "a"), TextPart(0, "b")), {}),
    "thought": ((TextPart(0, reasoning="hm"), TextPart(0, "a")), {}),
    "thought, as its summary": ((TextPart(0, reasoning="hm"), TextPart(0, "a")), {"reasoning": {"summary": "auto"}}),
    "calls": (
        (TextPart(0, "a"), Called(0, "bare", "{}", "call_a"), Called(0, "patch", '{"input": "x"}', "call_b", 1),
         Called(0, "ns__inner", "{}", "call_c", 2)),
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **ASKED},
    ),
    "logprobs": ((TextPart(0, "a", logprobs=(token("a", -1, token("b", -2)),)),), {"top_logprobs": 1}),
    "a schema": ((TextPart(0, "{}"),), {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
                                     "metadata": {"a": "b"}, "instructions": "be", "max_output_tokens": 9}),
    "nothing": ((), {}),
}  # fmt: skip


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_kind_of_response_is_as_openais_client_has_it(name: str, reason: str, client_types: Any) -> None:
    response = pydantic.TypeAdapter(client_types.Response)
    event = pydantic.TypeAdapter(client_types.ResponseStreamEvent)
    said, body = ANSWERS[name]
    found = response.validate_python(whole(*said, body=body, reason=reason), strict=True)
    assert found.status == ("completed" if reason == "stop" else "incomplete")
    for step in stream(*said, body=body, reason=reason):
        event.validate_python(step, strict=True)


def test_a_failure_in_a_stream_is_a_response_that_failed() -> None:
    error = RequestError("too long", "context_length_exceeded", status=413)
    begun = answering(stream=True)
    list(begun.steps(events()[0]))
    (data,) = failed(begun, error).split(b"\n\n")[:-1]
    assert data.startswith(b"event: response.failed\n") and b'"sequence_number":2' in data
    assert b'"code":"context_length_exceeded","message":"too long"' in data and b'"status":"failed"' in data
    # Clients read no failure of what was not created.
    kinds = [part.split(b"\n")[0] for part in failed(answering(stream=True), error).split(b"\n\n")[:-1]]
    assert kinds == [b"event: response.created", b"event: response.in_progress", b"event: response.failed"]
    busy = RequestError("full", "queue_full", status=429)
    assert b'"code":"rate_limit_exceeded"' in failed(answering(stream=True), busy)


def test_logprobs_go_with_the_text_that_they_are_of() -> None:
    first, second = token("a", -1, token("b", -2)), token("c")
    said = (
        TextPart(0, logprobs=(first,)),
        TextPart(0, "ac", logprobs=(second,)),
        TextPart(0, "", logprobs=(token("!"),)),
    )
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    found = stream(TextPart(0, reasoning="hm", logprobs=(token("hm"),)), *said, body=body)
    (delta,) = (step for step in found if step["type"] == "response.output_text.delta")
    assert [entry["token"] for entry in delta["logprobs"]] == ["a", "c"]
    assert delta["logprobs"][0]["top_logprobs"] == [{"token": "b", "logprob": -2, "bytes": [98]}]
    held = found[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in held] == ["a", "c", "!"]
    assert ask(include=body["include"]).logprobs == 0 and ask(top_logprobs=3).logprobs == 3 and ask().logprobs is None


def test_fields_reach_the_engine() -> None:
    found = ask(
        model="x", temperature=0.5, top_p=0.9, max_output_tokens=9, reasoning={"effort": "high"}, tools=[TOOL],
        tool_choice={"type": "function", "name": "look"}, text={"format": {"type": "json_object"}}, store=True,
    )  # fmt: skip
    assert (found.model, found.max_tokens, found.tool_choice, found.form) == ("x", 9, "look", {})
    assert found.sampling == Sampling(0.5, 0.9)
    assert found.template_options == {"enable_thinking": True, "reasoning_effort": "high"}
    inner = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert found.tools == ({"type": "function", "function": inner},)
    given = asked(API, PATH, {"input": "x"}, Defaults(Sampling(1.0), 5, {"a": 1})).requests[0]
    assert (given.sampling.temperature, given.max_tokens, given.template_options) == (1.0, 5, {"a": 1})


def test_what_has_no_effect_is_named() -> None:
    body = {"store": True, "prompt_cache_key": "k", "truncation": "auto", "text": {"verbosity": "low"}, "zap": 1,
            "include": ["reasoning.encrypted_content"], "tools": [TOOL, {"type": "web_search"}]}  # fmt: skip
    expected = ("zap", "tools[1] web_search", "include reasoning.encrypted_content", "text.verbosity", "truncation")
    assert answering(**body).ignored == expected
    assert [tool["function"]["name"] for tool in ask(**body).tools] == ["look"]


def test_items_are_messages_and_those_of_one_turn_are_one() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "dev"}]},
        {"role": "user", "content": "do"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}], "status": "x"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "zzz"},
        {"role": "assistant", "content": "done"},
        {"role": "developer", "content": "later"},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    first, second = ({"type": "function", "id": f"c{i}", "function": {"name": "look", "arguments": a}}
                     for i, a in ((1, {"x": 1}), (2, {})))  # fmt: skip
    found = ask(instructions="be", input=items)
    assert found.messages == (
        {"role": "system", "content": "be\n\ndev"},
        {"role": "user", "content": "do"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": [first, second]},
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "look"},
        {"role": "tool", "content": "two", "tool_call_id": "c2", "name": "look"},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
        {"role": "user", "content": "later"},
        {"role": "user", "content": "more"},
    )
    assert not found.continued and ask(input=items[:10]).continued
    turns = ask(input=[items[9], items[8], items[3], items[4], items[2]]).messages or ()
    said = [(turn["content"], turn.get("reasoning_content")) for turn in turns]
    assert said == [("done", None), ("ok", "so"), ("", "hm")]
    assert ask(input="hi").messages == ({"role": "user", "content": "hi"},)


CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "", "tools": [TOOL]}


def test_a_custom_tool_is_a_function_of_one_text_and_is_called_as_what_it_is() -> None:
    (tool,) = ask(tools=[CUSTOM]).tools
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"].startswith("Patch.") and 'start: "x"' in tool["function"]["description"]
    found = stream(Called(0, "patch", '{"input": "x\\n"}', "c"), body={"tools": [CUSTOM]}, reason="tool_calls")
    kinds = [step["type"].removeprefix("response.") for step in found[2:-1]]
    assert kinds == ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
                     "output_item.done"]  # fmt: skip
    (item,) = found[-1]["response"]["output"]
    expected = {"type": "custom_tool_call", "name": "patch", "call_id": "c", "input": "x\n", "status": "completed"}
    assert item == expected | {"id": item["id"]} and found[4]["input"] == "x\n"
    back = ask(input=[item, {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}]).messages
    assert back is not None and back[0]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "x\n"}}
    assert back[1]["name"] == "patch"


def test_a_namespaces_tools_are_called_with_their_namespace() -> None:
    assert [tool["function"]["name"] for tool in ask(tools=[TOOL, NAMESPACE]).tools] == ["look", "mcp__files__look"]
    (item,) = whole(Called(0, "mcp__files__look", "{}", "c"), body={"tools": [TOOL, NAMESPACE]})["output"]
    assert (item["name"], item["namespace"]) == ("look", "mcp__files")
    (back,) = ask(input=[item]).messages or ()
    assert back["tool_calls"][0]["function"]["name"] == "mcp__files__look"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "poet", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": 3}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output", "output": {}}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        ask(**body)
    assert raised.value.param == param and raised.value.status == 400 and str(raised.value).startswith(param)


def test_a_conversation_goes_on_from_its_summary(client_types: Any) -> None:
    turns = [{"role": "user", "content": "Launch on Tuesday."}, {"role": "assistant", "content": "Noted."}]
    made = asked(API, f"{PATH}/compact", {"model": "m", "input": turns, "instructions": "be brief"})
    (request,) = made.requests
    assert [m["role"] for m in request.messages] == ["system", "user", "assistant", "user"]
    assert "Summarize this conversation" in str(request.messages[-1]["content"])
    found = made.writer.whole(
        events(TextPart(0, reasoning="hm"), TextPart(0, "The launch is "), TextPart(0, "on Tuesday."))
    )
    assert client_types.CompactedResponse.model_validate(found).output[0].type == "compaction"
    assert found["usage"]["total_tokens"] == 12 and not made.writer.streams
    later = ask(input=[*found["output"], {"role": "user", "content": "When?"}]).messages
    assert later[0] == {"role": "system", "content": "The conversation so far: The launch is on Tuesday."}
    with pytest.raises(RequestError, match="model"):
        asked(API, f"{PATH}/compact", {"input": turns})
