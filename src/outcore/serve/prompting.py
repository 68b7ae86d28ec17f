"""Turns a request into a prompt: tokens, a parser for the answer, and a grammar. Makes no MLX arrays, so any thread may
run it, not only the engine's.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.media import TEXT_ONLY, VIRTUAL, Media
from ..decode.prefix_cache import GRID
from ..decode.prompt import check_known, encode_rendered, encode_text, render, same_tokens
from ..decode.sampling import Processor
from ..errors import RequestError
from ..modules.mlx_lm_tokenizer import has_template_code
from ..packages import modules
from ..text import shortened
from .events import GenerationRequest
from .parsing import NAME, TextParser, harmony_markers, is_harmony, markers_of
from .prompted_tools import written_out

# Upper bound of characters per token over a whole prompt. Text has three to six; only runs of spaces have more.
CHARACTERS = 16

# Makes a choice's logits processor, which must be the last one, given the number of tokens before the answer.
Grammar = Callable[[int], Processor]


class Grammars(Protocol):
    """Makes grammars for one tokenizer. A package implements it as the class ``AnswerGrammars(tokenizer, template)`` in
    its module of the group ``grammars``."""

    def of(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]], text: str, thinking: bool) -> Grammar:
        """The grammar of the answer to a request with a schema, a required tool, or tools that are only prompted.

        Args:
            text: the prompt's text.
            thinking: the answer begins within the reasoning.

        Raises:
            RequestError: the grammar is not supported, or llguidance is not installed.
        """


@dataclass(frozen=True)
class Prompt:
    """A request as tokens, with what is needed to read its answer.

    Attributes:
        tokens: ids, at least one.
        parser: makes the parser of a choice, given the choice's number.
        grammar: of the answer; None: free text.
        shared: number of first tokens that other conversations with the same system messages and tools share.
        media: its images; None: it has none.
    """

    tokens: tuple[int, ...]
    tokenizer: TokenizerWrapper
    stop: tuple[str, ...] = ()
    parser: Callable[[int], TextParser] = TextParser
    grammar: Grammar | None = None
    shared: int = 0
    media: Media | None = None


class Prompter:
    """Makes prompts for one model; not thread-safe.

    Args:
        vocabulary: number of the model's embeddings; None: as many as the tokenizer has tokens.
        reader: returns what reads images (``media_reader``).
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int | None = None, reader: Any = lambda: None) -> None:
        self.tokenizer, self._reader = tokenizer, functools.cache(reader)
        self._template = TokenizerTemplate(tokenizer)
        made = (
            harmony_markers
            if self._template.harmony
            else functools.partial(markers_of, tokenizer, prompted=not self._template.tools)
        )
        self._markers = {tools: made(tools) for tools in (False, True)}
        ids = tokenizer.get_vocab().values()
        self._begin: tuple[str, Sequence[int]] = "", ()
        self._ids = frozenset(t for t in ids if vocabulary is None or t < vocabulary)

    def prepare(self, request: GenerationRequest, most: int | None = None) -> Prompt:
        """The prompt of a request.

        Args:
            most: limit in tokens. Text with more characters than so many tokens can have is refused before it is
                tokenized, as tokens take a hundred bytes each; whether the tokens are too many, the caller checks.

        Raises:
            RequestError: a field is wrong, or not supported by this model; ``param`` names it.
        """
        if bias := request.sampling.logit_bias:
            check_known(list(bias), self._ids, "logit_bias")
        if most is not None:
            check_characters(sum(len(m.get("content") or "") + CHARACTERS for m in request.messages or ()), most)
            check_characters(len(request.prompt or "") * (1 if isinstance(request.prompt, str) else CHARACTERS), most)
            check_characters(extent(request.tools, most * CHARACTERS), most, "tools")
        return self._chat(request, most) if request.messages is not None else self._text(request)

    def _text(self, request: GenerationRequest) -> Prompt:
        prompt = request.prompt
        if prompt is None:
            raise RequestError("give messages or a prompt")
        if request.tools and request.tool_choice != "none":
            raise RequestError("tools: give messages instead of a prompt with them", param="tools")
        tokens = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        check_known(tokens, self._ids)
        return Prompt(tuple(tokens), self.tokenizer, request.stop, grammar=self._grammar(request))

    def _chat(self, request: GenerationRequest, most: int | None) -> Prompt:
        tools = _tools(request)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            text = self._template.render(replace(request, messages=tuple(messages)), tools)
            check_characters(len(text), most)
            return text

        messages, media = request.messages or (), None
        if any(isinstance(m.get("content"), list) for m in messages):
            if (reader := self._reader()) is None:
                raise RequestError(f"messages: {TEXT_ONLY}", "unsupported_parameter", param="messages")
            text, tokens, media = reader.chat(messages, render, self._template.text)
        else:
            text = render(messages)
            tokens = encode_rendered(self.tokenizer, text)
        check_known([t for t in tokens if t < VIRTUAL], self._ids, "messages")
        thinking = self._thinks(request, text)
        parser = functools.partial(
            TextParser, markers=self._markers[bool(tools)], tools=tools, thinking=thinking, continued=request.continued,
            parallel=request.parallel_tools,
        )  # fmt: skip
        grammar, shared = self._grammar(request, tools, text, thinking), self._shared(request, tools, tokens)
        return Prompt(tuple(tokens), self.tokenizer, request.stop, parser, grammar, shared, media)

    def _shared(self, request: GenerationRequest, tools: tuple[Mapping[str, Any], ...], tokens: Sequence[int]) -> int:
        if len(tokens) <= GRID:
            return 0
        begin = self._template.begin(request, tools)
        if begin != self._begin[0]:
            # Kept, since most conversations of a server begin alike.
            self._begin = begin, self.tokenizer.encode(begin, add_special_tokens=False)
        return same_tokens(tokens, self._begin[1])

    def _thinks(self, request: GenerationRequest, text: str) -> bool:
        begin, end = self.tokenizer.think_start, self.tokenizer.think_end
        if begin is None or request.messages is None:
            return False
        if not request.continued:
            return text.rstrip().endswith(begin)
        last = request.messages[-1]
        content = last.get("content") or ""
        return content.rfind(begin) > content.rfind(end) if content else bool(last.get("reasoning_content"))

    def _grammar(
        self,
        request: GenerationRequest,
        tools: Sequence[Mapping[str, Any]] = (),
        text: str = "",
        thinking: bool = False,
    ) -> Grammar | None:
        forced = request.messages is not None and request.tool_choice not in ("auto", "none")
        free = not forced and request.form is None
        if free and (not tools or self._template.tools):
            return None
        try:
            return self._grammars.of(request, tools, text, thinking)
        except RequestError as e:
            if free:
                return None  # such calls are found without a grammar, too
            e.param = e.param or ("tool_choice" if forced else "schema")
            raise

    @functools.cached_property
    def _grammars(self) -> Grammars:
        for module in modules("grammars").values():
            made: Grammars = module.AnswerGrammars(self.tokenizer, self._template)
            return made
        why = "JSON schemas and required tools need the package outcore_grammar, which is missing on the server"
        raise RequestError(why, "not_installed")


def too_long(what: str, tokens: int, most: int) -> RequestError:
    counts = {"n_prompt_tokens": tokens, "n_ctx": most}
    why = f"{what}; this model's context is {most} tokens: shorten it"
    return RequestError(why, "context_length_exceeded", counts=counts)


def extent(value: Any, most: int) -> int:
    """Number of characters of all strings in a JSON value, plus one for each other value; may stop after ``most``."""
    count, layer = 0, [value]
    while layer and count <= most:
        part = layer.pop()
        if isinstance(part, str):
            count += len(part)
        else:
            count += 1
            if isinstance(part, Mapping):
                layer += (*part.keys(), *part.values())
            elif isinstance(part, list | tuple):
                layer += part
    return count


def check_characters(characters: int, most: int | None, what: str = "the prompt") -> None:
    """Refuses, before it is tokenized, a text that ``most`` tokens cannot hold: tokenizing takes 200 bytes for each."""
    if most is not None and characters > most * CHARACTERS:
        tokens = characters // CHARACTERS
        raise too_long(f"{what}: at least {characters} characters and {tokens} tokens", tokens, most)


def _tools(request: GenerationRequest) -> tuple[Mapping[str, Any], ...]:
    """The tools that the model is given, each with ``parameters``, as mlx-lm's parsers need them.

    Raises:
        RequestError: a name is malformed or not unique, or ``tool_choice`` names none.
    """
    names: dict[str, None] = {}
    for n, name in enumerate(tool["function"]["name"] for tool in request.tools):
        if not NAME.fullmatch(name) or name in names:
            why = "give a name of letters, digits and _ - . : / that no other tool has"
            raise RequestError(f"tools[{n}]: {why}", param=f"tools[{n}]")
        names[name] = None
    if request.tool_choice not in {"auto", "none", *names, *(["required"] if names else [])}:
        raise RequestError(f"tool_choice: there is no tool {shortened(request.tool_choice)}", param="tool_choice")
    nothing = {"type": "object", "properties": {}}
    return tuple(
        {**tool, "function": {**tool["function"], "parameters": tool["function"].get("parameters") or nothing}}
        for tool in (request.tools if request.tool_choice != "none" else ())
    )


# A call's arguments as Python prints a dict: the template should have been given a string.
CITY = "{'city': 'needle'}"

TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "x", "arguments": {"city": "needle"}}}
CALLED = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "name": "x", "tool_call_id": "call_0"},
)
# A message that differs from any real one at its first character.
OTHER = {"role": "user", "content": "\N{BLACK SQUARE}"}


class TokenizerTemplate:
    """One tokenizer's chat template.

    Attributes:
        text: its Jinja source; empty if there is none or it is Python code.
        tools: it renders tools, and the model's calls can be parsed; else ``prompted_tools`` puts both into text.
        thinking: the model can reason before its answer.
        harmony: the model is of gpt-oss's form.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.chat_template
        if isinstance(found, Mapping):
            found = found.get("tool_use") or found.get("default") or next(iter(found.values()), "")
        self.text = found if isinstance(found, str) else ""
        code = tokenizer.has_chat_template and (not self.text or has_template_code(tokenizer))
        takes_tools = code or re.search(r"\btools\b", self.text) is not None
        self.harmony = is_harmony(self.text)
        self.tools = takes_tools and (tokenizer.has_tool_calling or self.harmony)
        marks = (tokenizer.think_start, tokenizer.think_end, "enable_thinking")
        known = tokenizer.has_thinking and (code or any(m in self.text for m in marks))
        self.thinking = known or self.harmony

    def render(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of a request's messages and ``tools``. Raises RequestError if the template cannot render them."""
        messages = request.messages or ()
        if not self._tokenizer.has_chat_template:
            why = "this model has no chat template; send a prompt instead"
            raise RequestError(f"messages: {why}", "unsupported_parameter", param="messages")
        if not messages:
            raise RequestError("messages: at least one is needed", param="messages")
        return self._render(messages, tools, request.template_options, continued=request.continued)

    def begin(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of another conversation with the same system messages and tools; empty if it cannot be rendered."""
        system = itertools.takewhile(lambda m: m.get("role") == "system", request.messages or ())
        try:
            return self._render([*system, OTHER], tools, request.template_options)
        except RequestError:
            return ""

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        continued: bool = False,
        form: tuple[bool, bool] | None = None,
    ) -> str:
        if not self.tools and (tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)):
            messages, tools = written_out(messages, tools, self._takes_system), ()
        calls = any(m.get("tool_calls") for m in messages)
        strings, short = form or (self._form if calls else (False, False))
        given = [_formed(m, strings, short) for m in messages]
        how: dict[str, Any] = {"tools": [dict(t) for t in tools] or None, "add_generation_prompt": True}
        if continued:
            how |= {"add_generation_prompt": False, "continue_final_message": _continued(messages[-1])}
        return render(self._tokenizer, given, options, **how)

    @functools.cached_property
    def _takes_system(self) -> bool:
        try:
            return CITY in self._render([{"role": "system", "content": CITY}, OTHER], (), {})
        except RequestError:
            return False

    @functools.cached_property
    def _form(self) -> tuple[bool, bool]:
        """Whether the template needs calls' arguments as a JSON string, and whether it needs short call ids."""
        for form in ((False, False), (False, True), (True, False), (True, True)):
            try:
                if CITY not in self._render(CALLED, (TOOL,), {}, form=form):
                    return form
            except RequestError:
                continue
        return (False, False)


def _continued(message: Mapping[str, Any]) -> bool | str:
    """transformers' ``continue_final_message``: which of the last message's texts the answer continues."""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        why = "only an assistant's message without tool calls can be continued"
        raise RequestError(f"messages: {why}", param="messages")
    return "reasoning_content" if not message.get("content") and message.get("reasoning_content") else True


def _formed(message: Mapping[str, Any], strings: bool, short: bool) -> dict[str, Any]:
    made = {**message, "content": message.get("content") or ""}
    if short and "tool_call_id" in made:
        made["tool_call_id"] = _short(made["tool_call_id"])
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [dict(call, function=dict(call["function"])) for call in calls]
        for call in made["tool_calls"]:
            if short and "id" in call:
                call["id"] = _short(call["id"])
            if strings:
                call["function"]["arguments"] = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
    return made


def _short(name: str) -> str:
    """An id of nine letters and digits, as Mistral's templates require."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
