"""One text in caches of its own: what it begins with, what its last forward pass brought, and how it ends.

Where its model is all in memory, a token's successor is on the device's queue before the token is looked at, as in
mlx-lm: so the device is not idle while Python builds a graph. Whatever breaks a text off, its caches hold tokens that
were handed out and no others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import greedy_sampler

from ..engine.engine import State
from ..engine.session import Session
from ..engine.transport import Transport
from ..engine.undo import Undo
from ..errors import ClosedError
from ..machine.allocator import clear_cache
from ..machine.device import on_cpu
from ..machine.exclusive import NotHandedOut
from ..modules.call_values import caches_in
from .model_runner import ModelRunner
from .passes import Pass
from .prompt import cached_tokens
from .request import Alone, Request, Token, own_cache
from .sampling import Draw, MlxLmSampler, Processor, judge
from .speculative.proposers import Guess
from .text_drafts import TextDrafts

CLEAR_TOKENS = 256
"""Tokens after which freed memory is given back, beginning with the first, as in ``mlx_lm.generate.generate_step``: the
first cuts windows to their size, and what the prompt had of them is free then."""


@dataclass
class Computed:
    """What a forward pass said of a text, not all of which is given out.

    Attributes:
        logits: (1, vocabulary) after the last token, and after each of ``guesses``.
        verified: caches have to be taken back to what is given out of it.
        seconds: that it took. ``kept``: guesses that were right, ``given``: tokens given out, so far.
    """

    logits: Sequence[mx.array]
    guesses: Sequence[Guess] = ()
    verified: bool = False
    seconds: float = 0.0
    kept: int = 0
    given: int = 0


@dataclass
class _Drawn:
    """A token (1,) on the device's queue, its log-probabilities (vocabulary,), the text with it where processors look
    at that, and what takes the token before it out of the caches."""

    token: mx.array
    logprobs: mx.array
    text: mx.array | None
    back: Callable[[], None]


class OneText:
    """A text under way.

    Args:
        ends: tokens after which nothing is drafted.
        most: tokens drafted for a forward pass at most; None: as many as are worth it.

    Attributes:
        drafts: what is drafted for it.
        prompt: passes over its prompt that are to be computed.
        now: what the last pass brought and is not given out; None: another pass is needed.
        undo: takes the caches back to before the prompt, until the second token is asked for.
        total: tokens of its prompt.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        request: Request,
        *,
        ends: Collection[int] = (),
        most: int | None = None,
    ) -> None:
        own = request.alone or Alone()
        self.session, self.request, self._own = session, request, own
        self.drafts = TextDrafts(session, request, ends, most)
        cache, known = own_cache(model, request), request.known.held
        self._held = max(len(request.earlier), cached_tokens(cache) - known)
        self.target = ModelRunner(
            model,
            session,
            cache,
            # What is drawn ahead in memory is taken back where the sequence goes on with others.
            owned=own.keeps if request.alone is not None else session.streaming is None,
            kv=own.kv,
            hidden=self.drafts.hidden,
            # Where a window keeps a prompt's first tokens, tokens of one pass see others than token by token.
            in_blocks=not (on_cpu() or any(isinstance(c, RotatingKVCache) and c.keep for c in caches_in(cache))),
            in_cache=known,
        )
        self.sampler = Sampler(
            request.sampler or greedy_sampler,
            request.processors,
            [*request.earlier, *request.tokens],
            transport=session.transport,
            forgives=request.alone is None,
        )
        self.total = len(request.tokens) if own.embeddings is None else len(own.embeddings)
        self.prompt: list[Pass] = []
        self.now: Computed | None = None
        self.undo: Undo | None = None
        self._ahead: _Drawn | None = None
        self._failed: Exception | None = None  # where a token was drawn ahead

    @property
    def answered(self) -> int:
        """Tokens of its answer so far."""
        return len(self.sampler.text) - len(self.request.earlier) - len(self.request.tokens)

    @property
    def left(self) -> int:
        """Tokens that may follow."""
        return self.request.max_tokens - self.answered

    def begin(self, prefill_step: int) -> None:
        """Have its prompt be computed, so many tokens at a time, as far as that was not done before."""
        request, known, target = self.request, self.request.known, self.target
        self.tell(known.held)
        if request.begun:
            target.pending = list(request.tokens[:-1])
        elif known.logits is not None:
            self.now = Computed([known.logits])
        else:
            ids = mx.array(list(request.tokens[known.held :]), dtype=mx.int32)
            passed = functools.partial(known.passed, target.cache)
            self.prompt = target.prompting(ids, prefill_step, self._own.embeddings, passed)

    def tell(self, tokens: int) -> None:
        """So many of its prompt's tokens are computed."""
        self._own.progress(tokens, self.total)

    def prompted(self, logits: mx.array, seconds: float) -> None:
        """Its prompt is computed."""
        logits = self.target.prompted(logits, sum(each.tokens for each in self.prompt), seconds)
        if self.request.known.recording is not None:
            self.request.known.recording.save(self.target.cache, logits)
        self.now, self.prompt = Computed([logits]), []

    def choose(self) -> Token:
        """The next token, by what the last pass brought."""
        now = self.now
        assert now is not None
        guess = now.guesses[now.kept] if now.kept < len(now.guesses) else None
        token, logprobs, right = self.sampler.choose(now.logits[now.kept], guess)
        now.kept += right
        now.given += 1
        self.session.metrics.accepted += right
        if self.drafts.drafting is not None and self.left:
            self.drafts.begin(logprobs, self.target)
        if not right:
            self.settle()
        return to_token(self.request, token, logprobs, right)

    def settle(self) -> None:
        """Nothing more is taken of the last pass: caches go back to what was given out, but for the last token."""
        now, self.now = self.now, None
        if now is None or not now.verified:
            return
        self.target.keep(now.given - 1)
        if self.drafts.control is not None:
            self.drafts.control.judged(now.guesses, self.sampler.text[-now.given :], now.seconds)

    def look_ahead(self) -> Token | None:
        """The next token, whose successor is on the queue then; None: something is streamed, or drafted."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        now, self._ahead, target, before = self._ahead, None, self.target, self.answered
        # Several ranks have nothing of a token before the one that it follows was handed out.
        resident = self.session.streaming is None and self.session.transport.alone
        if now is None:
            if not resident or self.drafts.source is not None or not before or target.pending or self.now is not None:
                return None
            text = mx.array(self.sampler.text, dtype=mx.int32) if self.sampler.processors else None
            now = self._draw(mx.array(self.sampler.text[-1:], dtype=mx.int32), text, self.total + before)
        try:
            if self.session.streaming is None and (self._own.whole or self.left > 1):
                self._ahead = self._draw(now.token, now.text, self.total + before + 1)
            token = cast(int, now.token.item())
        except Exception as e:
            # The token before it is computed and will be handed out first, as it would be without looking ahead.
            self._failed, token = e, cast(int, now.token.item())
        self.sampler.text.append(token)
        if before % CLEAR_TOKENS == 1:
            clear_cache()
        return to_token(self.request, token, now.logprobs)

    def _draw(self, token: mx.array, text: mx.array | None, tokens: int) -> _Drawn:
        """What follows a token, which need not be computed; there are to be so many ``tokens`` then."""
        self.reserve(tokens)
        sampler = self.sampler
        with mx.stream(generation_stream):
            logits, back = self.target.attempt(token)
            try:
                logprobs = sampler.logprobs(logits, text)
                drawn = sampler.draw(logprobs).astype(mx.int32)
                mx.async_eval(drawn, logprobs)
                return _Drawn(drawn, logprobs[0], None if text is None else mx.concatenate([text, drawn]), back)
            except BaseException:
                back()
                raise

    def stop_ahead(self, error: BaseException | None = None) -> None:
        """Take back what was computed ahead, but where caches are to hold the last token; ``error``: what ends the
        text."""
        ahead, self._ahead, self._failed = self._ahead, None, None
        if ahead is not None and (error is not None or not self._own.whole):
            ahead.back()

    def stop(self, error: BaseException | None = None) -> None:
        """Nothing more is asked for; ``error``: what ends it."""
        self.stop_ahead(error)
        with mx.stream(generation_stream):
            self.settle()

    def end(self, error: BaseException | None = None) -> None:
        """The text is over: caches that somebody goes on with hold what was handed out.

        Args:
            error: what broke it off; ``NotHandedOut``: nobody got to see its last token.
        """
        made, unseen = self.answered, isinstance(error, NotHandedOut)
        try:
            self.stop(error)
            if unseen and made == 1:
                if self.undo is not None:
                    self.undo.restore()
                self.target.in_cache = 0
            if not unseen:
                self.sampler.draw_ahead(made)
            try:
                self._bring_up(self._own.whole and error is None)
            except Exception as again:
                if error is None:
                    raise
                error.add_note(f"the prompt cache holds {self.target.in_cache} tokens of prompt and answer: {again}")
        finally:
            # What was found of a prompt that brought no token is nobody's.
            self.session.in_cache = self.target.in_cache if made else 0

    def _bring_up(self, whole: bool) -> None:
        """Have caches that somebody goes on with hold the text; ``whole``: its last token too."""
        target = self.target
        if target.owned:
            last = self.sampler.text[-1] if whole and target.in_cache < self.total + self.answered else None
            # Of a model that was closed meanwhile, what there is stays.
            with mx.stream(generation_stream), contextlib.suppress(ClosedError):
                target.flush(last)

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens of prompt and answer, before a pass."""
        tokens += self._held
        bound = self._own.bound
        make_room(self.session, tokens if bound is None else min(tokens, bound))
        # Where nothing is streamed, a look at memory too, which a streamed model takes by itself.
        self.session.before_pass()
        control = self.drafts.control
        if self.session.streaming is not None and control is not None:
            control.most = min(control.most, self.session.size.drafted)


@dataclass
class Sampler:
    """Chooses tokens by logits, as mlx-lm does.

    Args:
        sampler: from log-probabilities (1, vocabulary) to a token.
        processors: change logits before that.
        text: tokens so far.
        drawn: tokens that the sampler was asked for; ``seen``: the log-probabilities that it saw last, if any.
        transport: to the ranks that have other layers of the model.
        forgives: an error of the sampler or a processor is kept as ``failed``, and the likeliest token stands in, as
            others share the passes.
    """

    sampler: Draw
    processors: Sequence[Processor]
    text: list[int]
    drawn: int = 0
    seen: mx.array | None = None
    transport: Transport = field(default_factory=Transport)
    forgives: bool = False
    failed: Exception | None = None

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
            logprobs = self.logprobs(logits, mx.array(self.text, dtype=mx.int32) if self.processors else None)
            if guess is not None and guess.q is not None and isinstance(self.sampler, MlxLmSampler):
                self.drawn += 1
                token = judge(guess.token, self.sampler.distribution(logprobs)[0], guess.q)
                mx.eval(logprobs)
            else:
                drawn = self.draw(logprobs)
                mx.eval(drawn, logprobs)
                token = cast(int, drawn.item())
        except Exception as e:
            if not self.forgives:
                self.transport.give_up(e)
                raise
            self.failed, token, logprobs = e, cast(int, mx.argmax(logits).item()), logits
        if not self.transport.alone:
            self.transport.numbers(lambda: [token])
        self.text.append(token)
        return token, logprobs[0], guess is not None and token == guess.token

    def _told(self, logits: mx.array, guess: Guess | None) -> tuple[int, mx.array, bool]:
        """The token that another rank chose, which has the logits."""
        (token,) = self.transport.numbers(list)
        self.text.append(token)
        return token, logits[0], guess is not None and token == guess.token


def to_token(request: Request, token: int, logprobs: mx.array, drafted: bool = False) -> Token:
    """A token with what its request asked for; ``logprobs`` of shape (vocabulary,)."""
    scores = logprobs if request.scores else None
    if request.logprobs is None:
        return Token(request.uid, token, scores=scores, drafted=drafted)
    top: list[int] = []
    if count := min(request.logprobs, logprobs.size):
        best = mx.argpartition(-logprobs, count - 1)[:count]
        top = cast(list[int], best[mx.argsort(-logprobs[best])].tolist())
    values = cast(list[float], logprobs[mx.array([token, *top])].astype(mx.float32).tolist())
    return Token(request.uid, token, values[0], tuple(zip(top, values[1:], strict=True)), scores, drafted)


def make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
    """Room for a context of that many tokens, a prompt, and bytes of caches to go back to. Returns tokens of the prompt
    to compute at a time."""
    if session.state is State.CLOSED:  # what it holds then stays as it is
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, kept)
