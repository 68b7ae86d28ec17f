"""Anthropic's Messages API as a translation: bodies to what the engine is asked, events to what is sent."""

import json
from dataclasses import replace
from typing import Any

import pytest

from outcore.serve.api import Defaults, HttpRequest, ParsedRequest
from outcore.serve.events import Begun, GenerationRequest, RequestError, Sampling, TextPart
from outcore_apis.anthropic import MessageWriter
from outcore_apis.apis import ANTHROPIC as API
from scripted import CALLS, THOUGHT, Scripted, said

DEFAULTS = Defaults(Sampling(temperature=0.3, min_p=0.1), 77, {"enable_thinking": False, "own": 1})
TOOL = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": {"city": {}}}}
USER = {"role": "user", "content": "Hello"}


def parsed(body: dict[str, Any]) -> ParsedRequest:
    asked = API.routes[0].handle(
        HttpRequest(Scripted([]), {"max_tokens": 9, "messages": [USER]} | body, defaults=DEFAULTS)
    )
    assert isinstance(asked, ParsedRequest)
    return asked


def asked(**body: Any) -> GenerationRequest:
    return parsed(body).requests[0]


def messages(*given: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [dict(m) for m in asked(messages=list(given), **body).messages or ()]


def refusal(**body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(body)
    return caught.value


def sent(events: list[Any], **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of what a stream sends."""
    message = MessageWriter(streams=True, **options)
    text = (b"".join(message.sent(message.steps(e)) for e in events) + message.closing()).decode()
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in blocks)
    return [(name[7:], json.loads(data[6:])) for name, data in blocks]


def test_a_plain_request() -> None:
    ask = asked(model="m")
    assert ask == GenerationRequest(
        "m", ({"role": "user", "content": "Hello"},), max_tokens=9, sampling=DEFAULTS.sampling,
        template_options={"enable_thinking": False, "own": 1},
    )  # fmt: skip


def test_the_sampler_and_stop_sequences_of_a_request_come_on_top_of_the_servers() -> None:
    ask = asked(temperature=1, top_p=0.9, top_k=40, stop_sequences=["END", "\n\n"])
    assert ask.sampling == replace(DEFAULTS.sampling, temperature=1, top_p=0.9, top_k=40)
    assert ask.stop == ("END", "\n\n")


@pytest.mark.parametrize(
    "system", ["Be brief.\n\nBe kind.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                                         {"type": "text", "text": "Be kind."}]],
)  # fmt: skip
def test_system_is_a_string_or_blocks(system: Any) -> None:
    assert messages(USER, system=system)[0] == {"role": "system", "content": "Be brief.\n\nBe kind."}


def test_blocks_of_a_message_are_one_text_and_turns_of_one_role_are_one() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]
    first = {"role": "user", "content": parts}
    system = {"role": "system", "content": "Now in French."}
    assert messages(system, first, USER, system="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nNow in French."},
        {"role": "user", "content": "What is it?\n\nHello"},
    ]


def test_a_system_message_in_between_is_of_the_users_turn() -> None:
    answer, system = {"role": "assistant", "content": "Hi"}, {"role": "system", "content": "Now in French."}
    marked = "<system-reminder>\nNow in French.\n</system-reminder>"
    assert messages(USER, answer, system, USER) == [USER, answer, {"role": "user", "content": f"{marked}\n\nHello"}]


def test_tools_calls_and_results() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "Which city?", "signature": "x"}
    answer = [thought, {"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "I look."}, used]
    results = [
        {"type": "text", "text": "And now?"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18"},
                                                                {"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3", "is_error": True, "content": "Error: again"},
        {"type": "tool_result", "tool_use_id": "t4"},
    ]  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert messages(USER, {"role": "assistant", "content": answer}, {"role": "user", "content": results})[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Which city?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "18\nsunny", "name": "weather"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "tool", "tool_call_id": "t3", "content": "Error: again"},
        {"role": "tool", "tool_call_id": "t4", "content": ""},
        {"role": "user", "content": "And now?"},
    ]
    ask = asked(tools=[TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}])
    function = {"name": "weather", "parameters": TOOL["input_schema"], "description": "Of a city", "strict": True}
    assert ask.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    "choice, expected",
    [
        (None, ("auto", True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "weather"}, ("weather", True)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, bool]) -> None:
    ask = asked(tools=[TOOL], tool_choice=choice)
    assert (ask.tool_choice, ask.parallel_tools) == expected


def test_an_assistants_last_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    ask = asked(messages=[USER, begun])
    assert ask.continued and ask.messages and ask.messages[-1] == begun
    empty = asked(messages=[USER, {"role": "assistant", "content": ""}])
    assert not empty.continued and empty.messages == (USER,)
    none = asked(messages=[], system="Be brief.")
    assert none.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": ""})
    assert not asked().continued


@pytest.mark.parametrize("kind, thinks", [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_an_option_of_the_template(kind: str, thinks: bool) -> None:
    found = parsed({"thinking": {"type": kind, "budget_tokens": 2000}})
    assert found.requests[0].template_options == {"enable_thinking": thinks, "own": 1}


def test_effort_is_an_option_of_the_template_in_words_that_templates_know() -> None:
    efforts = [asked(output_config={"effort": e}).template_options["reasoning_effort"] for e in ("low", "xhigh", "max")]
    assert efforts == ["low", "high", "high"]


def test_structured_output() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert asked(output_config={"format": form}).form == {"type": "object"}
    assert asked(output_format=form).form == {"type": "object"}
    assert asked(output_config={"effort": "low"}, output_format=form).form == {"type": "object"}
    assert asked(output_config={}).form is None


@pytest.mark.parametrize(
    "path, body",
    [
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content[1]", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, 1]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}),
        ("messages[0].content[0].content[0]", {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}]}]}),
        ("messages[0].content[0].tool_use_id", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
        ("messages[1].content[0].input", {"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "weather", "input": "{}"}]}]}),
        ("messages", {"messages": [{"role": "system", "content": "Be brief."}]}),
        ("messages", {"messages": [{"role": "assistant", "content": ""}]}),
        ("temperature", {"temperature": 1e-40}),
        ("top_p", {"top_p": 1.5}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "weather"}]}),
        ("tool_choice.name", {"tools": [TOOL | {"name": "none"}], "tool_choice": {"type": "tool", "name": "none"}}),
        ("thinking.type", {"thinking": {"type": "on"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_path(path: str, body: dict[str, Any]) -> None:
    error = refusal(**body)
    assert (error.status, error.param) == (400, path)
    assert str(error).startswith(f"{path}: ")


def test_thinking_is_a_block_of_its_own_and_signed() -> None:
    blocks = [data for name, data in sent(THOUGHT) if name.startswith("content_block")]
    assert [(b["type"][14:], b["index"]) for b in blocks] == [
        ("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("stop", 1),
    ]  # fmt: skip
    assert blocks[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [b["delta"]["type"] for b in blocks[1:4]] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert blocks[3]["delta"]["signature"]


def test_thinking_that_is_not_to_be_shown() -> None:
    answering = parsed({"thinking": {"type": "enabled", "display": "omitted"}}).writer
    content = answering.whole(THOUGHT)["content"]
    assert [block.get("thinking") for block in content] == ["", None]
    assert content[0]["signature"]
    assert not [d for n, d in sent(THOUGHT, shows_thinking=False) if d.get("delta", {}).get("type") == "thinking_delta"]


def test_calls_are_blocks_with_their_input_as_json() -> None:
    blocks = [data for name, data in sent(CALLS) if name.startswith("content_block")]
    assert [b["index"] for b in blocks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert blocks[3]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
    assert blocks[4]["delta"] == {"type": "input_json_delta", "partial_json": '{"city":"Paris"}'}
    whole = MessageWriter(streams=False).whole(CALLS)
    assert whole["content"] == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_2", "name": "clock", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "reason, stop, expected",
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "the server's", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(reason: str, stop: str | None, expected: Any) -> None:
    whole = MessageWriter(streams=False, stop=["END"]).whole(said(TextPart(0, "x"), reason=reason, stop=stop))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert whole["content"] == [{"type": "text", "text": "x"}]
    assert whole["usage"]["output_tokens"] == 5


def test_an_answer_without_a_word_has_an_empty_block() -> None:
    assert MessageWriter(streams=False).whole(said())["content"] == [{"type": "text", "text": ""}]


def test_what_keeps_a_stream_alive_never_comes_before_its_first_event() -> None:
    message = MessageWriter(streams=True)
    assert message.keepalive() == b": keepalive\n\n"
    list(message.steps(Begun("demo", 1)))
    assert message.keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    "status, kind",
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
     (501, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_errors_by_status(status: int, kind: str) -> None:
    error = RequestError("No.", status=status)
    expected = {"type": "error", "error": {"type": kind, "message": "No."}}
    assert API.error_body(error) == expected
    told = API.error_body(error)
    name, data = (
        (message := MessageWriter(streams=True)).sent(message.failure(error, told)).decode().strip().split("\n")
    )
    assert (name, json.loads(data[6:])) == ("event: error", expected)
