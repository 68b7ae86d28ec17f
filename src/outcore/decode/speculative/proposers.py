"""Proposers of drafted tokens: the text's own repetitions, a model, or both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import mlx.core as mx

from ..sampling import MlxLmSampler

# A kind of guess: its source, and a number for how sure the source is. Guesses of a kind are about equally good.
Key = tuple[str, int]


@dataclass(frozen=True)
class Guess:
    """A token that may come next.

    Attributes:
        key: the kind of guess, in whose statistics the outcome is counted.
        q: the probabilities (vocabulary,) that it was drawn from, for the rejection rule; None: the sampler decides.
        likely: the most likely token, for decisions that must not depend on the draw; None: none was drawn.
        others: other guesses for this place, with their kinds, whose outcomes are counted too.
    """

    token: int
    key: Key
    q: mx.array | None = None
    likely: int | None = None
    others: tuple[tuple[int, Key], ...] = ()


class Proposer(Protocol):
    """Guesses tokens, one after the other.

    Attributes:
        name: the source in the kinds of its guesses.
        cheaper: a cheaper proposer that is part of this one, used if this one does not pay; None: there is none.
    """

    name: str

    @property
    def cheaper(self) -> Proposer | None: ...

    def begin(self, text: Sequence[int]) -> None:
        """Sets the text, which begins with the text that was set before."""

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        """Returns a guess of the token after the text and the ``drafted`` tokens; None: there is none."""


# Tokens that must agree before a repetition is followed, and the most that are compared.
SHORTEST, LONGEST = 2, 24

# How many earlier places in the text are compared, latest first.
PLACES = 8


class NGram:
    """Guesses what followed the longest suffix of the text where that occurred before: prompt lookup, without weights.

    (Prompt lookup decoding: https://github.com/apoorvumang/prompt-lookup-decoding.)
    """

    name = "ngram"
    cheaper = None

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def begin(self, text: Sequence[int]) -> None:
        for token in text[len(self._text) :]:
            self._text.append(token)
            if len(self._text) >= SHORTEST:
                self._places[tuple(self._text[-SHORTEST:])].append(len(self._text))

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        tail = [*self._text[-LONGEST:], *drafted][-LONGEST:]
        if len(tail) < SHORTEST:
            return None
        best, at = 0, 0
        for place in reversed(self._places.get(tuple(tail[-SHORTEST:]), [])[-PLACES - 1 :]):
            if place >= len(self._text):
                continue  # the suffix itself
            length = SHORTEST
            while length < min(place, len(tail)) and self._text[place - length - 1] == tail[-length - 1]:
                length += 1
            if length > best:
                best, at = length, place
        return Guess(self._text[at], (self.name, min(best, LONGEST).bit_length())) if best else None


# A repetition that is right with at least this chance is guessed without calling the model.
SURE = 0.95

# Source of repetitions that differ from the model's guess; they are right less often than repetitions that agree.
AGAINST = "against"


class Both:
    """Takes a model's guess, or the n-gram's if that is more likely right; ``chance``: of a kind of guess."""

    def __init__(self, ngram: Proposer, model: Proposer, chance: Callable[[Key], float]) -> None:
        self.name = model.name
        self.cheaper, self._model, self._chance = ngram, model, chance

    def begin(self, text: Sequence[int]) -> None:
        self.cheaper.begin(text)
        self._model.begin(text)

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        repeated = self.cheaper.guess(drafted)
        if repeated is not None and self._chance(repeated.key) >= SURE:
            return repeated
        found = self._model.guess(drafted)
        if repeated is None or found is None:
            return found or repeated
        seen = ((repeated.token, repeated.key),)
        # The choice must not depend on the token drawn, or the text would be distributed differently.
        if repeated.token == (found.token if found.likely is None else found.likely):
            return replace(found, others=seen)
        against = AGAINST, repeated.key[1]
        if self._chance(against) > self._chance(found.key):
            return Guess(repeated.token, against, others=(*seen, (found.token, found.key)))
        return replace(found, others=(*seen, (repeated.token, against)))


# Makes a guess from a draft model's logits, whatever their number is (``drawn``).
Draw = Callable[[mx.array], Guess | None]


def drawn(logits: mx.array, *, how: MlxLmSampler | None, vocabulary: int, name: str) -> Guess | None:
    """Returns a draft model's guess from its logits; None: they are not finite, as a broken draft's are.

    Args:
        logits: one-dimensional; may be more or fewer than ``vocabulary``, the number of the model's tokens.
        how: the guess is drawn from this sampler's distribution; None: it is the most likely token.
        name: of the source.
    """
    missing = vocabulary - logits.size
    logits = logits[:vocabulary] if missing <= 0 else mx.pad(logits, (0, missing), constant_values=-mx.inf)
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    q = likely = None
    if how is None:
        token = mx.argmax(logprobs)
        sure = mx.exp(logprobs[token].astype(mx.float32))
    else:
        q = how.distribution(logprobs[None])[0]
        token = mx.random.categorical(mx.log(q))
        # Not the drawn token's chance: the rejection rule holds only if the draft's length does not depend on the draw.
        likely = mx.argmax(q)
        sure = q[likely]
    mx.eval(token, sure)
    chance = cast(float, sure.item())
    if not math.isfinite(chance):
        return None
    key = name, int(chance * 15.99)
    return Guess(cast(int, token.item()), key, q, None if likely is None else cast(int, likely.item()))
