"""Chooses the grammar of an answer: a schema or required calls, and the free text that may come before."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.errors import RequestError
from outcore.modules.mlx_lm_tokenizer import inner_tokenizer
from outcore.serve.events import GenerationRequest
from outcore.serve.parsing import FINAL
from outcore.serve.prompted_tools import CALL, CALL_END
from outcore.serve.prompting import Grammar, TokenizerTemplate, extent
from outcore.text import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class AnswerGrammars:
    def __init__(self, tokenizer: TokenizerWrapper, template: TokenizerTemplate) -> None:
        self._tokenizer, self._template, self._grammars = tokenizer, template, Grammars(tokenizer)

    def of(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]], text: str, thinking: bool) -> Grammar:
        forced = request.messages is not None and request.tool_choice not in ("auto", "none")
        if request.messages is None:
            return self._grammars.of_rules(*form_rule(request))
        if request.continued and (request.messages[-1].get("content") or forced):
            why = "an answer that continues a message can be neither JSON of a schema nor a required call"
            raise RequestError(why, "unsupported_parameter")
        own = self._tokenizer
        if own.structural_markers or own.response_initial_state not in (None, "normal"):
            why = "Outcore has no grammar for the form of this model's answers"
            raise RequestError(why, "unsupported_parameter")
        before = self._before(request, text, thinking)
        if forced:
            return self._grammars.of_rules("tools", self._calls(request, tools), before)
        if tools and not self._template.tools:
            return self._grammars.of_rules("tools", self._calls_or(request, tools), before)
        if tools and not self._template.harmony:
            before = replace(before, instead=Free(tuple(own.tool_call_start_tokens)))
        return self._grammars.of_rules(*form_rule(request), before)

    def _before(self, request: GenerationRequest, text: str, thinking: bool) -> Before:
        own = self._tokenizer
        if self._template.harmony and not request.continued:
            # A call comes before the final part, and ends the answer.
            final = own.encode(FINAL, add_special_tokens=False)
            return Before(Free((), tuple(final), ends=bool(request.tools) and request.tool_choice != "none"))
        if not own.has_thinking:
            return Before()
        opening, closing = tuple(own.think_start_tokens), tuple(own.think_end_tokens)
        if thinking:
            return Before(Free((), closing))
        over = request.continued or text.rstrip().endswith(own.think_end)
        return Before(thoughts=None if over or not self._template.thinking else Free(opening, closing))

    def _calls(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        own, prompted = self._tokenizer, not self._template.tools
        name = str(getattr(own.tool_parser, "__module__", "")).rpartition(".")[2] if not prompted else FORMS[0]
        if name not in FORMS:
            why = f"Outcore has no grammar for this model's form of calls ({name}); use auto"
            raise RequestError(f"tool_choice: {why}", "unsupported_parameter", param="tool_choice")
        chosen = [t for t in tools if request.tool_choice in ("auto", "required", t["function"]["name"])]
        check_grammar("tools", extent([t["function"]["parameters"] for t in chosen], GRAMMAR_CHARACTERS))
        arguments = self._mark("[ARGS]") if "[ARGS]" in self._template.text else ""
        marks = (CALL, CALL_END) if prompted else (own.tool_call_start, own.tool_call_end)
        start, end = map(self._mark, marks)
        several = request.parallel_tools and request.tool_choice in ("auto", "required")
        try:
            lark = call_rules(name, start, end, arguments, chosen, several)
        except (AttributeError, KeyError, TypeError, RecursionError) as e:
            raise RequestError(f"tools: a tool's parameters are no JSON schema: {one_line(e)}", param="tools") from e
        check_grammar("tools", len(lark))
        return lark

    def _calls_or(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """Rules for calls in plain text, which JSON of the schema may replace, or text may precede or replace."""
        calls = self._calls(request, tools).replace("answer:", "calls:", 1)
        if request.form is not None:
            return f"{form_rule(request)[1].replace('answer:', 'form:', 1)}\nanswer: form | calls\n{calls}"
        several = f"({NEW_LINE} each)*" if request.parallel_tools else ""
        rules = [f"answer: rest | talk body {several}", f"talk[lazy]: TEXT {self._mark(CALL)}", "rest: REST"]
        rules += ["TEXT: /(.|\\n)*/", f"REST: TEXT & ~/(.|\\n)*{CALL}(.|\\n)*/"]
        return "\n".join([*rules, calls])

    def _mark(self, mark: str) -> str:
        """A mark in a grammar: ``<[id]>`` if it is one token, else quoted text."""
        tokens = self._tokenizer.encode(mark, add_special_tokens=False)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(mark)


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
    around, between, more, calls = "{}", "", list[str](), [_object(f["name"], f"a{n}") for n, f in enumerate(functions)]
    if name == "json_tools":
        each, between, more = f"{start} body", NEW_LINE, [f"body: {NEW_LINE} call {NEW_LINE} {end}"]
    elif arguments:
        each = f"{start} call"
        calls = [f"{_text(f['name'])} {arguments} a{n}" for n, f in enumerate(functions)]
    else:
        each, between, around = "call", '", "', f'{start} " "? "[" {{}} "]"'
    rules = [f"answer: {around.format(_repeated('each', between, several))}", f"each: {each}"]
    rules += [*more, f"call: {' | '.join(calls)}"]
    return "\n".join(
        rules + [f"a{n}: {json_of(_closed(f['parameters']), lenient=True)}" for n, f in enumerate(functions)]
    )


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's parameters without others unless it says so, as in llama.cpp: a model might add some for ever."""
    plain = "properties" in parameters and not {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & {*parameters}
    return {"additionalProperties": False, **parameters} if plain else parameters


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


# White space allowed in one place of JSON, as in llama.cpp; an unsure model might write it for ever.
SPACES = r"( |\n{1,2}[ \t]{0,20})?"

# Limit of a grammar's or schema's characters, each of which takes hundreds of bytes when compiled.
GRAMMAR_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Free:
    """Unconstrained text.

    Attributes:
        opening: its first tokens.
        closing: its last tokens; none: it takes the rest of the text.
        ends: the answer may end before the closing tokens.
    """

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    ends: bool = False

    def rules(self, name: str, stops: Iterable[int]) -> str:
        """Lark rules for the text, the first called ``name``; if ``ends``, also ``NAME_cut``: text without its end.

        Args:
            stops: tokens that it must not contain.
        """
        opening = " ".join(f"<[{token}]>" for token in self.opening)
        closing, known = self.closing, sorted({*self.closing, *stops})
        # Rule n: texts that end with the first n closing tokens and no more; the last rule is the whole text.
        made: list[list[str]] = [[opening], *([] for _ in closing)]
        for n in range(max(1, len(closing))):
            made[0].append(f"{name}{n} <[^{','.join(map(str, known))}]>")
            for token in dict.fromkeys(closing):
                read = (*closing[:n], token)
                to = max(k for k in range(len(closing) + 1) if read[len(read) - k :] == closing[:k] and k <= len(read))
                made[to].append(f"{name}{n} <[{token}]>")
        cut = f"{name}_cut: {' | '.join(f'{name}{n}' for n in range(len(closing)))}"
        rules = [f"{name}: {name}{len(made) - 1}", cut][: 2 if self.ends else 1]
        return "\n".join([*rules, *(f"{name}{n}: {' | '.join(each)}" for n, each in enumerate(made))])


@dataclass(frozen=True)
class Before:
    """Free text around an answer.

    Attributes:
        inside: text that the prompt has begun.
        thoughts: reasoning that may come first.
        instead: text that may replace the answer.
    """

    inside: Free | None = None
    thoughts: Free | None = None
    instead: Free | None = None


class Grammars:
    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._wrapper = tokenizer

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer; takes about a second for a large vocabulary.

        Raises:
            RequestError: llguidance is not installed or does not support the tokenizer.
        """
        try:
            import llguidance.hf
        except ImportError as e:
            why = 'JSON schemas and required tools need llguidance; on the server: pip install "outcore[json]"'
            raise RequestError(why, "not_installed") from e
        ends = sorted(self._wrapper.eos_token_ids & set(self._wrapper.get_vocab().values()))
        if not ends:
            raise RequestError("this model's tokenizer has no end token, which grammars need", "unsupported_parameter")
        try:
            return llguidance.hf.from_tokenizer(inner_tokenizer(self._wrapper), eos_token=ends)
        except Exception as e:  # llguidance and tokenizers raise many types
            why = f"llguidance does not support this model's tokenizer: {one_line(e)}"
            raise RequestError(why, "unsupported_parameter") from e

    def of_rules(self, field: str, answer: str, before: Before = Before()) -> Callable[[int], GrammarProcessor]:
        """Compile the rule ``answer`` (with the rules that it needs) to a maker of processors.

        Raises:
            RequestError: llguidance does not support the grammar; names the request's ``field``.
        """
        ends = self.tokenizer.eos_tokens
        start = "(answer | instead)" if before.instead else "answer"
        if before.thoughts:
            start = f"thoughts? {start}"
        if before.inside:
            start = f"inside {start}" + (" | inside_cut" if before.inside.ends else "")
        free = [each.rules(name, ends) for name, each in vars(before).items() if each is not None]
        lark = "\n".join([f"start: {start}", *free, answer])
        own = self.tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(own, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        except ValueError as e:
            raise _not_followed(field, e) from e
        if matcher.is_error():
            raise _not_followed(field, matcher.get_error())
        return functools.partial(GrammarProcessor, matcher, own.vocab_size, frozenset(own.eos_tokens))


def form_rule(request: GenerationRequest) -> tuple[str, str]:
    """What the request's form is, and the rule ``answer`` for it."""
    if not isinstance(request.form, str):
        return "schema", schema_rule(request.form or {})
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    check_grammar("grammar", len(request.form))
    try:
        return "grammar", f"answer: %lark {{\n{gbnf_to_lark(request.form).removeprefix('%llguidance {}')}\n}}"
    except (GbnfToLarkError, RecursionError) as e:
        raise _not_followed("grammar", e) from e


def schema_rule(schema: Mapping[str, Any]) -> str:
    """The rule ``answer`` for JSON of a schema (empty: any object). Raises RequestError if it is too large or deep."""
    check_grammar("schema", extent(schema, GRAMMAR_CHARACTERS))
    try:
        return f"answer: {json_of(schema or {'type': 'object'})}"
    except RecursionError as e:
        raise _not_followed("schema", e) from e


def json_of(schema: Mapping[str, Any], **options: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': SPACES, **options}})}"


def check_grammar(field: str, characters: int) -> None:
    if characters > GRAMMAR_CHARACTERS:
        raise RequestError(f"{field}: more than {GRAMMAR_CHARACTERS} characters", param=field)


def _not_followed(field: str, error: Exception | str) -> RequestError:
    return RequestError(f"{field}: llguidance does not support it: {one_line(error)}", param=field)


class GrammarProcessor:
    """An mlx-lm logits processor that allows only the grammar's tokens; it must be the last processor.

    Each call parses only new tokens, unless earlier ones changed because proposed tokens were rejected. Calls may come
    from different threads, one at a time.

    Args:
        matcher: one that has consumed no token; each processor works on its own copy.
        vocabulary: number of the matcher's tokens.
        ends: tokens that end an answer.
        prompt: number of tokens before the answer.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: frozenset[int], prompt: int) -> None:
        self._first, self.vocabulary, self._ends, self._prompt = matcher, vocabulary, ends, prompt
        self._matcher = matcher.deep_copy()
        self._tokens: list[int] = []
        self._matched = 0  # tokens that the grammar has consumed, up to the end or a token that it does not allow

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits, of shape (1, vocabulary), with minus infinity for tokens that are not allowed.

        Args:
            tokens: all so far, of shape (tokens,).

        Raises:
            RequestError: llguidance reached a limit.
        """
        answer = tokens[self._prompt :]
        self._follow(cast(list[int], answer.tolist()) if answer.size else [])
        width = logits.shape[-1]
        allowed = np.zeros(max(width, self.vocabulary), dtype=np.bool_)
        if self._matched < len(self._tokens):
            allowed[list(self._ends)] = True
        else:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            allowed[: self.vocabulary] = np.unpackbits(mask, bitorder="little")[: self.vocabulary]
        return mx.where(mx.array(allowed[:width]), logits, mx.array(-mx.inf, logits.dtype))

    def _follow(self, tokens: list[int]) -> None:
        if self._tokens != tokens[: len(self._tokens)]:
            # llguidance's rollback fails for grammars that name tokens by id; consuming a token again takes 1 µs.
            self._matcher, self._matched, self._tokens = self._first.deep_copy(), 0, []
        new = tokens[len(self._tokens) :]
        if self._matched == len(self._tokens):
            known = itertools.takewhile(lambda token: token < self.vocabulary and token not in self._ends, new)
            self._matched += self._matcher.try_consume_tokens(list(known))
            self._check()
        self._tokens = tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"schema: llguidance failed: {one_line(self._matcher.get_error())}")
