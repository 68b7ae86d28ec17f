"""Many tokens from one sweep: tokens are drafted, one sweep computes what the model says to all of them, and those that
it would have said itself stay. Greedy output is that of plain decoding; sampled output is distributed like it, and with
coupled drafts is that of plain decoding too (see ``sampling``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...disk.metrics import Metrics
from ...engine.transport import Solo, Transport
from ..model_runner import ModelRunner
from ..sampling import Draw, MlxLmSampler, judge
from .draft_length import DraftLengthPolicy
from .proposers import Guess, Proposer

Processor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's: all tokens so far, and logits (1, vocabulary), to logits."""


@dataclass
class Sampler:
    """Chooses tokens by logits, as mlx-lm does.

    Args:
        sampler: from log-probabilities (1, vocabulary) to a token.
        processors: change logits before that.
        text: tokens so far.
        drawn: tokens that the sampler was asked for; ``seen``: the log-probabilities that it saw last, if any.
        transport: to the ranks that have other layers of the model.
    """

    sampler: Draw
    processors: Sequence[Processor]
    text: list[int]
    drawn: int = 0
    seen: mx.array | None = None
    transport: Transport = field(default_factory=Solo)

    def draw(self, logprobs: mx.array) -> mx.array:
        """The sampler's token (1,) for log-probabilities (1, vocabulary); not evaluated."""
        self.drawn, self.seen = self.drawn + 1, logprobs
        return self.sampler(logprobs)

    def draw_ahead(self, tokens: int) -> None:
        """Leave the random numbers where mlx-lm leaves them, which draws one more than the ``tokens`` of a text.

        The sampler is called once more, as mlx-lm calls it, whoever made it; what it returns is dropped unevaluated.
        """
        if self.drawn == tokens and self.seen is not None:
            # An error of this call concerns no token of the text.
            with contextlib.suppress(Exception):
                self.sampler(self.seen)

    def logprobs(self, logits: mx.array, text: mx.array | None) -> mx.array:
        """Log-probabilities (1, vocabulary) of processed logits; ``text``: all tokens so far, for the processors."""
        for process in self.processors:
            assert text is not None
            logits = process(text, logits)
        return logits - mx.logsumexp(logits, keepdims=True)

    def choose(self, logits: mx.array, guess: Guess | None = None) -> tuple[int, mx.array, bool]:
        """The next token, its log-probabilities (vocabulary,), and whether it is the one that was guessed.

        Args:
            logits: (1, vocabulary).
        """
        if not self.transport.chooses:
            return self._told(logits, guess)
        try:
            token, logprobs = self._chosen(logits, guess)
        except Exception as e:
            self.transport.give_up(e)
            raise
        self.transport.numbers(lambda: [token])
        self.text.append(token)
        return token, logprobs[0], guess is not None and token == guess.token

    def _chosen(self, logits: mx.array, guess: Guess | None) -> tuple[int, mx.array]:
        logprobs = self.logprobs(logits, mx.array(self.text, dtype=mx.int32) if self.processors else None)
        if guess is not None and guess.q is not None and isinstance(self.sampler, MlxLmSampler):
            self.drawn += 1
            token = judge(guess.token, self.sampler.distribution(logprobs)[0], guess.q)
            mx.eval(logprobs)
        else:
            drawn = self.draw(logprobs)
            mx.eval(drawn, logprobs)
            token = cast(int, drawn.item())
        return token, logprobs

    def _told(self, logits: mx.array, guess: Guess | None) -> tuple[int, mx.array, bool]:
        """The token that another rank chose, which has the logits."""
        (token,) = self.transport.numbers(list)
        self.text.append(token)
        return token, logits[0], guess is not None and token == guess.token


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted.

    Attributes:
        source: of guesses. ``control``: says how many.
        metrics: where they are counted.
        ends: tokens after which nothing is drafted.
        before: tokens before the text, which caches held when it began: it may repeat them.
        snapshots: bytes that states to go back to may take, beyond one of each.
    """

    source: Proposer
    control: DraftLengthPolicy
    metrics: Metrics
    ends: Collection[int] = ()
    before: Sequence[int] = ()
    snapshots: int = 0


class Waits:
    """What a sweep waits for, from now on."""

    def __init__(self, metrics: Metrics, transport: Transport) -> None:
        self._metrics, self._transport = metrics, transport
        self._stall_s, self._ranks_s = metrics.stall_s, metrics.ranks_s

    def for_disks(self) -> float:
        """Seconds that disks were waited for: this rank's, and of those that it waited for others as many as they
        waited for theirs. All ranks ask."""
        own, ranks = self._metrics.stall_s - self._stall_s, self._metrics.ranks_s - self._ranks_s
        return own + max(0.0, min(ranks, self._transport.seconds(own) - own))


def cut_behind(guesses: list[Guess], ends: Collection[int]) -> list[Guess]:
    """Guesses up to one that ends the text."""
    end = next((i + 1 for i, g in enumerate(guesses) if g.token in ends), len(guesses))
    return guesses[:end]


def _guesses(chooser: Sampler, how: Speculation, most: int, reserve: Callable[[int], object]) -> list[Guess]:
    """What follows the text perhaps, for which there is room; of ranks that share a model the first one guesses."""
    transport, guesses = chooser.transport, list[Guess]()
    if transport.chooses:
        guesses = cut_behind(how.control.draft(how.source, [*how.before, *chooser.text], most), how.ends)
        reserve(len(guesses))
        # The room that drafted tokens took may have been needed.
        del guesses[how.control.most :]
    tokens = transport.numbers(lambda: [g.token for g in guesses])
    if transport.chooses:
        return guesses
    reserve(len(tokens))
    return [Guess(token, ("told", 0)) for token in tokens]


def speculate(
    token: int,
    target: ModelRunner,
    chooser: Sampler,
    how: Speculation,
    *,
    tokens: int,
    reserve: Callable[[int], object],
) -> Iterator[tuple[int, mx.array, bool]]:
    """Yield ``(token, log-probabilities (vocabulary,), drafted)`` for what follows ``token``.

    Args:
        token: the last one so far, which no cache holds yet.
        tokens: to yield at most.
        reserve: called before each sweep with the tokens that will be computed beyond ``token`` until its end.
    """
    control, metrics = how.control, how.metrics
    made, ended = 0, metrics.clock()
    while made < tokens:
        guesses = _guesses(chooser, how, tokens - made - 1, lambda n, made=made: reserve(made + 1 + n))  # type: ignore[misc]
        waits, began = Waits(metrics, chooser.transport), metrics.clock()
        idle_s = began - ended
        if not guesses and not target.behind:
            # As without a draft: what chooses the token is computed together with its logits.
            with mx.stream(generation_stream), target.transaction(1):
                token, logprobs, _ = chooser.choose(target.step(token))
                target.drain()
            ended = metrics.clock()
            control.saw((), (), 1, ended - began, waits.for_disks(), idle_s)
            made += 1
            yield token, logprobs, False
            continue
        first = len(chooser.text)
        with mx.stream(generation_stream), target.transaction(target.behind + 1 + len(guesses)):
            logits = target.verify(token, [g.token for g in guesses])
            ended = metrics.clock()
            seconds, stall_s = ended - began, waits.for_disks()
            token, logprobs, right = chooser.choose(logits[0], guesses[0] if guesses else None)
        kept = given = 0
        try:
            while True:
                kept += right
                made += 1
                given += 1
                yield token, logprobs, right
                if not right:
                    break
                guess = guesses[kept] if kept < len(guesses) else None
                with mx.stream(generation_stream):
                    token, logprobs, right = chooser.choose(logits[kept], guess)
        finally:
            # Also where the caller has heard enough: what it did not take is not part of the text, and the last token
            # of a text is in no cache yet.
            with mx.stream(generation_stream):
                target.keep(given - 1)
            metrics.drafted += len(guesses)
            metrics.accepted += kept
            # A text's last sweep too, which nobody asks on after: its tokens were made like any others.
            control.saw(guesses, chooser.text[first:], target.computed, seconds, stall_s, idle_s)
