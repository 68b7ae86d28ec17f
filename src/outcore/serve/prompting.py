"""From what is asked to what a model is given: tokens, marks to read its answer by, and a grammar.

All of it is done for one loaded tokenizer, and on any thread but the engine's: it makes no MLX arrays.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decode.chat_prompt import check_ids, encode_rendered, encode_text, same_tokens
from ..decode.prefix import GRID
from ..errors import RequestError
from ..text import one_line, shortened
from .call_grammar import FORMS, CallForm
from .chat_template import TokenizerTemplate
from .events import GenerationRequest
from .grammar import GRAMMAR_CHARACTERS, Before, Free, Grammar, Grammars, check_grammar, extent, schema_rule
from .harmony import FINAL, harmony_markers
from .parsing import NAME, TextParser, markers_of

CHARACTERS = 16
"""Of a token, at most, in a whole prompt: text has three to six. Spaces by the thousand have more, and say nothing."""


@dataclass(frozen=True)
class Prompt:
    """What a model is given for an ask.

    Attributes:
        tokens: ids, at least one, of this tokenizer.
        stop: strings that end an answer.
        parser: makes what reads the text of a choice, whose number it is given.
        grammar: that an answer has to follow; None: it is free.
        shared: its first tokens, with which other conversations of the same system messages and tools begin too.
    """

    tokens: tuple[int, ...]
    tokenizer: TokenizerWrapper
    stop: tuple[str, ...] = ()
    parser: Callable[[int], TextParser] = TextParser
    grammar: Grammar | None = None
    shared: int = 0


class Prompter:
    """Makes prompts for one model. Its calls may come from any thread, one at a time.

    Args:
        vocabulary: tokens that the model has embeddings for; None: for all of its tokenizer's.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = TokenizerTemplate(tokenizer)
        self._grammars = Grammars(tokenizer)
        made = harmony_markers if self._template.harmony else functools.partial(markers_of, tokenizer)
        self._markers = {tools: made(tools) for tools in (False, True)}
        ids = tokenizer.get_vocab().values()
        self._begin: tuple[str, Sequence[int]] = "", ()
        self._ids = frozenset(t for t in ids if vocabulary is None or t < vocabulary)

    def prepare(self, ask: GenerationRequest, most: int | None = None) -> Prompt:
        """What the model is given.

        Args:
            most: tokens at most. A prompt that has more of them is not refused for certain, but one of more characters
                than those can be: before it is made into tokens, each of which takes a hundred bytes.

        Raises:
            RequestError: it cannot be meant, or not with this model; names the field.
        """
        if bias := ask.sampling.logit_bias:
            check_ids(list(bias), self._ids, "logit_bias")
        if most is not None:
            _check_characters(sum(len(m.get("content") or "") + CHARACTERS for m in ask.messages or ()), most)
            _check_characters(len(ask.prompt or "") * (1 if isinstance(ask.prompt, str) else CHARACTERS), most)
            _check_characters(extent(ask.tools, most * CHARACTERS), most, "tools")
        return self._chat(ask, most) if ask.messages is not None else self._text(ask)

    def _text(self, ask: GenerationRequest) -> Prompt:
        prompt = ask.prompt
        if prompt is None:
            raise RequestError("messages, or a prompt, are needed")
        if ask.tools and ask.tool_choice != "none":
            raise RequestError("tools: they go with messages, not with a prompt", param="tools")
        tokens = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        check_ids(tokens, self._ids)
        return Prompt(tuple(tokens), self.tokenizer, ask.stop, grammar=self._free(ask))

    def _free(self, ask: GenerationRequest) -> Grammar | None:
        """The grammar of an answer that nothing may come before."""
        if ask.grammar:
            return self._grammars.of_text(ask.grammar)
        return None if ask.schema is None else self._grammars.of_rules("schema", schema_rule(ask.schema))

    def _chat(self, ask: GenerationRequest, most: int | None) -> Prompt:
        tools = _tools(ask)
        text = self._template.render(ask, tools)
        _check_characters(len(text), most)
        tokens = encode_rendered(self.tokenizer, text)
        check_ids(tokens, self._ids, "messages")
        thinking = self._thinks(ask, text)
        parser = functools.partial(
            TextParser, markers=self._markers[bool(tools)], tools=tools, thinking=thinking, continued=ask.continued,
            parallel=ask.parallel_tools,
        )  # fmt: skip
        grammar, shared = self._grammar(ask, tools, text, thinking), self._shared(ask, tools, tokens)
        return Prompt(tuple(tokens), self.tokenizer, ask.stop, parser, grammar, shared)

    def _shared(self, ask: GenerationRequest, tools: tuple[Mapping[str, Any], ...], tokens: Sequence[int]) -> int:
        """How many tokens are of system messages and tools alone; 0 where that is less than the prefix cache keeps."""
        if len(tokens) <= GRID:
            return 0
        begin = self._template.begin(ask, tools)
        if begin != self._begin[0]:
            # Most conversations of a server begin in the same way.
            self._begin = begin, self.tokenizer.encode(begin, add_special_tokens=False)
        return same_tokens(tokens, self._begin[1])

    def _thinks(self, ask: GenerationRequest, text: str) -> bool:
        """Whether the answer begins within what is thought."""
        begin, end = self.tokenizer.think_start, self.tokenizer.think_end
        if begin is None or ask.messages is None:
            return False
        if not ask.continued:
            return text.rstrip().endswith(begin)
        last = ask.messages[-1]
        said = last.get("content") or ""
        return said.rfind(begin) > said.rfind(end) if said else bool(last.get("reasoning_content"))

    def _grammar(
        self, ask: GenerationRequest, tools: tuple[Mapping[str, Any], ...], text: str, thinking: bool
    ) -> Grammar | None:
        forced = ask.tool_choice not in ("auto", "none")
        if ask.grammar:
            if forced or ask.schema is not None:
                raise RequestError("grammar: not together with a schema or a required tool", param="grammar")
            return self._free(ask)
        if not forced and ask.schema is None:
            return None
        try:
            own = self.tokenizer
            if own.structural_markers or own.response_initial_state not in (None, "normal"):
                why = "this model's answers have parts that no grammar is known for"
                raise RequestError(why, "unsupported_parameter")
            before = self._before(ask, text, thinking)
            if forced:
                return self._grammars.of_rules("tools", self._calls(ask, tools), before)
            assert ask.schema is not None
            if tools and not self._template.harmony:
                before = replace(before, instead=Free(tuple(self.tokenizer.tool_call_start_tokens)))
            begun = _begun(ask, text) if not thinking else ""
            return self._grammars.of_rules("schema", schema_rule(ask.schema), before, begun)
        except RequestError as e:
            e.param = e.param or ("tool_choice" if forced else "schema")
            raise

    def _before(self, ask: GenerationRequest, text: str, thinking: bool) -> Before:
        """Thoughts that may come before an answer, or that it begins within."""
        own = self.tokenizer
        if self._template.harmony and not ask.continued:
            # Calls are among what comes before the answer, and end it.
            final = own.encode(FINAL, add_special_tokens=False)
            return Before(Free((), tuple(final), ends=bool(ask.tools) and ask.tool_choice != "none"))
        if not own.has_thinking:
            return Before()
        opening, closing = tuple(own.think_start_tokens), tuple(own.think_end_tokens)
        if thinking:
            return Before(Free((), closing))
        over = ask.continued or text.rstrip().endswith(own.think_end)
        return Before(thoughts=None if over or not self._template.thinking else Free(opening, closing))

    def _calls(self, ask: GenerationRequest, tools: tuple[Mapping[str, Any], ...]) -> str:
        name = str(getattr(self.tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
        if name not in FORMS:
            why = f"this model writes calls in a form ({name}) that cannot be required; leave it at auto"
            raise RequestError(f"tool_choice: {why}", "unsupported_parameter", param="tool_choice")
        if ask.continued:
            why = "an answer that goes on with a message cannot be a call"
            raise RequestError(f"tool_choice: {why}", param="tool_choice")
        chosen = [t for t in tools if ask.tool_choice in ("required", t["function"]["name"])]
        check_grammar("tools", extent([t["function"]["parameters"] for t in chosen], GRAMMAR_CHARACTERS))
        own = self.tokenizer
        arguments = self._mark("[ARGS]") if "[ARGS]" in self._template.text else ""
        form = CallForm(name, self._mark(own.tool_call_start), self._mark(own.tool_call_end), arguments)
        try:
            lark = form.lark(chosen, ask.parallel_tools and ask.tool_choice == "required")
        except (AttributeError, KeyError, TypeError, RecursionError) as e:
            raise RequestError(f"tools: their parameters are no JSON schema: {one_line(e)}", param="tools") from e
        check_grammar("tools", len(lark))
        return lark

    def _mark(self, mark: str) -> str:
        """A mark as grammars name it: by its token, if it is one."""
        tokens = self.tokenizer.encode(mark, add_special_tokens=False)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(mark)


def too_long(what: str, tokens: int, most: int) -> RequestError:
    """That something has more tokens than the model's context."""
    counts = {"n_prompt_tokens": tokens, "n_ctx": most}
    why = f"{what}; this model's context is {most}: shorten it"
    return RequestError(why, "context_length_exceeded", counts=counts)


def _check_characters(characters: int, most: int | None, what: str = "the prompt") -> None:
    if most is not None and characters > most * CHARACTERS:
        tokens = characters // CHARACTERS
        raise too_long(f"{what}: {characters} characters or more, at least {tokens} tokens", tokens, most)


def _tools(ask: GenerationRequest) -> tuple[Mapping[str, Any], ...]:
    """The tools that may be called, each with parameters, as the parsers of calls want them.

    Raises:
        RequestError: one has no name of its own, or there is none to choose.
    """
    names: dict[str, None] = {}
    for n, name in enumerate(tool["function"]["name"] for tool in ask.tools):
        if not NAME.fullmatch(name) or name in names:
            why = "a name of letters, digits and _ - . : / is needed, that no other tool has"
            raise RequestError(f"tools[{n}]: {why}", param=f"tools[{n}]")
        names[name] = None
    if ask.tool_choice not in {"auto", "none", *names, *(["required"] if names else [])}:
        raise RequestError(f"tool_choice: there is no tool {shortened(ask.tool_choice)}", param="tool_choice")
    nothing = {"type": "object", "properties": {}}
    return tuple(
        {**tool, "function": {**tool["function"], "parameters": tool["function"].get("parameters") or nothing}}
        for tool in (ask.tools if ask.tool_choice != "none" else ())
    )


def _begun(ask: GenerationRequest, text: str) -> str:
    """Of the answer, what the prompt ends with."""
    if not (ask.continued and ask.messages):
        return ""
    said = str(ask.messages[-1].get("content") or "")
    return said if text.endswith(said) else said.strip()
