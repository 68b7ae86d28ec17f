"""Answers that a grammar allows: JSON of a schema, or calls of tools. llguidance says which tokens may come next.

All that an answer may be is one text in Lark's form, as llguidance reads it: the rule ``answer``, and before it, or in
its place, what is left free, such as thoughts.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.errors import RequestError
from outcore.modules.mlx_lm_tokenizer import inner_tokenizer
from outcore.serve.prompting import extent
from outcore.text import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACES = r"( |\n{1,2}[ \t]{0,20})?"
"""White space of JSON in one place, as llama.cpp has it: a model that is not sure what to say may write it for ever."""

GRAMMAR_CHARACTERS = 1 << 16
"""Of a grammar or a schema, at most: what is made of it takes hundreds of bytes for each."""


@dataclass(frozen=True)
class Free:
    """Text that the grammar says nothing of.

    Attributes:
        opening: tokens that it begins with.
        closing: and ends with, after which the answer begins; none: it takes the rest of the text.
        ends: the answer may end within it, before its closing tokens.
    """

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    ends: bool = False

    def rules(self, name: str, stops: Iterable[int]) -> str:
        """The text as rules of Lark's, the first of this name; where it may end the answer, also ``NAME_cut``, for its
        beginnings. It has none of the stops (tokens)."""
        opening = " ".join(f"<[{token}]>" for token in self.opening)
        closing, known = self.closing, sorted({*self.closing, *stops})
        # Rule number n: texts that end with n tokens of the closing ones, and not with more; the last one is whole.
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
    """What an answer may begin with.

    Attributes:
        inside: the prompt ends within this.
        thoughts: that may come first. ``instead``: what may come in place of the answer.
    """

    inside: Free | None = None
    thoughts: Free | None = None
    instead: Free | None = None


class Grammars:
    """Grammars over one tokenizer's tokens."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._wrapper = tokenizer

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's own; takes about a second for a large vocabulary.

        Raises:
            RequestError: llguidance is not installed, or cannot use this tokenizer.
        """
        try:
            import llguidance.hf
        except ImportError as e:
            why = 'answers of a given form need llguidance; on the server: pip install "outcore[json]"'
            raise RequestError(why, "not_installed") from e
        ends = sorted(self._wrapper.eos_token_ids & set(self._wrapper.get_vocab().values()))
        if not ends:
            raise RequestError("this model has no token that ends an answer of a given form", "unsupported_parameter")
        try:
            return llguidance.hf.from_tokenizer(inner_tokenizer(self._wrapper), eos_token=ends)
        except Exception as e:  # what is wrong with a tokenizer is told in many ways
            why = f"this model's tokenizer cannot be kept to a form: {one_line(e)}"
            raise RequestError(why, "unsupported_parameter") from e

    def of_rules(self, field: str, answer: str, before: Before = Before()) -> Callable[[int], GrammarProcessor]:
        """A grammar of rules, ``answer`` and those that it needs: it makes a processor for each choice.

        Args:
            field: of the request, which errors name.

        Raises:
            RequestError: llguidance cannot follow it.
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


def schema_rule(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as the rule ``answer``; of an empty one: any object.

    Raises:
        RequestError: it is too large or too deep.
    """
    check_grammar("schema", extent(schema, GRAMMAR_CHARACTERS))
    try:
        return f"answer: {json_of(schema or {'type': 'object'})}"
    except RecursionError as e:
        raise _not_followed("schema", e) from e


def json_of(schema: Mapping[str, Any], **options: Any) -> str:
    """JSON of a schema in a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': SPACES, **options}})}"


def check_grammar(field: str, characters: int) -> None:
    """Refuse a grammar that is too large.

    Raises:
        RequestError: it is.
    """
    if characters > GRAMMAR_CHARACTERS:
        what = f"more than {GRAMMAR_CHARACTERS} characters, the most that one may have"
        raise RequestError(f"{field}: {what}", param=field)


def _not_followed(field: str, error: Exception | str) -> RequestError:
    return RequestError(f"{field}: it cannot be followed: {one_line(error)}", param=field)


class GrammarProcessor:
    """A logits processor (mlx-lm's) that leaves a token only where the grammar allows it. To be the last of them.

    It takes each token once, but where it is called with other tokens than before, such as without drafted ones that
    did not stay. It may move to another thread between two calls.

    Args:
        matcher: at the grammar's beginning; not to be moved.
        vocabulary: tokens that it knows. ``ends``: those that end an answer.
        prompt: tokens before the answer in those that it will be called with.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: frozenset[int], prompt: int) -> None:
        self._first, self.vocabulary, self._ends, self._prompt = matcher, vocabulary, ends, prompt
        self._matcher = matcher.deep_copy()
        self._tokens: list[int] = []
        self._matched = 0  # of those; before the end, or a token that the grammar does not allow

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, vocabulary) with minus infinity for what may not come next.

        Args:
            tokens: all so far, (tokens,).

        Raises:
            RequestError: the grammar is too much for llguidance here.
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
            # llguidance's own rollback goes wrong where a grammar names tokens by their numbers; a token takes it 1 µs.
            self._matcher, self._matched, self._tokens = self._first.deep_copy(), 0, []
        new = tokens[len(self._tokens) :]
        if self._matched == len(self._tokens):
            known = itertools.takewhile(lambda token: token < self.vocabulary and token not in self._ends, new)
            self._matched += self._matcher.try_consume_tokens(list(known))
            self._check()
        self._tokens = tokens

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"schema: it is too much here: {one_line(self._matcher.get_error())}")
