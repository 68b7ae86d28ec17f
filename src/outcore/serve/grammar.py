"""Answers that a grammar allows: JSON of a schema, or calls of tools. llguidance says which tokens may come next.

A grammar begins where the answer does. What may come before it, thoughts, is left free until its end; and a call of a
tool may come in its place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from ..errors import RequestError
from ..modules.mlx_lm_compat import inner_tokenizer
from ..text import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACES = r"( |\n{1,2}[ \t]{0,20})?"
"""White space of JSON in one place, as llama.cpp has it: a model that is not sure what to say may write it for ever."""

GRAMMAR_CHARACTERS = 1 << 16
"""Of a grammar or a schema, at most: what is made of it takes hundreds of bytes for each."""

OPTIONS: dict[str, Any] = {"whitespace_pattern": SPACES}


@dataclass(frozen=True)
class Detour:
    """Text that the grammar says nothing of, where the answer begins.

    Attributes:
        opening: tokens that it begins with. ``closing``: and ends with, after which the grammar begins; none: it takes
            the rest of the text.
        ends: the answer may end within it.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...] = ()
    ends: bool = False


@dataclass(frozen=True)
class Grammar:
    """What an answer has to be.

    Attributes:
        matcher: at the grammar's beginning; not to be moved.
        vocabulary: tokens that it knows. ``ends``: those that end an answer.
        detours: that may come before it, or in its place.
        inside: the prompt ends within this one.
    """

    matcher: LLMatcher
    vocabulary: int
    ends: frozenset[int]
    detours: tuple[Detour, ...] = ()
    inside: Detour | None = None

    def processor(self, prompt: int | None = None) -> GrammarProcessor:
        """A logits processor for one choice; it may move to another thread between two calls.

        Args:
            prompt: tokens before the answer in those that it will be called with; None: as many as in the first call.
        """
        return GrammarProcessor(self, prompt)


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

    def of_schema(self, schema: Mapping[str, Any], begun: str = "") -> LLMatcher:
        """JSON of a schema; an empty one: any object.

        Args:
            begun: of it, before the answer.

        Raises:
            RequestError: llguidance cannot follow it, or it does not begin like that.
        """
        check_grammar("schema", extent(schema, GRAMMAR_CHARACTERS))
        try:
            source = json.dumps({**(schema or {"type": "object"}), "x-guidance": OPTIONS})
        except RecursionError as e:
            raise _not_followed("schema", e) from e
        matcher = self._matcher("schema", lambda own: own.grammar_from_json_schema(source))
        tokens = self.tokenizer.tokenize_str(begun) if begun else []
        if matcher.try_consume_tokens(tokens) < len(tokens):
            raise RequestError("messages: the last one does not begin JSON of the schema", param="messages")
        return matcher

    def of_lark(self, lark: str) -> LLMatcher:
        """Text of a grammar in Lark's form.

        Raises:
            RequestError: llguidance cannot follow it.
        """
        check_grammar("tools", len(lark))
        return self._matcher("tools", lambda own: own.grammar_from_lark(lark))

    def of_text(self, text: str) -> LLMatcher:
        """A grammar in llama.cpp's form (GBNF), or in Lark's.

        Raises:
            RequestError: it is neither, or llguidance cannot follow it.
        """
        check_grammar("grammar", len(text))
        assert self.tokenizer
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(text)
        except Exception as e:  # of several kinds, its own among them
            raise _not_followed("grammar", e) from e
        return self._matcher("grammar", lambda own: own.grammar_from_lark(lark))

    def grammar(self, matcher: LLMatcher, detours: Sequence[Detour] = (), inside: Detour | None = None) -> Grammar:
        """A matcher, with what may come before it."""
        own = self.tokenizer
        return Grammar(matcher, own.vocab_size, frozenset(own.eos_tokens), tuple(detours), inside)

    def _matcher(self, field: str, source: Callable[[type[LLMatcher]], str]) -> LLMatcher:
        tokenizer = self.tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        try:
            matcher = LLMatcher(tokenizer, source(LLMatcher), log_level=0, limits=limits)
        except ValueError as e:
            raise _not_followed(field, e) from e
        if matcher.is_error():
            raise _not_followed(field, matcher.get_error())
        return matcher


def extent(value: Any, most: int) -> int:
    """Characters of all names and texts in a value, and one for each other value; beyond ``most`` it ends early."""
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


class _At(Enum):
    BEGINNING = auto()  # of the answer: a detour may begin, or the grammar
    OPENING = auto()  # of a detour
    DETOUR = auto()
    GRAMMAR = auto()
    END = auto()  # the grammar's end has passed, or a token came that it does not allow


@dataclass(frozen=True)
class _Place:
    """Where an answer is after some of its tokens.

    Attributes:
        detour: that it is in; ``opened``: tokens of its opening that are there.
        matched: tokens that the matcher has taken.
        left: a detour has ended: none of that kind begins again.
    """

    at: _At = _At.BEGINNING
    detour: Detour | None = None
    opened: int = 0
    matched: int = 0
    left: bool = False


class GrammarProcessor:
    """A logits processor (mlx-lm's) that leaves a token only where the grammar allows it. To be the last of them.

    It takes each token once. Where it is called with other tokens than before, such as without drafted ones that did
    not stay, it goes back to where they part.
    """

    def __init__(self, grammar: Grammar, prompt: int | None) -> None:
        self._grammar, self._prompt = grammar, prompt
        self._matcher = grammar.matcher.deep_copy()
        self._tokens: list[int] = []
        inside = grammar.inside
        first = _Place() if inside is None else _Place(_At.DETOUR, inside)
        self._places = [first]  # after none of the tokens, after one, ...

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, vocabulary) with minus infinity for what may not come next.

        Args:
            tokens: all so far, (tokens,).

        Raises:
            RequestError: the grammar is too much for llguidance here.
        """
        if self._prompt is None:
            self._prompt = tokens.size
        answer = tokens[self._prompt :]
        self._follow(cast(list[int], answer.tolist()) if answer.size else [])
        allowed = self._allowed(logits.shape[-1])
        if allowed is None:
            return logits
        return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, logits.dtype))

    def _follow(self, tokens: Sequence[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(self._tokens, tokens, strict=False)) if a != b), None)
        same = min(len(self._tokens), len(tokens)) if same is None else same
        self._matcher.rollback(self._places[-1].matched - self._places[same].matched)
        del self._tokens[same:], self._places[same + 1 :]
        for token in tokens[same:]:
            self._tokens.append(token)
            self._places.append(self._next(self._places[-1], token))

    def _next(self, place: _Place, token: int) -> _Place:
        if place.at is _At.DETOUR:
            assert place.detour is not None
            closing = list(place.detour.closing)
            over = closing and self._tokens[-len(closing) :] == closing
            return replace(place, at=_At.BEGINNING, detour=None, left=True) if over else place
        if place.at is _At.BEGINNING:
            begun = next((d for d in self._detours(place) if d.opening[0] == token), None)
            if begun is not None:
                return self._opened(replace(place, detour=begun, opened=1))
        if place.at is _At.OPENING:
            assert place.detour is not None
            if token == place.detour.opening[place.opened]:
                return self._opened(replace(place, opened=place.opened + 1))
        elif place.at is not _At.END and token not in self._grammar.ends:
            if self._matcher.try_consume_tokens([token]) == 1:
                return replace(place, at=_At.GRAMMAR, matched=place.matched + 1)
            if self._matcher.is_error():
                raise RequestError(f"schema: it is too much here: {one_line(self._matcher.get_error())}")
        return replace(place, at=_At.END)

    def _opened(self, place: _Place) -> _Place:
        assert place.detour is not None
        return replace(place, at=_At.DETOUR if place.opened == len(place.detour.opening) else _At.OPENING)

    def _detours(self, place: _Place) -> list[Detour]:
        return [d for d in self._grammar.detours if not (place.left and d.closing)]

    def _allowed(self, width: int) -> NDArray[np.bool_] | None:
        """Whether each token of the model's vocabulary may come next; None: any may."""
        place = self._places[-1]
        allowed = np.zeros(max(width, self._grammar.vocabulary), dtype=np.bool_)
        if place.at is _At.DETOUR:
            assert place.detour is not None
            if place.detour.ends or not place.detour.closing:
                return None
            # An answer has to come yet.
            allowed[:] = True
            allowed[list(self._grammar.ends)] = False
        elif place.at is _At.OPENING:
            assert place.detour is not None
            allowed[place.detour.opening[place.opened]] = True
        elif place.at is _At.END:
            allowed[list(self._grammar.ends)] = True
        else:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                raise RequestError(f"schema: it is too much here: {one_line(self._matcher.get_error())}")
            allowed[: self._grammar.vocabulary] = np.unpackbits(mask, bitorder="little")[: self._grammar.vocabulary]
            if place.at is _At.BEGINNING:
                allowed[[d.opening[0] for d in self._detours(place)]] = True
        return allowed[:width]
