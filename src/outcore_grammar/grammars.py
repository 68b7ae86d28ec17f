"""Chooses the grammar of an answer: a schema or required calls, and the free text that may come before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.errors import RequestError
from outcore.serve.chat_template import TokenizerTemplate
from outcore.serve.events import GenerationRequest
from outcore.serve.harmony import FINAL
from outcore.serve.prompting import Grammar, extent
from outcore.text import one_line

from .call_grammar import FORMS, call_rules
from .lark_grammar import GRAMMAR_CHARACTERS, Before, Free, Grammars, check_grammar, schema_rule


class AnswerGrammars:
    def __init__(self, tokenizer: TokenizerWrapper, template: TokenizerTemplate) -> None:
        self._tokenizer, self._template, self._grammars = tokenizer, template, Grammars(tokenizer)

    def of(self, request: GenerationRequest, tools: Sequence[Mapping[str, Any]], text: str, thinking: bool) -> Grammar:
        forced = request.messages is not None and request.tool_choice not in ("auto", "none")
        if request.messages is None:
            return self._grammars.of_rules("schema", schema_rule(request.schema or {}))
        if request.continued and (request.messages[-1].get("content") or forced):
            why = "an answer that continues a message can be neither JSON of a schema nor a required call"
            raise RequestError(why, "unsupported_parameter")
        own = self._tokenizer
        if own.structural_markers or own.response_initial_state not in (None, "normal"):
            why = "no grammar is known for the form of this model's answers"
            raise RequestError(why, "unsupported_parameter")
        before = self._before(request, text, thinking)
        if forced:
            return self._grammars.of_rules("tools", self._calls(request, tools), before)
        if tools and not self._template.harmony:
            before = replace(before, instead=Free(tuple(own.tool_call_start_tokens)))
        return self._grammars.of_rules("schema", schema_rule(request.schema or {}), before)

    def _before(self, request: GenerationRequest, text: str, thinking: bool) -> Before:
        """The reasoning that may come before the answer, or within which it begins."""
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
        name = str(getattr(self._tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
        if name not in FORMS:
            why = f"calls of this model's form ({name}) cannot be required; use auto"
            raise RequestError(f"tool_choice: {why}", "unsupported_parameter", param="tool_choice")
        chosen = [t for t in tools if request.tool_choice in ("required", t["function"]["name"])]
        check_grammar("tools", extent([t["function"]["parameters"] for t in chosen], GRAMMAR_CHARACTERS))
        own = self._tokenizer
        arguments = self._mark("[ARGS]") if "[ARGS]" in self._template.text else ""
        start, end = self._mark(own.tool_call_start), self._mark(own.tool_call_end)
        several = request.parallel_tools and request.tool_choice == "required"
        try:
            lark = call_rules(name, start, end, arguments, chosen, several)
        except (AttributeError, KeyError, TypeError, RecursionError) as e:
            raise RequestError(f"tools: a tool's parameters are no JSON schema: {one_line(e)}", param="tools") from e
        check_grammar("tools", len(lark))
        return lark

    def _mark(self, mark: str) -> str:
        """A mark in a grammar: ``<[id]>`` if it is one token, else quoted text."""
        tokens = self._tokenizer.encode(mark, add_special_tokens=False)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(mark)
