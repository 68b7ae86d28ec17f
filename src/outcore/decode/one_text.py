"""One text as it is written in caches of its own: its prompt in one forward pass, then a token after the other.

``OneText.tokens`` is the life of a text. After the prompt it goes on ``ahead`` while everything is resident, else with
one pass a token, or for several where they are drafted. Whatever breaks it off, the caches hold tokens that were handed
out and no others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import greedy_sampler

from ..engine.engine import State
from ..engine.kept_tokens import in_memory
from ..engine.session import Session
from ..errors import ClosedError
from ..machine.device import on_cpu
from ..plan.draft_cost import MOST
from .batch_engine import Request, Token, own_cache, to_token
from .kv_slices import KvBits
from .lookahead import look_ahead
from .model_runner import ModelRunner
from .prompt import cached_tokens
from .sampling import foresee
from .served import NotHandedOut
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting
from .speculative.speculate import Sampler, Speculation, speculate

Steps = Generator[tuple[int, mx.array, bool], None, None]
"""Yields tokens, their log-probabilities (vocabulary,), and whether they were drafted."""


class OneText:
    """A text under way.

    Args:
        request: what it begins with; its cache is written to.
        drafting: what drafts for it, if anything does; ``most``: tokens for a pass at most.
        ends: tokens after which nothing is drafted.
        before: tokens before the text that the cache holds, as far as they are known: drafts may repeat them.
        bound: tokens that its caches hold at most; None: as many as it has.
        owned: somebody goes on with the caches: whatever fails, they are what they were before it.
        kv: how keys and values are quantized; None: they are not.
        cache: what is written to in place of the request's.

    Attributes:
        control: of this text's drafts; None: there are none yet.
        in_cache: when it has ended, tokens of prompt and answer that went into the caches.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        request: Request,
        *,
        drafting: Drafting | None = None,
        most: int = 0,
        ends: Collection[int] = (),
        before: Sequence[int] = (),
        bound: int | None = None,
        owned: bool = False,
        kv: KvBits | None = None,
        cache: list[Any] | None = None,
    ) -> None:
        self.session, self.request, self.most, self.in_cache = session, request, most, 0
        self._drafting = drafting if most else None
        self._ends, self._before, self._bound = ends, before, bound
        self.control: DraftLengthPolicy | None = None
        self.cache = own_cache(model, request) if cache is None else cache
        known = request.known.held
        self._held = max(len(request.earlier), cached_tokens(self.cache) - known)
        hidden = None if self._drafting is None else self._drafting.hidden()
        self.target = ModelRunner(model, session, self.cache, owned=owned, kv=kv, in_blocks=not on_cpu(), hidden=hidden)
        self.target.in_cache = known
        text = [*request.earlier, *request.tokens]
        sampler = request.sampler or greedy_sampler
        self.sampler = Sampler(sampler, request.processors, text, transport=session.transport)

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens of prompt and answer, before a pass."""
        tokens += self._held
        make_room(self.session, tokens if self._bound is None else min(tokens, self._bound))
        # Where nothing is streamed, a look at memory too, which a streamed model takes by itself.
        self.session.before_pass()
        if self.session.streaming is not None and self.control is not None:
            self.control.most = min(self.control.most, self.session.size.drafted)
            self.look()

    def look(self) -> None:
        """Tell what drafts of the disk, as it is now."""
        session, control = self.session, self.control
        if control is None:
            return
        streaming = session.streaming
        reads = streaming is not None and not control.by_token
        control.own = session.transport.alone
        control.ahead = streaming.ring.ahead if streaming is not None and reads else 0.0
        sweep = session.plan.bytes_per_token if reads else 0
        control.reading_s = control.experience.reading_s(*session.metrics.reading(), sweep)

    def speculation(self, logprobs: mx.array) -> Speculation | None:
        """How tokens are drafted whose log-probabilities are like these, if they are."""
        session, target = self.session, self.target
        if self._drafting is None or not target.verifies:
            return None
        if session.plan.pools and not self._fit_to_pools():
            return None
        if session.experience is None:
            session.experience = AcceptanceStats()
        self.control = DraftLengthPolicy(self.most, session.experience)
        self.control.by_token = bool(session.plan.pools)
        self.control.foreseen_s = target.prompt_s
        how = foresee(self.request.sampler, logprobs.dtype)
        source = self._drafting.source(self.control, how, logprobs.size, target.state, target.hidden)
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        room = session.plan.budget_bytes - session.plan.peak_bytes if session.plan.streams else 0
        return Speculation(source, self.control, session.metrics, self._ends, self._before, max(0, room))

    def _fit_to_pools(self) -> bool:
        """Whether drafts can be worth their time where experts are read one by one: passes of a token each would read,
        and compute, as much for each as plain decoding. No more are drafted than go to the pools."""
        plan, size = self.session.plan, self.session.size
        experts = size.on_demand
        fits = (n for n in range(self.most, 0, -1) if experts is not None and experts.reads(plan, size, n + 1))
        self.most = next(fits, 0)
        return self.target.in_blocks and self.most > 0

    def tokens(
        self,
        prefill_step: int,
        *,
        embeddings: mx.array | None = None,
        progress: Callable[[int, int], object] = lambda *_: None,
        whole: bool = False,
        leaves: bool = False,
    ) -> Steps:
        """The tokens of the answer; once.

        Args:
            prefill_step: tokens of the prompt computed at a time.
            embeddings: (tokens, hidden), in place of the prompt's.
            progress: called with the tokens of the prompt that are computed, and all of them.
            whole: the caches hold the last token too when it has ended.
            leaves: the text may be gone on with elsewhere: at its end nothing is drawn ahead, as mlx-lm does, and where
                it is closed caches may lack the tokens that a draft brought.
        """
        target, sampler, known = self.target, self.sampler, self.request.known
        total = len(self.request.tokens) if embeddings is None else len(embeddings)
        begin = len(sampler.text)
        try:
            new = contextlib.nullcontext() if known.held == total else target.transaction(total - known.held)
            with mx.stream(generation_stream), new as undo:
                logits = self._prompt(prefill_step, embeddings, progress, total)
                token, logprobs, _ = sampler.choose(logits)
                # All slots are free to read ahead into while the caller looks at the token.
                target.drain()
                progress(total, total)
            try:
                yield token, logprobs, False
            except NotHandedOut:
                if undo is not None:
                    undo.restore()
                target.in_cache = 0
                raise
            undo = None
            yield from self._following(logprobs, total, whole)
        except GeneratorExit:
            if not leaves:
                self._bring_up(total + len(sampler.text) - begin, whole)
                sampler.draw_ahead(len(sampler.text) - begin)
            raise
        except BaseException as e:
            # A token that nobody saw was drawn ahead of those that were seen.
            if not leaves and not isinstance(e, NotHandedOut):
                sampler.draw_ahead(len(sampler.text) - begin)
            # Tokens that a draft brought and a snapshot had to give up again.
            try:
                self._bring_up(total + len(sampler.text) - begin, False)
            except Exception as again:
                e.add_note(f"the prompt cache holds {target.in_cache} tokens of prompt and answer: {again}")
            raise
        else:
            # Whoever hands out a text's last token closes this: it may go on, in steps that begin anew (``halving``).
            self._bring_up(total + len(sampler.text) - begin, whole)
        finally:
            # What was found of a prompt that brought no token is nobody's.
            self.in_cache = self.session.in_cache = target.in_cache if len(sampler.text) > begin else 0

    def _prompt(
        self, step: int, embeddings: mx.array | None, progress: Callable[[int, int], object], total: int
    ) -> mx.array:
        """Logits (1, vocabulary) of the prompt's last position."""
        known, cache = self.request.known, self.cache
        progress(known.held, total)
        if known.logits is not None:
            return known.logits
        ids = mx.array(list(self.request.tokens[known.held :]), dtype=mx.int32)

        def computed(tokens: int) -> None:
            progress(known.held + tokens, total)

        passed = functools.partial(known.passed, cache)
        logits = self.target.prompt(ids, step, embeddings, passed, computed)
        known.save(cache, logits)
        return logits

    def _following(self, logprobs: mx.array, total: int, whole: bool) -> Steps:
        """What follows the first token, whose log-probabilities (vocabulary,) are these."""
        target, sampler, left = self.target, self.sampler, self.request.max_tokens - 1

        def reserve(tokens: int) -> None:
            self.reserve(total + tokens)

        if left < 1:
            return
        if (how := self.speculation(logprobs)) is not None:
            target.snapshots = how.snapshots
            yield from speculate(sampler.text[-1], target, sampler, how, tokens=left, reserve=reserve)
            return
        made = 0
        # Several ranks have nothing of a token before the one that it follows was handed out.
        if target.resident and sampler.transport.alone:
            made = yield from look_ahead(sampler.text[-1], target, sampler, tokens=left, reserve=reserve, whole=whole)
        for n in range(made + 1, left + 1):
            reserve(n)
            with mx.stream(generation_stream), target.transaction(1):
                token, logprobs, _ = sampler.choose(target.step(sampler.text[-1]))
                target.drain()
            yield token, logprobs, False

    def _bring_up(self, tokens: int, whole: bool) -> None:
        """Have the caches hold what was yielded, if somebody goes on with them.

        Args:
            tokens: of prompt and answer. whole: the last one too.
        """
        target = self.target
        if target.owned:
            last = self.sampler.text[-1] if whole and target.in_cache < tokens else None
            # Of a model that was closed meanwhile, what there is stays.
            with mx.stream(generation_stream), contextlib.suppress(ClosedError):
                target.flush(last)


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    *,
    max_tokens: int = 256,
    prefill_step_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    leave_last: bool = False,
    kv: KvBits | None = None,
) -> Steps:
    """mlx-lm's function of that name for a model that Outcore has loaded: greedy, not drafted, and by itself; no other
    thread may use the model meanwhile."""
    session: Session = model.outcore
    request = Request(0, cast(list[int], prompt.tolist()), max_tokens)
    text = OneText(model, session, request, owned=prompt_cache is not None, cache=prompt_cache, kv=kv)
    return text.tokens(
        prefill_step_size or session.plan.prefill_step, whole=prompt_cache is not None and not leave_last
    )


class Alone:
    """One sequence at a time, as ``generate`` writes it.

    Args:
        ends: tokens that end a text: nothing is drafted behind them.
        prefill_step: tokens of a prompt computed at a time.
        most: tokens drafted for a pass at most; None: as many as are worth it.
    """

    def __init__(
        self, model: nn.Module, session: Session, *, ends: Collection[int], prefill_step: int, most: int | None = None
    ) -> None:
        self._model, self._session, self._ends, self._most = model, session, ends, most
        self.prefill_step = prefill_step
        self._text: OneText | None = None
        self._tokens: Steps | None = None

    def step(self, joining: Sequence[Request]) -> list[Token]:
        for request in joining:
            drafting, most = drafting_of(self._session, asked=self._most)
            # What is drawn ahead in memory is taken back where the sequence goes on with others.
            owned, how = self._session.streaming is None, {"drafting": drafting, "most": most, "ends": self._ends}
            self._text = OneText(self._model, self._session, request, owned=owned, **how)
            self._tokens = self._text.tokens(self.prefill_step, leaves=True)
        assert self._tokens is not None and self._text is not None
        token, logprobs, _ = next(self._tokens)
        return [to_token(self._text.request, int(token), logprobs)]

    def take_out(self, uid: int) -> tuple[list[Any], int]:
        """End the sequence; its caches, and how many tokens of its prompt and answer they hold: all but the last, or
        fewer where drafted tokens had to be taken back."""
        text = self._text
        assert text is not None and text.request.uid == uid
        self.close()
        in_memory(text.cache)
        return text.cache, text.in_cache

    def remove(self, uids: Sequence[int]) -> None:
        if self._text is not None and self._text.request.uid in uids:
            self.close()

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()
        self._tokens = self._text = None


def drafting_of(session: Session, model: nn.Module | None = None, asked: int | None = None) -> tuple[Any, int]:
    """What drafts (``Drafting``; None: nothing), and how many tokens for a pass at most.

    Args:
        model: in place of what was loaded for it. asked: how many; None: as many as are worth it.
    """
    if asked == 0:
        return None, 0
    drafting = cast(Drafting | None, session.drafting) if model is None else Drafting("model", "draft_model", model)
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
