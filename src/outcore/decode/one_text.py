"""One text in caches of its own: what it begins with, what its last forward pass brought, and how it ends.

Whatever breaks a text off, its caches hold tokens that were handed out and no others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import greedy_sampler

from ..engine.engine import State
from ..engine.session import Session
from ..engine.undo import Undo
from ..errors import ClosedError
from ..machine.device import on_cpu
from ..modules.call_values import caches_in
from ..plan.draft_cost import MOST
from .batch_engine import Alone, Request, own_cache
from .lookahead import look_ahead
from .model_runner import ModelRunner
from .passes import Pass
from .prompt import cached_tokens
from .sampling import Sampler, foresee
from .served import NotHandedOut, pass_on
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting
from .speculative.proposers import Guess, Proposer
from .speculative.sources import for_models

Chosen = tuple[int, mx.array, bool]
"""A token, its log-probabilities (vocabulary,), and whether it was drafted."""


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


class OneText:
    """A text under way.

    Args:
        ends: tokens after which nothing is drafted.
        most: tokens drafted for a forward pass at most; None: as many as are worth it.

    Attributes:
        control: decides how much is drafted for it; None: nothing is, or not yet.
        prompt: passes over its prompt that are to be computed.
        now: what the last pass brought and is not given out; None: another pass is needed.
        undo: takes the caches back to before the prompt, until the second token is asked for.
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
        self.session, self.request, self._own, self.ends = session, request, own, ends
        drafting, self.most = drafting_of(session, own.draft_model, most)
        self._drafting = drafting if self.most else None
        self.control: DraftLengthPolicy | None = None
        self.source: Proposer | None = None
        cache, known = own_cache(model, request), request.known.held
        self._held = max(len(request.earlier), cached_tokens(cache) - known)
        # What is drawn ahead in memory is taken back where the sequence goes on with others.
        owned = own.keeps if request.alone is not None else session.streaming is None
        hidden = None if self._drafting is None else self._drafting.hidden()
        # Where a window keeps a prompt's first tokens, tokens of one pass see others than token by token.
        windows = any(isinstance(c, RotatingKVCache) and c.keep for c in caches_in(cache))
        in_blocks = not (on_cpu() or windows)
        self.target = ModelRunner(model, session, cache, owned=owned, kv=own.kv, in_blocks=in_blocks, hidden=hidden)
        self.target.in_cache = known
        text = [*request.earlier, *request.tokens]
        sampler = request.sampler or greedy_sampler
        forgives = request.alone is None
        self.sampler = Sampler(sampler, request.processors, text, transport=session.transport, forgives=forgives)
        self.prompt: list[Pass] = []
        self.now: Computed | None = None
        self.undo: Undo | None = None
        self._ahead: Generator[Chosen, None, int] | None = None

    @property
    def cache(self) -> list[Any]:
        return self.target.cache

    @property
    def total(self) -> int:
        """Tokens of its prompt."""
        return len(self.request.tokens) if self._own.embeddings is None else len(self._own.embeddings)

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
            target.goes_on(request.tokens[:-1])
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
            self.request.known.recording.save(self.cache, logits)
        self.now, self.prompt = Computed([logits]), []

    def choose(self) -> Chosen:
        """The next token, by what the last pass brought."""
        now = self.now
        assert now is not None
        guess = now.guesses[now.kept] if now.kept < len(now.guesses) else None
        token, logprobs, right = self.sampler.choose(now.logits[now.kept], guess)
        now.kept += right
        now.given += 1
        self.session.metrics.accepted += right
        if self.source is None and self._drafting is not None and self.left:
            self._draft_like(logprobs)
        if not right:
            self.settle()
        return token, logprobs, right

    def settle(self) -> None:
        """Nothing more is taken of the last pass: caches go back to what was given out, but for the last token."""
        now, self.now = self.now, None
        if now is None or not now.verified:
            return
        self.target.keep(now.given - 1)
        if self.control is not None:
            self.control.judged(now.guesses, self.sampler.text[-now.given :], now.seconds)

    def look_ahead(self) -> Chosen | None:
        """The next token, whose successor is under way then; None: something is streamed, or drafted."""
        if self._ahead is None:
            # Several ranks have nothing of a token before the one that it follows was handed out.
            alone = self.target.resident and self.session.transport.alone
            if not alone or self.source is not None or not self.answered or self.target.behind or self.now is not None:
                return None
            begin = self.total + self.answered - 1
            self._ahead = look_ahead(
                self.sampler.text[-1],
                self.target,
                self.sampler,
                tokens=self.left,
                reserve=lambda tokens: self.reserve(begin + tokens),
                whole=self._own.whole,
            )
        try:
            return next(self._ahead)
        except StopIteration:
            self._ahead = None
            return None

    def stop_ahead(self, error: BaseException | None = None) -> None:
        """Take back what was computed ahead; ``error``: what ends the text."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and error is not None:
            pass_on(ahead, error)
        elif ahead is not None:
            ahead.close()

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
        if self.session.streaming is not None and self.control is not None:
            self.control.most = min(self.control.most, self.session.size.drafted)
            self.look()

    # Drafts

    def look(self) -> None:
        """Tell what drafts of the disk, as it is now."""
        session, control = self.session, self.control
        if control is None:
            return
        streaming = session.streaming
        reads = streaming is not None and not control.by_token
        control.own = session.transport.alone
        control.ahead = streaming.ring.share_ahead if streaming is not None and reads else 0.0
        sweep = session.plan.bytes_per_token if reads else 0
        control.reading_s = control.experience.reading_s(*session.metrics.reading(), sweep)

    def guesses(self, most: int) -> list[Guess]:
        """What follows the text perhaps, as is worth a pass's time, up to a token that ends the text."""
        assert self.control is not None and self.source is not None
        found = self.control.draft(self.source, [*self._own.history, *self.sampler.text], min(most, self.left - 1))
        end = next((i + 1 for i, g in enumerate(found) if g.token in self.ends), len(found))
        return found[:end]

    def _draft_like(self, logprobs: mx.array) -> None:
        """Have tokens be drafted whose log-probabilities are like these, if that can be worth its time."""
        session, target, drafting = self.session, self.target, self._drafting
        if drafting is None or not target.verifies or (session.plan.pools and not self._fit_to_pools()):
            self._drafting = None
            return
        if session.experience is None:
            session.experience = AcceptanceStats()
        self.control = DraftLengthPolicy(self.most, session.experience)
        self.most = self.control.most
        self.control.by_token = bool(session.plan.pools)
        self.control.foreseen_s = target.prompt_s
        how = foresee(self.request.sampler, logprobs.dtype)
        self.source = drafting.source(self.control, how, logprobs.size, target.state, target.hidden)

    def _fit_to_pools(self) -> bool:
        """Whether drafts can be worth their time where experts are read one by one: passes of a token each would read,
        and compute, as much for each as plain decoding. No more are drafted than go to the pools."""
        plan, size = self.session.plan, self.session.size
        experts = size.on_demand
        fits = (n for n in range(self.most, 0, -1) if experts is not None and experts.reads(plan, size, n + 1))
        self.most = next(fits, 0)
        return self.target.in_blocks and self.most > 0


def drafting_of(
    session: Session, model: nn.Module | None = None, asked: int | None = None
) -> tuple[Drafting | None, int]:
    """What drafts (``Drafting``; None: nothing), and how many tokens for a pass at most.

    Args:
        model: in place of what was loaded for it. asked: how many; None: as many as are worth it.
    """
    if asked == 0:
        return None, 0
    drafting = cast(Drafting | None, session.drafting) if model is None else for_models("draft_model").of_model(model)
    most = MOST if session.streaming is None else session.size.drafted
    if not session.transport.alone:
        # Who has experts in pools would read as many for each guess; what evaluates on the way cannot be verified while
        # it is streamed, on whichever rank. Then nobody drafts, whatever was asked for.
        evaluates = session.streaming is not None and session.streaming.evaluates
        none = drafting is None or session.plan.pools or evaluates
        (most,) = session.transport.leasts([0 if none else most])
    elif asked is not None and not most:
        most = asked
    return drafting, most if asked is None else min(asked, most)


def make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
    """Room for a context of that many tokens, a prompt, and bytes of caches to go back to. Returns tokens of the prompt
    to compute at a time."""
    if session.state is State.CLOSED:  # what it holds then stays as it is
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, kept)
