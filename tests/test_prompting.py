from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import chat_tokenizers
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.decode.media import VIRTUAL
from outcore.decode.sampling import SAMPLING, OwnSampler
from outcore.errors import RequestError
from outcore.serve.choice import request_of
from outcore.serve.events import Called, GenerationRequest, Sampling, TextPart
from outcore.serve.prompting import Prompter, TokenizerTemplate

TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"
TOKENS = {"HERMES": TAGS, "OPENED": TAGS, "CLOSED": TAGS, "ELEMENTS": TAGS, "HEADERS": ("[TOOL_CALLS]", "[ARGS]"),
          "HARMONY": chat_tokenizers.HARMONY_TOKENS}  # fmt: skip

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_abcdef", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
CALLED = (
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "R", "tool_call_id": "call_abcdef", "name": "f"},
)


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TokenizerWrapper]:
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}

    def make(name: str) -> TokenizerWrapper:
        if name not in found:
            template = getattr(chat_tokenizers, name)
            found[name] = chat_tokenizers.chat_tokenizer(demo_model, folder / name, template, TOKENS.get(name, ()))
        return found[name]

    return make


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> TokenizerWrapper:
    return load_tokenizer(demo_model)


def told(tokenizer: Any) -> tuple[str, bool, bool]:
    template = TokenizerTemplate(tokenizer)
    return template.text, template.tools, template.thinking


def text(tokenizer: TokenizerWrapper, ask: GenerationRequest) -> str:
    return str(tokenizer.decode(list(Prompter(tokenizer).prepare(ask).tokens)))


def refused(tokenizer: TokenizerWrapper, ask: GenerationRequest) -> tuple[str, str, str | None]:
    with pytest.raises(RequestError) as e:
        Prompter(tokenizer).prepare(ask)
    assert e.value.status == 400
    return str(e.value), e.value.code, e.value.param


def test_messages_go_through_the_template(made: Callable[[str], TokenizerWrapper]) -> None:
    assert (
        text(made("STRICT"), GenerationRequest(messages=(USER,)))
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    said = (USER, {"role": "assistant", "content": "So it "})
    went_on = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo it "
    assert text(made("STRICT"), GenerationRequest(messages=said, continued=True)) == went_on
    options = {"enable_thinking": False}
    assert text(made("OPENED"), GenerationRequest(messages=(USER,), template_options=options)).endswith("assistant\n")


def test_tools_and_their_calls_go_through_the_template(
    made: Callable[[str], TokenizerWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = GenerationRequest(messages=CALLED, tools=(TOOL,))
    hermes = text(made("HERMES"), ask)
    assert hermes.startswith('<|im_start|>tools\n{"type": "function", "function": {"name": "f"')
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in hermes
    assert "<function=f>\n<parameter=a>\né\n</parameter>\n</function>" in text(made("ELEMENTS"), ask)
    # Arguments as a string and ids of nine characters, the same in call and answer: the template says so.
    headers = text(made("HEADERS"), ask)
    assert '[TOOL_CALLS]f[ARGS]{"a": "é"}' in headers
    assert "[TOOL_RESULTS]1711e7978R" in headers
    # One that would take an object, and write it as Python does.
    monkeypatch.setattr(
        made("HEADERS")._tokenizer, "chat_template", chat_tokenizers.HEADERS.replace("+ call", "~ call")
    )
    assert '[TOOL_CALLS]f[ARGS]{"a": "é"}' in text(made("HEADERS"), ask)
    # Not told of, but calls there were.
    none = text(made("HERMES"), GenerationRequest(messages=CALLED, tools=(TOOL,), tool_choice="none"))
    assert "tools" not in none and '"name": "f"' in none
    assert CALL["function"] == {"name": "f", "arguments": {"a": "é"}}


def test_a_template_that_fails_says_why(
    made: Callable[[str], TokenizerWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = refused(made("STRICT"), GenerationRequest(messages=({"role": "system", "content": "S"}, USER)))
    assert strict == (
        "messages: the chat template refuses them: System role not supported",
        "invalid_request",
        "messages",
    )
    with monkeypatch.context() as patch:
        patch.setattr(made("STRICT")._tokenizer, "chat_template", "{{ raise_exception('Too warm\\ntoday') }}")
        why = "messages: the chat template refuses them: Too warm today"
        assert refused(made("STRICT"), GenerationRequest(messages=(USER,))) == (why, "invalid_request", "messages")
    assert refused(made("STRICT"), GenerationRequest(messages=()))[2] == "messages"
    for option in ("chat_template", "tokenize", "continue_final_message"):
        ask = GenerationRequest(messages=(USER,), template_options={option: "{% for a in range(9) %}{% endfor %}"})
        assert refused(made("STRICT"), ask) == (
            f"{option}: Outcore sets this option itself; leave it out",
            "invalid_request",
            option,
        )


def test_a_model_without_a_template_takes_prompts(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = chat_tokenizers.chat_tokenizer(demo_model, tmp_path / "none", "")
    tokenizer.chat_template = None
    tokenizer.has_chat_template = False
    assert "no chat template" in refused(tokenizer, GenerationRequest(messages=(USER,)))[0]
    assert told(tokenizer) == ("", False, False)
    assert text(tokenizer, GenerationRequest(prompt="hi")) == "hi"


def test_prompts_are_continued_as_they_are(demo: TokenizerWrapper) -> None:
    prompter = Prompter(demo)
    prompt = prompter.prepare(GenerationRequest(prompt="x = <think>", stop=("\n",)))
    assert prompt.tokens == tuple(demo.encode("x = <think>")) and prompt.stop == ("\n",)
    assert prompt.parser(1).feed("a<think>b<tool_call>") == [TextPart(1, "a<think>b<tool_call>")]
    assert prompter.prepare(GenerationRequest(prompt=(5, 6))).tokens == (5, 6)


@pytest.mark.parametrize(
    ("ask", "message", "param"),
    [
        (GenerationRequest(), "give messages or a prompt", None),
        (GenerationRequest(prompt=(5, 8192)), "prompt: the model has no token 8192", "prompt"),
        (GenerationRequest(prompt=(-1,)), "prompt: the model has no token -1", "prompt"),
        (GenerationRequest(prompt=(10**30,)), "prompt: the model has no token 1000000000", "prompt"),
        (GenerationRequest(prompt=()), "prompt: it is empty", "prompt"),
        (GenerationRequest(prompt=""), "prompt: it is empty", "prompt"),
        (GenerationRequest(messages=({"role": "user", "content": "\ud83d"},)), "half of a surrogate pair", "messages"),
        (
            GenerationRequest(prompt="a", sampling=Sampling(logit_bias={8192: 1})),
            "logit_bias: the model has no token",
            "logit_bias",
        ),
        (GenerationRequest(prompt="a", tools=(TOOL,)), "tools: give messages instead of a prompt", "tools"),
        (
            GenerationRequest(messages=(USER,), tool_choice="required"),
            "tool_choice: there is no tool required",
            "tool_choice",
        ),
        (GenerationRequest(messages=(USER,), tools=(TOOL, TOOL)), "that no other tool has", "tools[1]"),
        (GenerationRequest(messages=(USER,), continued=True), "only an assistant's message", "messages"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    ask: GenerationRequest, message: str, param: str | None, demo: TokenizerWrapper
) -> None:
    with pytest.raises(RequestError, match=message) as e:
        Prompter(demo).prepare(ask)
    assert (e.value.status, e.value.param) == (400, param)


def test_tokens_without_an_embedding_are_refused(demo: TokenizerWrapper) -> None:
    with pytest.raises(RequestError, match="the model has no token 8000"):
        Prompter(demo, vocabulary=8000).prepare(GenerationRequest(prompt=(7999, 8000)))


def test_tokens_beside_images_are_checked_and_those_of_images_are_not(demo: TokenizerWrapper) -> None:
    ask, tokens = GenerationRequest(messages=({"role": "user", "content": [{"type": "image"}]},)), [7999, VIRTUAL]
    reader = SimpleNamespace(chat=lambda *_: ("text", tokens, None))
    prompter = Prompter(demo, vocabulary=8000, reader=lambda: reader)
    assert prompter.prepare(ask).tokens == tuple(tokens)
    tokens.append(8000)
    with pytest.raises(RequestError, match="messages: the model has no token 8000"):
        prompter.prepare(ask)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (GenerationRequest(messages=(USER,), tools=(TOOL,), tool_choice="g"), "tool_choice: there is no tool g"),
        (
            GenerationRequest(messages=(USER,), tools=({"type": "function", "function": {"name": "f g"}},)),
            "a name of letters",
        ),
        (
            GenerationRequest(
                messages=(USER, {"role": "assistant", "content": "x"}),
                continued=True,
                tools=(TOOL,),
                tool_choice="required",
            ),
            "continues a message",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    ask: GenerationRequest, why: str, made: Callable[[str], TokenizerWrapper]
) -> None:
    assert why in refused(made("HERMES"), ask)[0]


def test_a_form_of_calls_that_cannot_be_required_is_refused(
    made: Callable[[str], TokenizerWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.tool_parsers import glm47

    tokenizer = made("HERMES")
    monkeypatch.setattr(tokenizer, "_tool_parser", glm47.parse_tool_call)
    ask = GenerationRequest(messages=(USER,), tools=(TOOL,), tool_choice="required")
    assert refused(tokenizer, ask)[1:] == ("unsupported_parameter", "tool_choice")
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}
    ask = GenerationRequest(messages=(USER,), tools=(broken,), tool_choice="required")
    assert "no JSON schema" in refused(made("ELEMENTS"), ask)[0]


def test_answers_are_read_as_the_prompt_leaves_them(made: Callable[[str], TokenizerWrapper]) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

    def events(name: str, ask: GenerationRequest, answer: str) -> list[Any]:
        parser = Prompter(made(name)).prepare(ask).parser(0)
        found = [*parser.feed(answer), *parser.finish()]
        return [("call", e.name) if isinstance(e, Called) else (e.reasoning, e.text) for e in found]

    plain, tools = GenerationRequest(messages=(USER,)), GenerationRequest(messages=(USER,), tools=(TOOL,))
    assert events("OPENED", plain, "a</think>b") == [("a", ""), ("", "b")]
    assert events("CLOSED", plain, "a</think>b") == [("", "a</think>b")]
    assert events("HERMES", plain, f"<think>a</think>{call}") == [("a", ""), ("", call)]
    assert events("HERMES", tools, f"<think>a</think>{call}{call}") == [("a", ""), *[("call", "f")] * 2]
    one = GenerationRequest(messages=(USER,), tools=(TOOL,), parallel_tools=False)
    assert events("HERMES", one, call + call) == [("call", "f")]
    said = GenerationRequest(messages=(USER, {"role": "assistant", "content": "<think>So"}), continued=True)
    assert events("HERMES", said, " a</think>b") == [(" a", ""), ("", "b")]
    thought = {"role": "assistant", "content": "", "reasoning_content": "So"}
    asked = GenerationRequest(messages=(USER, thought), continued=True)
    assert text(made("HERMES"), asked).endswith("<think>\nSo")
    assert events("HERMES", asked, " a</think>b") == [(" a", ""), ("", "b")]


def test_models_are_described_by_what_their_templates_know(
    made: Callable[[str], TokenizerWrapper], demo: TokenizerWrapper
) -> None:
    assert told(demo)[0].startswith("{%- for message") and told(demo)[1:] == (False, False)
    assert told(made("HERMES")) == (chat_tokenizers.HERMES, True, True)
    assert told(made("HEADERS"))[1:] == (True, False)
    assert told(made("HARMONY"))[1:] == (True, True)


def test_gpt_oss_is_given_tools(made: Callable[[str], TokenizerWrapper]) -> None:
    prompt = Prompter(made("HARMONY")).prepare(GenerationRequest(messages=CALLED[:2], tools=(TOOL,)))
    assert ' to=functions.f<|channel|>commentary json<|message|>{"a": "é"}' in made("HARMONY").decode(
        list(prompt.tokens)
    )
    (called,) = [*(p := prompt.parser(0)).feed(" to=functions.f<|channel|>x<|message|>{}"), *p.finish()]
    assert isinstance(called, Called) and called.name == "f"


def test_prompts_are_made_on_any_thread(made: Callable[[str], TokenizerWrapper]) -> None:
    prompter = Prompter(made("HERMES"))
    asks = [
        GenerationRequest(messages=CALLED, tools=(TOOL,)),
        GenerationRequest(messages=(USER,), form={"type": "object"}),
    ]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda ask=ask: found.append(prompter.prepare(ask).tokens), daemon=True)
        for ask in asks * 3
    ]
    for thread in threads:
        thread.start()
        thread.join(60)
    assert found == [prompter.prepare(ask).tokens for ask in asks] * 3
    assert json.dumps(found)


def test_xtc_spares_newlines_and_ends_as_in_mlx_lms_server(demo: TokenizerWrapper) -> None:
    request = GenerationRequest(prompt="a", sampling=Sampling(temperature=1.0, xtc_probability=0.5))
    sampler = request_of(1, Prompter(demo).prepare(request), request).sampler
    assert isinstance(sampler, OwnSampler)
    assert sampler._sampler.xtc_special_tokens == [*demo.encode("\n"), *demo.eos_token_ids]
    known = {*SAMPLING, "temperature", "seed", "logit_bias", "post_sampling_probs"}
    others = {field.name for field in fields(Sampling)} - known
    assert all(name.endswith(("_penalty", "_context_size")) for name in others)
