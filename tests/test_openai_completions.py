"""OpenAI's completions of one prompt or several, and its list of models."""

from __future__ import annotations

from typing import Any

import pytest

from outcore import RequestError
from outcore.serve.app import OPENAI as API
from outcore.serve.events import GenerationRequest, TextPart
from translated import asked, events, streamed, token

PATH = "/v1/completions"


def ask(**body: Any) -> GenerationRequest:
    (found,) = asked(API, PATH, {"prompt": "x", **body}).requests
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
    assert [a.prompt for a in found.requests] == prompts
    assert all(a.choices == 2 and a.messages is None and a.sampling.temperature == 1 for a in found.requests)
    assert len(found.writer.whole(events())["choices"]) == 2 * len(prompts)


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
    assert asked(API, PATH, body).writer.whole(events(*said))["choices"][0]["logprobs"] == expected
    first, second, _, _ = streamed(asked(API, PATH, body | {"stream": True}).writer, events(*said))
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
        ({"grammar": "root ::= x"}, "grammar"),
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
