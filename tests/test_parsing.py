from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import mlx_lm.tool_parsers
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.serve.events import Called, TextPart
from outcore.serve.parsing import TRIES, Markers, Stopper, TextParser, harmony_markers, markers_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "other", "now")
]
ASKED = {"city": 'Zürich, "old" town', "days": 3}
PARIS = {"city": "Paris", "days": 3}

CALLS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Zürich, \"old\" town<escape>,days:3}<end_function_call>",
        [("get_weather", ASKED)],
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Zürich, "old" town<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:now{}call:other{a:[1,{b:<|"|>}<|"|>}]}<tool_call|>',
        [("get_weather", ASKED), ("now", {}), ("other", {"a": [1, {"b": "}"}]})],
    ),
    "glm47": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich, \"old\" town</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("get_weather", ASKED)],
    ),
    "json_tools": (
        f'<tool_call>\n{json.dumps({"name": "get_weather", "arguments": ASKED})}\n</tool_call>\n'
        f'<tool_call>\n{json.dumps({"name": "other", "arguments": {}}, ensure_ascii=False)}\n</tool_call>',
        [("get_weather", ASKED), ("other", {})],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{json.dumps(ASKED)}<|tool_call_end|><|tool_call_begin|>functions.other:1<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        [("get_weather", ASKED), ("other", {})],
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|>\n<|open|>call tool="get_weather" index="1"<|sep|>\n'
        '<|open|>argument key="city" type="string"<|sep|>Zürich, "old" town<|close|>argument<|sep|>\n'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>\n<|close|>call<|sep|>\n'
        '<|open|>call tool="other" index="2"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        [("get_weather", ASKED), ("other", {"a": 1})],
    ),
    "longcat": (
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Zürich, \"old\" town</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        [("get_weather", ASKED)],
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city"><![CDATA[Zürich, "old" town]]></param>'
        '<param name="days">3</param></function><function name="now"></function>',
        [("get_weather", ASKED), ("now", {})],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich, "old" town</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [("get_weather", ASKED), ("now", {})],
    ),
    "mistral": (
        f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(ASKED)}[TOOL_CALLS]now[ARGS]{{}}",
        [("get_weather", ASKED), ("now", {})],
    ),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city" string="true">'
        'Zürich, "old" town</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        [("get_weather", ASKED)],
    ),
    "pythonic": (
        '<|tool_call_start|>[get_weather(city="Zürich, \\"old\\" town", days=3), now()]<|tool_call_end|>',
        [("get_weather", ASKED), ("now", {})],
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich, "old" town\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("get_weather", ASKED)],
    ),
}  # fmt: skip
CALLS["laguna"] = CALLS["glm47"]


def markers(name: str, **more: Any) -> Markers:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    think = more.pop("think", True)
    said = {"structural_markers": (), "response_transitions": {}, "response_initial_state": None, **more}
    tokenizer = SimpleNamespace(
        has_thinking=think, think_start="<think>", think_end="</think>", has_tool_calling=True,
        tool_call_start=module.tool_call_start, tool_call_end=module.tool_call_end, tool_call_start_tokens=(1, 2),
        tool_parser=module.parse_tool_call, **said,
    )  # fmt: skip
    return markers_of(cast(TokenizerWrapper, tokenizer), True)


def bare(parse: Any) -> Markers:
    return Markers({"normal": {"<c>": "tool"}, "tool": {"</c>": "normal"}}, parse)


def read(text: str, how: Markers | None, cuts: Sequence[int] = (), *, cut: bool = False, **options: Any) -> list[Any]:
    """All that comes out: texts in one piece where nothing stands between, calls without their ids."""
    parser = TextParser(0, how, TOOLS, **options)
    places = sorted({0, *(c % (len(text) + 1) for c in cuts), len(text)})
    out: list[Any] = []
    given = [parser.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    for event in [e for events in [*given, parser.finish(cut)] for e in events]:
        if isinstance(event, Called):
            assert event.number == sum(isinstance(e, tuple) for e in out)
            assert event.id
            out.append((event.name, json.loads(event.arguments)))
        elif event.text and out and isinstance(out[-1], str):
            out[-1] += event.text
        elif event.reasoning and out and isinstance(out[-1], list):
            out[-1][0] += event.reasoning
        else:
            assert bool(event.text) != bool(event.reasoning)
            out.append(event.text or [event.reasoning])
    assert len(parser.ids) == sum(isinstance(e, tuple) for e in out)
    return out


def test_all_of_mlx_lms_parsers_are_tried() -> None:
    assert {m.name for m in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 10**6), max_size=60))
def test_calls_are_read_however_the_text_is_cut(name: str, cuts: list[int]) -> None:
    text, calls = CALLS[name]
    open_end = name == "mistral"
    whole = f"<think>\nIs it\n cold?\n</think>\n\nLet me see.\n{text}" + ("" if open_end else "\nDone.")
    expected = [["Is it\n cold?"], "Let me see.\n", *calls, *([] if open_end else ["Done."])]
    assert read(whole, markers(name), cuts) == expected
    assert read(whole, markers(name), range(len(whole))) == expected


HOSTILE = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', "<tool", "_call>",
         "</", " ", "\n", "a", "é", "<", "[ARGS]", "now[ARGS]{}", '{"name": 3}', "[TOOL_CALLS]", "STOP"]
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    parts=HOSTILE, cuts=st.lists(st.integers(0, 10**6), max_size=30), name=st.sampled_from(["json_tools", "mistral"]),
    thinking=st.booleans(), continued=st.booleans(), cut=st.booleans(), parallel=st.booleans(),
)  # fmt: skip
def test_cuts_change_nothing(
    parts: list[str], cuts: list[int], name: str, thinking: bool, continued: bool, cut: bool, parallel: bool
) -> None:
    text = "".join(parts)
    options: dict[str, Any] = {"thinking": thinking, "continued": continued, "cut": cut, "parallel": parallel}
    whole = read(text, markers(name), **options)
    assert read(text, markers(name), cuts, **options) == whole
    assert read(text, markers(name), range(len(text)), **options) == whole
    # But for calls, marks of thoughts and white space, all of the text comes out.
    if parallel and not cut and not any(isinstance(e, tuple) for e in whole):
        said = "".join(e if isinstance(e, str) else e[0] for e in whole)
        unmarked = text.replace("<think>", "").replace("</think>", "")
        for part in ("<tool_call>", "[TOOL_CALLS]", "a", "é"):
            # What stood around a mark of thoughts may be one word without it.
            assert text.count(part) <= said.count(part) <= max(text.count(part), unmarked.count(part))


def test_a_word_that_a_mark_of_thoughts_had_cut_is_no_call() -> None:
    assert read("<think><tool</think>_call>", markers("json_tools"), thinking=False) == [["<tool"], "_call>"]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "body", ["", "nonsense {", "\ud83d", '{"name": "x", "arguments": {"a": NaN}}', "[" * 3000, '{"name": 1}']
)
def test_what_is_no_call_is_text(name: str, body: str) -> None:
    how, module = markers(name), importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    text = f"Say {module.tool_call_start}{body}{module.tool_call_end}"
    assert read(text, how) == [text]
    assert read(f"{text} on", how, range(len(text))) == [f"{text} on"]


def test_a_mark_that_begins_no_call_hides_none() -> None:
    call = CALLS["json_tools"][0]
    text = f"Calls begin with <tool_call> and then: {call}"
    first = "Calls begin with <tool_call> and then: "
    assert read(text, markers("json_tools"), range(len(text))) == [first, *CALLS["json_tools"][1]]
    thought = f"<think>I could <tool_call> now.</think>{call}"
    assert read(thought, markers("json_tools")) == [["I could <tool_call> now."], *CALLS["json_tools"][1]]


def test_only_so_many_texts_are_tried_as_calls() -> None:
    tried = []
    how = bare(lambda text, tools: tried.append(text))
    text = "<c>" * 5000 + "</c>"
    assert read(text, how) == [text]
    assert len(tried) == TRIES


BEFORE = ("", "Let me see.\n", "<think>\nHm.\n</think>\n\n")


@pytest.mark.parametrize(("name", "before"), list(zip(CALLS, itertools.cycle(BEFORE), strict=False)))
def test_of_a_call_that_was_cut_nothing_is_shown(name: str, before: str) -> None:
    """Wherever in it the answer ends; calls before it stay."""
    text, calls = CALLS[name]
    how, most = markers(name), 0
    shown = [["Hm."]] if "think" in before else [before] * bool(before)
    for end in range(1, len(text) + 1):
        found = read(before + text[:end], how, cut=True)
        made = [each for each in found if isinstance(each, tuple)]
        assert found == [*shown, *calls[: len(made)]], text[:end]
        if end % 8 == 0 or end == len(text):
            assert read(before + text[:end], how, range(10**4), cut=True) == found
        assert len(made) >= most, "a call that was there"
        most = len(made)
    assert most == len(calls)


def test_what_may_begin_a_call_is_shown_where_marks_are_tokens() -> None:
    how = markers("json_tools")
    assert read("a <", how, cut=True) == ["a "] and read("a <", how) == ["a <"]
    assert read("a <", replace(how, tokens=frozenset({"<tool_call>"})), cut=True) == ["a <"]
    assert read("a <b", how, cut=True) == ["a <b"]


def test_a_call_without_its_end_is_read_if_the_answer_ended_by_itself() -> None:
    text = '<function name="get_weather"><param name="city">Paris</param>'
    assert read(text, markers("minicpm5")) == [("get_weather", {"city": "Paris"})]


def test_one_call_alone_ends_the_answer() -> None:
    parser = TextParser(2, markers("json_tools"), TOOLS, parallel=False)
    (called,) = parser.feed(CALLS["json_tools"][0])
    assert isinstance(called, Called) and (called.index, called.name, parser.over) == (2, "get_weather", True)
    assert not parser.feed("more") and not parser.finish()


def test_ids_are_the_models_own_or_new_ones() -> None:
    parser = TextParser(0, markers("kimi_k2"), TOOLS)
    given = [e.id for e in parser.feed(CALLS["kimi_k2"][0] * 2) if isinstance(e, Called)]
    assert given[:2] == ["functions.get_weather:0", "functions.other:1"] and len(set(given)) == 4
    assert all(i.startswith("call_") and len(i) == 29 for i in given[2:])


def test_arguments_are_json_that_can_be_sent() -> None:
    def arguments(found: Any) -> list[str]:
        how = bare(lambda text, tools: found)
        return [e.arguments for e in TextParser(0, how, TOOLS).feed("<c></c>") if isinstance(e, Called)]

    assert arguments({"name": "now", "arguments": {"a": "\ud83d"}}) == ['{"a": "\\ud83d"}']
    assert arguments({"name": "now", "arguments": {"a": "é"}}) == ['{"a": "é"}']
    assert arguments({"name": "now", "arguments": '{"a": 1}'}) == ['{"a": 1}']
    assert arguments([{"name": "now", "parameters": {"a": 1}}, {"name": "now"}]) == ['{"a": 1}', "{}"]
    for wrong in ({"name": "\ud83d"}, {"name": "now", "arguments": [1]}, {"arguments": {}}, [], None, "now", 3):
        assert arguments(wrong) == []


def test_thoughts() -> None:
    how = markers("json_tools")
    assert read("\n<think> a\n</think>\n\n b", how) == [["a"], "b"]
    assert read("a </think> b", how, thinking=True) == [["a"], "b"]
    assert read(" a </think> b", how, thinking=True, continued=True) == [[" a"], "b"]
    assert read(" b <think>", how, continued=True) == [" b <think>"]
    assert read("Write <think> and </think>.", how) == ["Write <think> and </think>."]
    assert read("<think>\n\n</think>\n\nb", how) == ["b"]
    assert read("<think>a", how) == [["a"]]
    assert read("  \n", how) == ["  \n"]
    assert read("<think>", None) == ["<think>"]
    parser = TextParser(0, how, TOOLS)
    seen = []
    for text in ("<thi", "nk>a", "<tool_call>", "x</tool_call>", "</think>", "b"):
        parser.feed(text)
        seen.append(parser.thinking)
    assert seen == [False, True, True, True, False, False]


def test_parts_that_a_model_names_itself() -> None:
    from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT as FORM

    how = markers("muse_spark", think=False, response_transitions=FORM["transitions"], response_initial_state="header")
    text = (
        "to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eom|><|start|>assistant to=f<|message|>"
        + CALLS["muse_spark"][0]
    )
    assert read(text, how, range(len(text))) == [["Hm."], "Yes.", *CALLS["muse_spark"][1]]
    kimi = markers("kimi_k3", think=False, structural_markers=("<|open|>response<|sep|>", "<|close|>response<|sep|>"))
    assert read("<|open|>response<|sep|>Yes.<|close|>response<|sep|>", kimi) == ["Yes."]


def test_gpt_oss_answers() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
    call = '<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": {}}'
    final = "<|channel|>final<|message|>Yes,\n <|x"
    how = harmony_markers(True)
    assert read(text + call, how, range(200)) == [["Hm."], "Wait.", ("now", {"a": {}})]
    assert read(f"{text}<|end|><|start|>assistant{final}", how, range(200)) == [["Hm."], "Wait.Yes,\n <|x"]
    other = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert read(other, how) == [("now", {"a": 1})]
    assert read(other.replace("}", ""), how) == [other.replace("}", "").lstrip()]
    assert read("No form.", how) == ["No form."] == read("No form.", how, cut=True)
    for end in range(len("<|end|>"), len(call)):
        assert read(text + call[:end], how, cut=True) == [["Hm."], "Wait."]
    for end in range(len(" to=functions."), len(other) - len("}<|call|>")):
        assert read(other[:end], how, cut=True) == []
    assert read(final, harmony_markers(False)) == ["Yes,\n <|x"]


STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@example(text="aab", stops=["aab"], cuts=[2])
@example(text="aaab", stops=["aab"], cuts=[2])
@example(text="abaabab", stops=["abab", "ba"], cuts=[])
@given(text=st.text("ab", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_the_first_stop_string_to_be_complete_ends_a_text(text: str, stops: list[str], cuts: list[int]) -> None:
    ended = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    end, _, found = min(ended, default=(len(text), 0, None))
    stopper, out = Stopper(stops), ""
    places = sorted({0, *(c for c in cuts if c < len(text)), len(text)})
    for a, b in itertools.pairwise(places):
        out += stopper.feed(text[a:b])
        if stopper.found is not None:
            assert text[a:b].endswith(stopper.rest) and text[:b] == text[:end] + stopper.rest
            break
        held = text[len(out) : b]
        assert not held or any(s.startswith(held) for s in stops)
    assert stopper.found == found
    assert out + stopper.finish() == text[: end - len(found or "")]


def test_stop_strings_take_time_by_the_new_text_alone() -> None:
    def seconds(repeats: int) -> float:
        stopper = Stopper(["a" * 2000 + "b", "\n\nObserved"])
        began = time.process_time()
        for _ in range(repeats):
            stopper.feed("aaaa")
        return time.process_time() - began

    few = min(seconds(1000) for _ in range(3))
    assert seconds(8000) < 8 * few * 4


def test_pieces_say_what_they_belong_to() -> None:
    assert TextParser(3, markers("json_tools")).feed("<think>a</think>b") == [TextPart(3, "", "a"), TextPart(3, "b")]
