"""llama.cpp's own addresses: what their bodies come to, and how answers are told."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from outcore.serve import llama_cpp, openai
from outcore.serve.exchange import GenerationRequest, RequestError, TextPart
from scripted import Scripted, said, served
from translated import asked, events, streamed, token


def posted(path: str, body: dict[str, Any], service: Scripted | None = None) -> Any:
    """What an address answers."""

    async def post() -> Any:
        app = served(service or Scripted(said(TextPart(0, "Hi"))), openai.API, llama_cpp.API)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            method = "POST" if body else "GET"
            return (await client.request(method, path, json=body or None)).json()

    return asyncio.run(post())


def completion(**body: Any) -> GenerationRequest:
    return asked(llama_cpp.API, "/completion", {"prompt": "x", **body}).asks[0]


def test_its_words_for_the_sampler_are_understood() -> None:
    ask = completion(n_predict=7, repeat_penalty=1.1, repeat_last_n=-1, seed=-1, top_k=-1, temperature=0.5, min_p=0.1)
    s = ask.sampling
    assert ask.max_tokens == 7
    assert (s.repetition_penalty, s.seed, s.top_k, s.temperature, s.min_p) == (1.1, None, 0, 0.5, 0.1)
    assert s.repetition_context_size > 1e6
    assert completion(n_predict=-1).max_tokens is None


def test_biases_go_by_token_and_by_text() -> None:
    for bias in ([[5, -100], [" no ", -1], ["7", False]], {"5": -100, " no ": -1, "7": False}):
        ask = completion(logit_bias=bias)
        assert ask.sampling.logit_bias == {5: -100, 7: -1e30}
        assert ask.text_bias == {" no ": -1}


@pytest.mark.parametrize("bias", [5, [5], [[5]], [[None, 1]], [[5, "x"]], {"5": True}, [[-1, 1]], [[True, 1]]])
def test_a_bias_that_is_none_is_refused(bias: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        completion(logit_bias=bias)


def test_prompts_may_be_texts_tokens_or_both() -> None:
    def prompts(prompt: Any) -> list[Any]:
        return [ask.prompt for ask in asked(llama_cpp.API, "/completion", {"prompt": prompt}).asks]

    assert prompts([1, "a", 2]) == [(1, "a", 2)]
    assert prompts([[1], {"prompt_string": "b"}, "c"]) == [(1,), "b", "c"]
    assert prompts(["a", "b"]) == ["a", "b"]
    for wrong in (None, 5, [None], [1.5], {}, {"prompt_string": "<__media__>", "multimodal_data": ["x"]}):
        with pytest.raises(RequestError, match="prompt"):
            prompts(wrong)


@pytest.mark.parametrize("field", ["mirostat", "typical_p", "ignore_eos", "post_sampling_probs", "return_progress"])
def test_what_is_not_there_is_refused_by_name(field: str) -> None:
    value: Any = True if field in ("ignore_eos", "post_sampling_probs", "return_progress") else 0.5
    with pytest.raises(RequestError, match=field):
        completion(**{field: value})


def test_a_whole_answer_tells_what_llama_server_does() -> None:
    said_of = events(
        TextPart(0, "a\n", logprobs=(token("a", -1.0, token("b")), token("\n"))), reason="length", tokens=2
    )
    body = {"prompt": "x", "n_predict": 2, "n_probs": 1, "return_tokens": True}
    told: Any = asked(llama_cpp.API, "/completion", body).answering.whole(said_of)
    assert (told["content"], told["stop_type"], told["has_new_line"], told["prompt"]) == ("a\n", "limit", True, "x")
    assert told["tokens"] == [1, 1]
    assert told["tokens_predicted"] == told["timings"]["predicted_n"] == 2
    assert told["generation_settings"]["n_predict"] == 2
    assert [e["token"] for e in told["completion_probabilities"]] == ["a", "\n"]
    assert told["completion_probabilities"][0]["top_logprobs"][0]["token"] == "b"


def test_only_the_fields_that_are_wanted_are_told() -> None:
    body = {"prompt": "x", "n_predict": 3, "response_fields": ["content", "generation_settings/n_predict", "no/such"]}
    told = asked(llama_cpp.API, "/completion", body).answering.whole(events(TextPart(0, "a")))
    assert told == {"content": "a", "generation_settings/n_predict": 3}


def test_a_stream_tells_token_by_token_and_ends_with_the_counts() -> None:
    answering = asked(llama_cpp.API, "/completion", {"prompt": "x", "stream": True, "n_probs": 1}).answering
    found = streamed(answering, events(TextPart(0, "ab", logprobs=(token("a"), token("b"))), TextPart(0, "!")))
    assert [(c["content"], len(c["tokens"]), c["stop"]) for c in found] == [
        ("", 1, False), ("ab", 1, False), ("!", 0, False), ("", 0, True),
    ]  # fmt: skip
    assert len(found[0]["completion_probabilities"]) == 1
    assert found[-1]["tokens_predicted"] == 7


def test_several_prompts_come_back_as_a_list() -> None:
    told = posted("/completion", {"prompt": ["a", "b"]})
    assert [(one["index"], one["prompt"], one["content"]) for one in told] == [(0, "a", "Hi"), (1, "b", "Hi")]


def test_completions_without_a_version_are_openais_where_a_model_is_named() -> None:
    assert posted("/completions", {"prompt": "a"})["content"] == "Hi"
    assert posted("/completions", {"prompt": "a", "model": "demo"})["choices"][0]["text"] == "Hi"


def test_what_is_served_is_told() -> None:
    props, slots = (posted(path, {}) for path in ("/props", "/slots"))
    assert (props["model_alias"], props["total_slots"], props["chat_template"]) == ("demo", 1, "{{ messages }}")
    assert slots == [{"id": 0, "is_processing": False}]


def test_texts_and_tokens_are_told_of_each_other() -> None:
    assert posted("/tokenize", {"content": "a b c"}) == {"tokens": [0, 1, 2]}
    assert posted("/tokenize", {"content": ""}) == {"tokens": []}
    pieces = posted("/tokenize", {"content": "a b", "with_pieces": True})["tokens"]
    assert pieces[1] == {"id": 1, "piece": "(1,)"}
    assert posted("/detokenize", {"tokens": [4, 5]}) == {"content": "(4, 5)"}
    assert posted("/detokenize", {"tokens": []}) == {"content": ""}
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    assert "hi" in posted("/apply-template", hi)["prompt"]
    assert posted("/chat/completions/input_tokens", hi)["input_tokens"] > 5
    assert posted("/detokenize", {"tokens": "x", "model": 5})["error"]["param"] == "model"
