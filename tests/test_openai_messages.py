"""Messages of OpenAI's chats: what becomes of them before a chat template sees them."""

from __future__ import annotations

from typing import Any

import pytest

from outcore import RequestError
from outcore.serve import requests
from outcore.serve.api import Api
from outcore.serve.app import OPENAI
from outcore_apis.apis import ANTHROPIC, OLLAMA, RESPONSES
from translated import asked

USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "Look:"}
IMAGE = {"type": "image", "data": "abc"}
ANSWER = {"role": "assistant", "content": "well"}


def call(name: str = "look", arguments: Any = '{"x": 1}', call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_messages(messages: Any) -> Any:
    return asked(OPENAI, "/v1/chat/completions", {"messages": messages}).requests[0].messages


def continued(*messages: Any, **body: Any) -> bool:
    return asked(OPENAI, "/v1/chat/completions", {"messages": list(messages), **body}).requests[0].continued


def test_a_developer_is_the_system_and_several_in_front_are_one() -> None:
    found = chat_messages(
        [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": "b"},
            USER,
            {"role": "system", "content": "c"},
        ]
    )
    assert found == ({"role": "system", "content": "a\n\nb"}, USER, {"role": "system", "content": "c"})


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert chat_messages([{"role": "user", "content": parts}]) == ({"role": "user", "content": "a b"},)
    said = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert chat_messages([{"role": "assistant", "content": said}])[0]["content"] == "ano"


def test_calls_have_their_arguments_as_objects_and_results_the_name_of_what_was_called() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    found = chat_messages([USER, {"role": "assistant", "content": None, "tool_calls": [call()]}, result])
    assert found[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}],
    }
    assert found[2] == {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "look"}
    empty = chat_messages([{"role": "assistant", "tool_calls": [call(arguments="")]}])
    assert empty[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_was_thought_comes_back(field: str) -> None:
    (found,) = chat_messages([{"role": "assistant", "content": "x", field: "hm", "refusal": None, "audio": None}])
    assert found == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_an_answer_at_the_end_is_gone_on_with() -> None:
    assert continued(USER, ANSWER) and not continued(USER) and not continued(USER, ANSWER, USER)
    assert not continued(USER, {"role": "assistant", "tool_calls": [call()]})
    assert not continued(USER, {"role": "assistant", "content": "", "reasoning": "hm"})
    assert chat_messages([USER, {"role": "assistant", "content": ""}]) == (USER,)
    with pytest.raises(RequestError, match="last two"):
        continued(USER, ANSWER, ANSWER)


ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
DEEP = '{"a":' * 5000 + "1" + "}" * 5000

ODD = ("{", "[1]", "7", '{"x": NaN}', '{"x": "\\ud800"}', '{"x": 1e999}', DEEP, {"x": 1}, "9" * 5000)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "poet", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [call("")]}], "messages[0].tool_calls[0].function.name"),
        *(
            (
                [{"role": "assistant", "tool_calls": [call(arguments=odd)]}],
                "messages[0].tool_calls[0].function.arguments",
            )
            for odd in ("{", "[1]", "7", '{"x": NaN}', '{"x": "\\ud800"}', '{"x": 1e999}', DEEP, {"x": 1}, "9" * 5000)
        ),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
    ],
)
def test_messages_that_cannot_be_meant_are_refused_by_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat_messages(messages)
    assert raised.value.param == param and str(raised.value).startswith(param) and raised.value.status == 400


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        (OPENAI, "/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}),
        (RESPONSES, "/v1/responses", {"input": [{"role": "user", "content": [TEXT, IMAGE]}]}),
        (ANTHROPIC, "/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [TEXT, IMAGE]}]}),
        (OLLAMA, "/api/chat", {"messages": [{"role": "user", "content": "Look:", "images": ["abc"]}]}),
        (OLLAMA, "/api/generate", {"prompt": "Look:", "images": ["abc"]}),
    ],
)
def test_a_package_may_read_parts_that_are_no_text(
    api: Api, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="image is not supported here"):
        asked(api, path, body)
    monkeypatch.setitem(requests.OPAQUE, "image", lambda part, where: {"type": "image", "bytes": part["data"]})
    (message,) = asked(api, path, body).requests[0].messages or ()
    read = [TEXT, {"type": "image", "bytes": "abc"}]
    assert message["content"] == (read[::-1] if api is OLLAMA else read)
