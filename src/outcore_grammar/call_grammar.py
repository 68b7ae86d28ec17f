"""Grammar rules for tool calls in the forms that models write. Parts of a schema that llguidance does not support are
only shown to the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .lark_grammar import json_of

FORMS = ("json_tools", "mistral", "qwen3_coder")
NEW_LINE = '"\\n"'
ELEMENT_END = "\n</parameter>\n"


def call_rules(
    name: str, start: str, end: str, arguments: str, tools: Sequence[Mapping[str, Any]], several: bool
) -> str:
    """The rule ``answer`` for one call of a tool, or several.

    Args:
        name: one of ``FORMS``.
        start, end: the marks around a call, as quoted text or as ``<[id]>`` of a token.
        arguments: the mark between name and arguments in mistral's form; empty: its older form, a JSON list.
        tools: in OpenAI's form, with ``parameters``.
    """
    functions = [tool["function"] for tool in tools]
    if name == "qwen3_coder":
        return _elements(start, end, functions, several)
    around, between, calls = "{}", "", [_object(f["name"], f"a{n}") for n, f in enumerate(functions)]
    if name == "json_tools":
        each, between = f"{start} {NEW_LINE} call {NEW_LINE} {end}", NEW_LINE
    elif arguments:
        each = f"{start} call"
        calls = [f"{_text(f['name'])} {arguments} a{n}" for n, f in enumerate(functions)]
    else:
        each, between, around = "call", '", "', f'{start} " "? "[" {{}} "]"'
    rules = [f"answer: {around.format(_repeated('each', between, several))}", f"each: {each}"]
    rules.append(f"call: {' | '.join(calls)}")
    return "\n".join(rules + [f"a{n}: {json_of(f['parameters'], lenient=True)}" for n, f in enumerate(functions)])


def _elements(start: str, end: str, functions: Sequence[Mapping[str, Any]], several: bool) -> str:
    """Rules for qwen3_coder: ``<function=NAME>`` with a ``<parameter=NAME>`` for each argument."""
    rules = [
        f"answer: {_repeated('call', NEW_LINE, several)}",
        f"call: {start} {NEW_LINE} function {NEW_LINE} {end}",
        f"function: {' | '.join(f'f{n}' for n in range(len(functions)))}",
        'text[suffix="</parameter>"]: /(.|\\n)*/',
    ]
    for n, function in enumerate(functions):
        schema = function["parameters"]
        needed = schema.get("required") or ()
        parts = [_text(f"<function={function['name']}>\n")]
        for m, (argument, value) in enumerate((schema.get("properties") or {}).items()):
            parts.append(f"p{n}x{m}{'' if argument in needed else '?'}")
            begin = _text(f"<parameter={argument}>\n")
            rules.append(f"p{n}x{m}: {begin} {_value(value, schema)}")
        rules.append(f"f{n}: {' '.join(parts)} {_text('</function>')}")
    return "\n".join(rules)


def _repeated(rule: str, between: str, several: bool) -> str:
    return f"{rule} ({between} {rule})*" if several else rule


def _object(name: str, arguments: str) -> str:
    before = f'{{"name": {_text(name)}, "arguments": '
    return f"{_text(before)} {arguments} {_text('}')}"


def _value(value: Any, schema: Mapping[str, Any]) -> str:
    """An argument's value and its end mark: any text for a string or an unknown type, else JSON."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    value = value if isinstance(value, Mapping) else {}
    section, _, name = str(value.get("$ref", "")).removeprefix("#/").partition("/")
    value = definitions.get(section, {}).get(name, value)
    kind = value.get("type")
    if kind == "string" and value.get("enum") and all(isinstance(v, str) for v in value["enum"]):
        return f"({' | '.join(map(_text, value['enum']))}) {_text(ELEMENT_END)}"
    if not isinstance(kind, str) or kind == "string":
        return f"text {NEW_LINE}"
    return f"{json_of({**value, **definitions}, lenient=True)} {_text(ELEMENT_END)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
