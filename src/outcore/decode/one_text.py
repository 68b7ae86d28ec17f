"""Decodes one text in caches of its own: its prompt, its tokens and its end.

If the model is all in memory, the next token's computation is queued before the current token is read, as in mlx-lm, so
that the device is not idle while Python builds a graph. However a text ends, its caches then hold only tokens that the
caller got.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import greedy_sampler

from ..engine.session import Session
from ..engine.transport import Transport
from ..engine.undo import Undo
from ..errors import ClosedError
from ..machine.allocator import clear_cache
from ..machine.device import on_cpu
from ..machine.exclusive import NotHandedOut
from ..modules.hooks import caches_in
from .media import plain
from .model_runner import ModelRunner
from .passes import Pass
from .prompt import cached_tokens
from .request import Alone, Request, Token, own_cache
from .sampling import Draw, MlxLmSampler, Processor, judge
from .speculative.proposers import Guess
from .text_drafts import TextDrafts

# MLX's cache is cleared after the first token and then after every so many, as in ``mlx_lm.generate.generate_step``:
# the first token cuts sliding windows to their size, which frees the prompt's part of them.
CLEAR_TOKENS = 256


@dataclass
class Computed:
    """The result of a forward pass over a text, from which tokens are chosen one by one.

    Attributes:
        logits: (1, vocabulary) after the last token, and after each of ``guesses``.
        verified: the caches hold all guesses, so that rejected ones have to be removed from them.
        seconds: duration of the pass.
        kept: guesses accepted so far; ``given``: tokens chosen so far.
    """

    logits: Sequence[mx.array]
    guesses: Sequence[Guess] = ()
    verified: bool = False
    seconds: float = 0.0
    kept: int = 0
    given: int = 0


@dataclass
class _Drawn:
    """A token (1,) that is queued on the device, its log-probabilities (vocabulary,), the text up to it (None: no
    processor needs it), and a function that removes the token before it from the caches."""

    token: mx.array
    logprobs: mx.array
    text: mx.array | None
    back: Callable[[], None]


class OneText:
    """A text that is being decoded; ``ends`` and ``most`` as in ``TextDrafts``.

    Attributes:
        prompt: passes over the prompt that are still to be computed.
        now: the last pass's result, while more tokens can be chosen from it; None: another pass is needed.
        undo: restores the caches to before the prompt; None: the second token was requested already.
        total: tokens of the prompt.
        ahead: the token that was drawn ahead, if any; ``failed``: the error of drawing it, if any.
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
        cache, found, media = own_cache(model, request), request.cached.tokens, request.media
        before = max(len(request.earlier), cached_tokens(cache) - found)
        self.runner = ModelRunner(
            model,
            session,
            cache,
            # A resident model draws ahead; this is undone when the sequence goes on in shared passes.
            owned=own.keeps if request.alone is not None else session.streaming is None,
            kv=own.kv,
            hidden=self.drafts.hidden,
            # If a sliding window keeps a prompt's first tokens, several tokens of one pass attend to other tokens than
            # each does in a separate pass.
            in_blocks=not (on_cpu() or any(isinstance(c, RotatingKVCache) and c.keep for c in caches_in(cache))),
            in_cache=found,
            arguments=None if media is None else lambda at, ids: media.arguments(before + at, ids),
        )
        self.sampler = Sampler(
            request.sampler or greedy_sampler,
            request.processors,
            plain(media, [*request.earlier, *request.tokens]),
            transport=session.transport,
            forgives=request.alone is None,
        )
        self.total = len(request.tokens) if own.embeddings is None else len(own.embeddings)
        self._more = before + self.total - len(self.sampler.text)  # tokens in the caches whose ids are not known
        self.prompt: list[Pass] = []
        self.now: Computed | None = None
        self.undo: Undo | None = None
        self.ahead: _Drawn | None = None
        self.failed: list[Exception] = []

    @property
    def answered(self) -> int:
        return len(self.sampler.text) - len(self.request.earlier) - len(self.request.tokens)

    @property
    def left(self) -> int:
        return self.request.max_tokens - self.answered

    def begin(self, prefill_step: int) -> None:
        """Prepares the passes over the part of the prompt that no cache holds, ``prefill_step`` tokens each."""
        request, cached, runner = self.request, self.request.cached, self.runner
        self.report(cached.tokens)
        if request.begun:
            runner.pending = list(request.tokens[:-1])
        elif cached.logits is not None:
            self.now = Computed([cached.logits])
        else:
            ids = mx.array(list(request.tokens[cached.tokens :]), dtype=mx.int32)
            passed = functools.partial(cached.passed, runner.cache)
            self.prompt = runner.prompting(ids, prefill_step, self._own.embeddings, passed)

    def report(self, tokens: int) -> None:
        self._own.progress(tokens, self.total)

    def prompted(self, logits: mx.array, began: float) -> None:
        """Takes the output of the prompt's last pass; ``began``: when the prompt's first one did."""
        logits = self.runner.prompted(logits, sum(each.tokens for each in self.prompt))
        self.drafts.prompt_s = self.session.metrics.clock() - began
        if self.request.cached.recording is not None:
            self.request.cached.recording.save(self.runner.cache, logits)
        self.now, self.prompt = Computed([logits]), []

    def choose(self) -> Token:
        now = self.now
        assert now is not None
        guess = now.guesses[now.kept] if now.kept < len(now.guesses) else None
        token, logprobs, right = self.sampler.choose(now.logits[now.kept], guess)
        now.kept += right
        now.given += 1
        self.session.metrics.accepted += right
        if self.drafts.drafting is not None and self.left:
            self.drafts.begin(logprobs, self.runner)
        if not right:
            if now.verified:
                self.settle()
            self.now = None
        return to_token(self.request, token, logprobs, right)

    def settle(self) -> None:
        """Drops the rest of the last pass's result. Afterwards the caches hold the tokens chosen so far, except the
        last one."""
        now, self.now = self.now, None
        if now is None or not now.verified:
            return
        self.runner.keep(now.given - 1)
        if self.drafts.control is not None:
            self.drafts.control.judged(now.guesses, self.sampler.text[-now.given :], now.seconds)

    def look_ahead(self) -> Token | None:
        """Returns the next token and queues the one after it on the device. Returns None if the next token needs a
        normal pass, as with streamed layers or drafts."""
        if self.failed:
            raise self.failed.pop()
        now, self.ahead, before = self.ahead, None, self.answered
        # Several ranks compute no token before the caller has got the one before it.
        resident = self.session.streaming is None and self.session.transport.alone
        if now is None:
            drafts = self.drafts.source is not None or self.runner.pending
            if not resident or drafts or not before or self.now is not None:
                return None
            text = mx.array(self.sampler.text, dtype=mx.int32) if self.sampler.processors else None
            now = self._draw(mx.array(self.sampler.text[-1:], dtype=mx.int32), text)
        try:
            if self.session.streaming is None and (self._own.whole or self.left > 1):
                self.ahead = self._draw(now.token, now.text, 1)
            token = cast(int, now.token.item())
        except Exception as e:
            # Return the current token, which was computed, and raise at the next call, as without looking ahead.
            self.failed, token = [e], cast(int, now.token.item())
        self.sampler.text.append(token)
        if before % CLEAR_TOKENS == 1:
            clear_cache()
        return to_token(self.request, token, now.logprobs)

    def _draw(self, token: mx.array, text: mx.array | None, more: int = 0) -> _Drawn:
        """Queues the pass after ``token``, which may itself still be queued, and the draw of the next token; ``more``:
        as in ``reserve``."""
        self.reserve(more)
        sampler = self.sampler
        with mx.stream(generation_stream):
            logits, back = self.runner.attempt(token)
            try:
                logprobs = sampler.logprobs(logits, text)
                sampler.drawn, sampler.seen = sampler.drawn + 1, logprobs
                drawn = sampler.sampler(logprobs).astype(mx.int32)
                mx.async_eval(drawn, logprobs)
                return _Drawn(drawn, logprobs[0], None if text is None else mx.concatenate([text, drawn]), back)
            except BaseException:
                back()
                raise

    def stop_ahead(self, error: BaseException | None = None) -> None:
        """Drops the token drawn ahead, and removes the token before it from the caches, unless they have to hold the
        last token and the text ends without ``error``."""
        ahead, self.ahead, self.failed = self.ahead, None, []
        if ahead is not None and (error is not None or not self._own.whole):
            ahead.back()

    def stop(self, error: BaseException | None = None) -> None:
        self.stop_ahead(error)
        with mx.stream(generation_stream):
            self.settle()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the text. Caches that the caller goes on with then hold the tokens that it got. ``error``: what ended
        the text early; ``NotHandedOut``: the caller did not get the last token."""
        made, unseen = self.answered, isinstance(error, NotHandedOut)
        try:
            self.stop(error)
            if unseen and made == 1:
                if self.undo is not None:
                    self.undo.restore()
                self.runner.in_cache = 0
            if not unseen:
                self.sampler.draw_ahead(made)
            try:
                self._bring_up(self._own.whole and error is None)
            except Exception as again:
                if error is None:
                    raise
                error.add_note(f"the prompt cache holds {self.runner.in_cache} tokens of prompt and answer: {again}")
        finally:
            # If no token was made, the caller gets no tokens in its caches, not even the prompt's cached prefix.
            self.session.in_cache = self.runner.in_cache if made else 0

    def _bring_up(self, whole: bool) -> None:
        """Computes the text's missing tokens into the caller's caches; ``whole``: the last token too."""
        runner = self.runner
        if runner.owned:
            last = self.sampler.text[-1] if whole and runner.in_cache < self.total + self.answered else None
            # If the model was closed meanwhile, the caches stay as they are.
            with mx.stream(generation_stream), contextlib.suppress(ClosedError):
                runner.flush(last)

    def reserve(self, more: int = 0) -> None:
        """Makes room for the text so far and ``more`` tokens, before a pass."""
        session, control, bound = self.session, self.drafts.control, self._own.bound
        tokens = len(self.sampler.text) + self._more + more
        tokens = tokens if bound is None else min(tokens, bound)
        if tokens > session.plan.context and not session.closed:
            session.residency.reserve(tokens)
        if session.streaming is None:
            session.before_pass()
        elif control is not None:
            control.most = min(control.most, session.size.drafted)


@dataclass
class Sampler:
    """Chooses tokens from logits, as mlx-lm does.

    Attributes:
        text: all tokens so far.
        drawn: how often the sampler was called; ``seen``: the log-probabilities of the last call, if any.
        forgives: other sequences share the pass, so an error of the sampler or a processor is not raised but stored in
            ``failed``, and the likeliest token is chosen.
    """

    sampler: Draw
    processors: Sequence[Processor]
    text: list[int]
    drawn: int = 0
    seen: mx.array | None = None
    transport: Transport = field(default_factory=Transport)
    forgives: bool = False
    failed: list[Exception] = field(default_factory=list)

    def draw_ahead(self, tokens: int) -> None:
        """Draws one token more than the text's ``tokens`` and drops it unevaluated, as mlx-lm does. So the random state
        afterwards is the one that mlx-lm leaves."""
        if self.drawn == tokens and self.seen is not None:
            # An error of this call concerns no token of the text.
            with contextlib.suppress(Exception):
                self.sampler(self.seen)

    def logprobs(self, logits: mx.array, text: mx.array | None) -> mx.array:
        """Returns log-probabilities (1, vocabulary) after the logits processors; ``text``: all tokens so far."""
        for process in self.processors:
            assert text is not None
            logits = process(text, logits)
        return logits - mx.logsumexp(logits, keepdims=True)

    def choose(self, logits: mx.array, guess: Guess | None = None) -> tuple[int, mx.array, bool]:
        """Chooses from logits (1, vocabulary). Returns the token, its log-probabilities (vocabulary,), and whether it
        equals ``guess``."""
        if not self.transport.chooses:
            return self._chosen_elsewhere(logits, guess)
        try:
            logprobs = self.logprobs(logits, mx.array(self.text, dtype=mx.int32) if self.processors else None)
            if guess is not None and guess.q is not None and isinstance(self.sampler, MlxLmSampler):
                self.drawn += 1
                token = judge(guess.token, self.sampler.distribution(logprobs)[0], guess.q)
                mx.eval(logprobs)
            else:
                self.drawn, self.seen = self.drawn + 1, logprobs
                drawn = self.sampler(logprobs)
                mx.eval(drawn, logprobs)
                token = cast(int, drawn.item())
        except Exception as e:
            if not self.forgives:
                self.transport.give_up(e)
                raise
            self.failed, token, logprobs = [e], cast(int, mx.argmax(logits).item()), logits
        if not self.transport.alone:
            self.transport.numbers(lambda: [token])
        self.text.append(token)
        return token, logprobs[0], guess is not None and token == guess.token

    def _chosen_elsewhere(self, logits: mx.array, guess: Guess | None) -> tuple[int, mx.array, bool]:
        (token,) = self.transport.numbers(list)
        self.text.append(token)
        return token, logits[0], guess is not None and token == guess.token


def to_token(request: Request, token: int, logprobs: mx.array, drafted: bool = False) -> Token:
    """Returns a token with the log-probabilities that its request asks for; ``logprobs`` of shape (vocabulary,)."""
    scores = logprobs if request.scores else None
    if request.logprobs is None:
        return Token(request.uid, token, scores=scores, drafted=drafted)
    top: list[int] = []
    if count := min(request.logprobs, logprobs.size):
        best = mx.argpartition(-logprobs, count - 1)[:count]
        top = cast(list[int], best[mx.argsort(-logprobs[best])].tolist())
    values = cast(list[float], logprobs[mx.array([token, *top])].astype(mx.float32).tolist())
    return Token(request.uid, token, values[0], tuple(zip(top, values[1:], strict=True)), scores, drafted)


def make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, *more: Any) -> int:
    """Makes room as ``Residency.reserve``, but does nothing for a closed session. Returns the prompt tokens to compute
    at a time."""
    if session.closed:
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, *more)
