from __future__ import annotations

import builtins
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import chat_tokenizers
import outcore
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.decode import text_drafts
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.errors import RequestError
from outcore.serve.events import Called, GenerationRequest
from outcore.serve.prompting import Prompter
from outcore_grammar.grammars import Before, Free, Grammars, schema_rule

MESSAGES = ({"role": "user", "content": "x"},)
WIDTH = 8256
"""Of logits: more than the tokenizer has tokens, as in most models."""
TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"type": "string", "enum": ["K", "°C"]}, "of": {"$ref": "#/$defs/list"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "list": {"type": "array", "items": {"$ref": "#/$defs/days"}},
    },
}  # fmt: skip
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "other-1")
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> TokenizerWrapper:
    return load_tokenizer(demo_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: TokenizerWrapper) -> Grammars:
    return Grammars(tokenizer)


def of_schema(grammars: Grammars, wanted: dict[str, Any], before: Before | None = None) -> Any:
    return grammars.of_rules("schema", schema_rule(wanted), before or Before())


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "date"]
    kind = "object" if depth == 0 else rng.choice([*kinds, *(["object", "array", "any"] if depth < 3 else [])])
    if kind == "object":
        names = [f"{rng.choice('abc')}{n}" for n in range(rng.randint(0, 4))]
        found = {"type": "object", "properties": {n: schema(rng, depth + 1) for n in names}}
        return found | {"required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "any":
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    if kind == "enum":
        return {"enum": rng.sample(["x", "yé", 1, 2.5, None, True], 3)}
    if kind == "date":
        return {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}
    bounds = {"integer": {"minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 900)}, "string": {"maxLength": 12}}
    return {"type": kind, **bounds.get(kind, {})}


def valid(value: Any, of: dict[str, Any]) -> bool:
    """Whether a value is of a schema, of those that are made here."""
    if "anyOf" in of:
        return any(valid(value, each) for each in of["anyOf"])
    if "enum" in of:
        return any(value == v and type(value) is type(v) for v in of["enum"])
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    if not isinstance(value, kinds[of["type"]]) or (isinstance(value, bool) and of["type"] != "boolean"):
        return False
    if isinstance(value, dict):
        known = value.keys() <= of["properties"].keys() and value.keys() >= set(of["required"])
        return known and all(valid(v, of["properties"][k]) for k, v in value.items())
    if isinstance(value, list):
        return of["minItems"] <= len(value) <= of["maxItems"] and all(valid(v, of["items"]) for v in value)
    if isinstance(value, str):
        return len(value) <= of.get("maxLength", 99) and re.search(of.get("pattern", ""), value) is not None
    return value is None or of.get("minimum", value) <= value <= of.get("maximum", value)


def logits_at(seed: int, place: int, boosted: Sequence[int] = ()) -> mx.array:
    """Of a model that says nothing sensible, the same each time; some tokens likelier, so that answers end."""
    logits = np.random.default_rng([seed, place]).normal(scale=2, size=(1, WIDTH)).astype(np.float32)
    logits[:, list(boosted)] += 6
    return mx.array(logits).astype(mx.bfloat16)


def write(
    grammar: Any, seed: int, ends: Sequence[int], *, boosted: Sequence[int] = (), drafts: int = 0,
    prompt: Sequence[int] = (5, 6), most: int = 800,
) -> list[int]:  # fmt: skip
    """An answer, drawn at temperature 1: the Gumbel-max of the same numbers at each place.

    Args:
        drafts: random tokens that the processor is asked about, and that do not stay, each time.
    """
    process = grammar(len(prompt))
    answer: list[int] = []
    rng = random.Random(seed)
    while not answer or answer[-1] not in ends:
        assert len(answer) < most, "it does not end"
        for n in range(rng.randint(0, drafts)):
            wrong = [*answer, *(rng.randrange(WIDTH) for _ in range(n))]
            drawn = _draw(process(mx.array([*prompt, *wrong]), logits_at(seed + 1, len(wrong))), seed + 1, len(wrong))
            process(mx.array([*prompt, *wrong, drawn]), logits_at(seed + 2, 0))
        logits = logits_at(seed, len(answer), boosted)
        processed = process(mx.array([*prompt, *answer]), logits)
        assert processed.dtype == logits.dtype and processed.shape == logits.shape
        answer.append(_draw(processed, seed, len(answer)))
    return answer


def _draw(logits: mx.array, seed: int, place: int) -> int:
    noise = np.random.default_rng([seed, place, 1]).gumbel(size=WIDTH)
    return int((np.array(logits.astype(mx.float32))[0] + noise).argmax())


def _closing(tokenizer: TokenizerWrapper) -> list[int]:
    return [t for word, t in tokenizer.get_vocab().items() if word in ('"', '"}', "}", "]", '",')]


def test_answers_are_of_their_schemas(grammars: Grammars, tokenizer: TokenizerWrapper) -> None:
    boosted, ends = _closing(tokenizer), sorted(tokenizer.eos_token_ids)
    lengths = []
    for seed in range(12):
        wanted = schema(random.Random(seed))
        grammar = of_schema(grammars, wanted)
        answer = write(grammar, seed, ends, boosted=boosted)
        text = tokenizer.decode(answer[:-1])
        assert valid(json.loads(text), wanted), (wanted, text)
        lengths.append(len(answer))
    assert sum(lengths) > 120


def test_drafts_that_do_not_stay_change_nothing(grammars: Grammars, tokenizer: TokenizerWrapper) -> None:
    boosted, ends = _closing(tokenizer), sorted(tokenizer.eos_token_ids)
    for seed in range(2):
        wanted = schema(random.Random(seed))
        either = Before(thoughts=Free((30, 31), (32,)), instead=Free((33,)))
        for before in (either, Before(Free((), (32,)))):
            grammar = of_schema(grammars, wanted, before)
            likely = [*boosted, 32, *ends]
            alone = write(grammar, seed, ends, boosted=likely)
            assert write(grammar, seed, ends, boosted=likely, drafts=4) == alone


def allowed(grammar: Any, tokens: Sequence[int], width: int = WIDTH) -> set[int]:
    logits = grammar(0)(mx.array(tokens, dtype=mx.int32), mx.zeros((1, width)))
    return set(np.flatnonzero(np.isfinite(np.array(logits)[0])).tolist())


def test_free_text_ends_with_several_tokens_that_may_overlap(grammars: Grammars, tokenizer: TokenizerWrapper) -> None:
    brace, ends = tokenizer.encode("{")[0], set(tokenizer.eos_token_ids)
    grammar = of_schema(grammars, {}, Before(Free((), (32, 34, 32, 35))))
    for tokens in ([32, 34, 32, 34, 32], [40, 32, 32, 34, 32], [35, 34, 32, 34, 40, 32, 34, 32]):
        assert allowed(grammar, tokens) == set(range(grammar(0).vocabulary)) - ends
        assert brace in allowed(grammar, [*tokens, 35]) and 40 not in allowed(grammar, [*tokens, 35])


def test_after_its_end_there_is_nothing_but_an_end(grammars: Grammars, tokenizer: TokenizerWrapper) -> None:
    ends = set(tokenizer.eos_token_ids)
    grammar = of_schema(grammars, {"enum": ["ab"]})
    whole = tokenizer.encode('"ab"')
    assert allowed(grammar, whole) == allowed(grammar, [*whole, *ends]) == allowed(grammar, [*whole, 77, 77]) == ends
    # What the grammar does not allow, whoever put it there.
    assert allowed(grammar, [*whole[:1], 77]) == allowed(grammar, [*whole[:1], 77, *whole[1:-1]]) == ends
    assert not ends & allowed(grammar, whole[:1])
    free = of_schema(grammars, {"type": "string"})
    assert allowed(free, whole[:1], 400) == {t for t in allowed(free, whole[:1]) if t < 400}


def test_a_processor_is_called_with_fewer_tokens(grammars: Grammars, tokenizer: TokenizerWrapper) -> None:
    grammar = of_schema(grammars, {"type": "object", "properties": {"a": {"type": "integer"}}})
    process, logits = grammar(1), mx.zeros((1, WIDTH))
    text = tokenizer.encode('{"a": 12}')
    found = [np.array(process(mx.array([9, *text[:n]]), logits)) for n in range(len(text) + 1)]
    process(mx.array([9, *text, 0, 0]), logits)
    for n in reversed(range(len(text) + 1)):
        assert (np.array(process(mx.array([9, *text[:n]]), logits)) == found[n]).all()
    for n in range(1, len(text)):
        # As many tokens, and others; then more.
        process(mx.array([9, *text[: n - 1], 77]), logits)
        assert (np.array(process(mx.array([9, *text[:n]]), logits)) == found[n]).all()
        process(mx.array([9, *text[: n - 1], 77]), logits)
        assert (np.array(process(mx.array([9, *text[: n + 1]]), logits)) == found[n + 1]).all()


@pytest.fixture(scope="module")
def thinker(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    folder = tmp_path_factory.mktemp("thinker") / "json"
    return chat_tokenizers.chat_tokenizer(demo_model, folder, chat_tokenizers.HERMES, TAGS)


def test_thoughts_come_before_the_grammar_and_are_free(thinker: TokenizerWrapper) -> None:
    think, over, call, _ = (thinker.get_vocab()[t] for t in TAGS)
    brace, ends = thinker.encode("{")[0], set(thinker.eos_token_ids)
    grammar = Prompter(thinker).prepare(GenerationRequest(messages=MESSAGES, form={})).grammar
    assert grammar is not None
    assert {think, brace} <= allowed(grammar, []) and call not in allowed(grammar, [])
    free = set(range(grammar(0).vocabulary)) - ends
    assert allowed(grammar, [think]) == allowed(grammar, [think, 40, 41]) == free
    assert think not in allowed(grammar, [think, 40, over]) and brace in allowed(grammar, [think, 40, over])
    assert allowed(grammar, [brace]) == allowed(grammar, [think, over, brace])
    # With tools, a call may come instead.
    both = Prompter(thinker).prepare(GenerationRequest(messages=MESSAGES, form={}, tools=TOOLS)).grammar
    assert both is not None
    assert {think, call, brace} <= allowed(both, []) and call in allowed(both, [think, over])
    assert allowed(both, [call, 40]) == set(range(both(0).vocabulary))


def test_thoughts_that_the_prompt_opens(demo_model: Path, tmp_path: Path) -> None:
    for name in ("OPENED", "CLOSED"):
        template = getattr(chat_tokenizers, name)
        tokenizer = chat_tokenizers.chat_tokenizer(demo_model, tmp_path / name, template, TAGS)
        think, over = (tokenizer.get_vocab()[t] for t in TAGS[:2])
        brace = tokenizer.encode("{")[0]
        prompt = Prompter(tokenizer).prepare(GenerationRequest(messages=MESSAGES, form={}))
        assert prompt.grammar is not None and prompt.parser(0).thinking == (name == "OPENED")
        begin = allowed(prompt.grammar, [])
        assert (over in begin, think in begin, 40 in begin) == ((name == "OPENED",) * 3)
        assert brace in allowed(prompt.grammar, [over] if name == "OPENED" else [])


def test_gpt_oss_answers_are_of_their_schema_behind_the_last_header(demo_model: Path, tmp_path: Path) -> None:
    words = chat_tokenizers.HARMONY_TOKENS
    tokenizer = chat_tokenizers.chat_tokenizer(demo_model, tmp_path / "harmony", chat_tokenizers.HARMONY, words)
    prompter, ends = Prompter(tokenizer), set(tokenizer.eos_token_ids)
    final = tokenizer.encode("<|channel|>final<|message|>")
    for tools in ((), TOOLS):
        grammar = prompter.prepare(GenerationRequest(messages=MESSAGES, form={}, tools=tools)).grammar
        assert grammar is not None
        assert allowed(grammar, [40, *final[:-1]]) == set(range(grammar(0).vocabulary)) - (set() if tools else ends)
        begin = allowed(grammar, [40, *final])
        assert tokenizer.encode("{")[0] in begin and not begin & {40, *ends, *final}


FORMS = {
    "HERMES": TAGS,
    "ELEMENTS": TAGS,
    "HEADERS": ("[TOOL_CALLS]", "[ARGS]"),
    "LIST": ("[TOOL_CALLS]",),
    "PLAIN": (),
}


@pytest.fixture(scope="module")
def prompters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prompter]:
    folder = tmp_path_factory.mktemp("prompters")
    templates = {"LIST": chat_tokenizers.HEADERS.replace("[ARGS]", " ")}
    return {
        form: Prompter(
            chat_tokenizers.chat_tokenizer(
                demo_model, folder / form, templates.get(form) or getattr(chat_tokenizers, form), tokens
            )
        )
        for form, tokens in FORMS.items()
    }


@pytest.mark.parametrize(("form", "seeds"), [("HERMES", 4), ("HEADERS", 4), ("LIST", 8), ("PLAIN", 6)])
def test_required_calls_can_be_read(form: str, seeds: int, prompters: dict[str, Prompter]) -> None:
    prompter = prompters[form]
    tokenizer = prompter.tokenizer
    ends = sorted(tokenizer.eos_token_ids)
    words = '"}', '"', "}", ", ", "</think>", "]", "\n", "<tool_call>", "[TOOL_CALLS]"
    likely = [*{t for w in words for t in tokenizer.encode(w)}, *ends]
    several = 0
    for seed in range(seeds):
        choice = "required" if seed else "other-1"
        prompt = prompter.prepare(GenerationRequest(messages=MESSAGES, tools=TOOLS, tool_choice=choice))
        assert prompt.grammar is not None
        answer = write(prompt.grammar, seed, ends, boosted=likely)
        parser = prompt.parser(0)
        events = [*parser.feed(tokenizer.decode(answer[:-1])), *parser.finish()]
        calls = [e for e in events if isinstance(e, Called)]
        assert calls and not any(e.text for e in events if not isinstance(e, Called))
        several += len(calls) > 1
        for call in calls:
            assert call.name in ("get_weather", "other-1") and (seed or call.name == choice)
            arguments = json.loads(call.arguments)
            assert {"city", "unit"} <= arguments.keys() <= {"city", "unit", "days", "of"}
            assert isinstance(arguments["city"], str) and arguments["unit"] in ("K", "°C")
            assert all(0 < n < 100 for n in [arguments.get("days", 1), *arguments.get("of", [])])
        assert seed or len(calls) == 1
    assert several


ELEMENTS = """<tool_call>
<function=get_weather>
<parameter=city>
Zürich,
"old" </town>
</parameter>
<parameter=days>
3
</parameter>
<parameter=unit>
K
</parameter>
<parameter=of>
[1, 2]
</parameter>
</function>
</tool_call>"""
ARGUMENTS = {"city": 'Zürich,\n"old" </town>', "days": 3, "unit": "K", "of": [1, 2]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""), ("=days", "=days"), ("get_weather", "get_whether"), ("\n3\n", "\n100\n"), ("K", "C"), ("[1, 2]", "1"),
        ("<parameter=unit>\nK\n</parameter>\n", ""), ("</tool_call>", "</tool_call>\nDone."), ("city", "town"),
        ("<tool_call>\n", "Hm."), ("<parameter=days>\n3\n</parameter>\n", ""),
    ],
)  # fmt: skip
def test_required_calls_of_elements(old: str, new: str, prompters: dict[str, Prompter]) -> None:
    prompter = prompters["ELEMENTS"]
    prompt = prompter.prepare(GenerationRequest(messages=MESSAGES, tools=TOOLS, tool_choice="get_weather"))
    assert prompt.grammar is not None
    tokens = prompter.tokenizer.encode(ELEMENTS.replace(old, new, 1))
    process = prompt.grammar(0)
    ok = all(
        mx.isfinite(process(mx.array(tokens[:n], dtype=mx.int32), mx.zeros((1, WIDTH)))[0, token]).item()
        for n, token in enumerate([*tokens, *prompter.tokenizer.eos_token_ids])
    )
    optional = old.startswith("<parameter=days>")
    assert ok == (old == new or optional)
    if ok:
        (call,) = prompt.parser(0).feed(ELEMENTS.replace(old, new, 1))
        assert isinstance(call, Called)
        assert json.loads(call.arguments) == {k: v for k, v in ARGUMENTS.items() if not optional or k != "days"}


def test_an_answer_that_goes_on_with_a_message_has_no_schema(tokenizer: TokenizerWrapper) -> None:
    said = ({"role": "user", "content": "x"}, {"role": "assistant", "content": '{"a": 1'})
    with pytest.raises(RequestError, match="continues a message"):
        Prompter(tokenizer).prepare(GenerationRequest(messages=said, continued=True, form={}))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"type": "string", "pattern": "(?<=a)b"}, "look-around"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "thing"}, "thing"),
        ({"$ref": "#/$defs/no"}, "no"),
        ({"title": "\ud83d"}, "hex escape"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(wanted: dict[str, Any], why: str, grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=f"^schema: .*{why}") as e:
        of_schema(grammars, wanted)
    assert (e.value.status, e.value.param) == (400, "schema")


def test_a_schema_that_is_too_deep_is_refused(grammars: Grammars) -> None:
    wanted: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        wanted = {"type": "array", "items": wanted}
    with pytest.raises(RequestError, match=r"^schema: llguidance does not support it"):
        of_schema(grammars, wanted)


def test_without_llguidance_the_extra_is_named(thinker: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    prompter = Prompter(thinker)
    assert prompter.prepare(GenerationRequest(messages=MESSAGES, tools=TOOLS)).grammar is None
    for ask, field in (
        (GenerationRequest(messages=MESSAGES, form={}), "schema"),
        (GenerationRequest(messages=MESSAGES, tools=TOOLS, tool_choice="required"), "tool_choice"),
    ):
        with pytest.raises(RequestError, match=r"pip install \"outcore\[json\]\"") as e:
            prompter.prepare(ask)
        assert (e.value.status, e.value.code, e.value.param) == (400, "not_installed", field)


def test_a_models_answer_is_json_with_and_without_drafts(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda most, _: DraftLengthPolicy(min(most, 6), fixed=True))
    names = {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 2, "maxItems": 2}
    wanted = {
        "type": "object",
        "properties": {"names": names, "name": {"enum": ["alpha, beta, alpha, beta"]}},
        "required": ["names", "name"],
        "additionalProperties": False,
    }
    answers = []
    for draft in ("none", "ngram"):
        model, tokenizer = outcore.load(
            str(quick_models(3)), memory="300MB", resident=1, draft=draft, context=160, prompt=40
        )
        tokenizer.eos_token_ids = {2}  # <|im_end|>
        with model.outcore as session:
            prompt = Prompter(tokenizer).prepare(
                GenerationRequest(prompt='["alpha", "beta", "alpha", "beta"]', form=wanted)
            )
            assert prompt.grammar is not None
            processors = [prompt.grammar(len(prompt.tokens))]
            made = list(outcore.stream_generate(model, tokenizer, prompt.tokens, 100, logits_processors=processors))
            assert valid(json.loads("".join(r.text for r in made)), wanted)
            assert made[-1].finish_reason == "stop"
            assert draft == "none" or 0 < session.metrics.accepted < session.metrics.drafted
            answers.append([r.token for r in made])
    assert answers[0] == answers[1]
