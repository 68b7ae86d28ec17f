"""Texts in caches and passes of their own, one or several: each has the bits that it has alone, and where tokens are
drafted, several of each come from one sweep.

One text whose model is all in memory, and that is not drafted, is decoded ahead (``OneText.look_ahead``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..engine.session import Session
from ..engine.undo import Undo
from ..machine.allocator import clear_cache
from ..modules.away import in_memory
from .one_text import Computed, OneText
from .passes import Pass, run_passes
from .request import Request, Token
from .speculative.draft_length import SharedPass
from .speculative.proposers import Guess


class SpeculativeDecoder:
    """Sequences that run side by side, each in caches of its own.

    Args:
        ends: tokens that end a text: nothing is drafted behind them.
        most: tokens drafted of a text for a sweep at most; None: as many as are worth it.

    Attributes:
        drafts: of the last step, tokens that were drafted for each text, and those that were right.
        failed: of the last step, sequences whose own sampler or processors raised, which have no token of it, and what.
    """

    def __init__(
        self, model: nn.Module, session: Session, *, ends: Collection[int] = (), most: int | None = None
    ) -> None:
        self._model, self._session, self._ends, self._most = model, session, ends, most
        self._texts: dict[int, OneText] = {}
        self.drafts: dict[int, tuple[int, int]] = {}
        self.failed: dict[int, Exception] = {}

    @property
    def ready(self) -> bool:
        """Whether some of them have tokens without another sweep."""
        return any(text.now is not None for text in self._texts.values())

    def step(self, joining: Sequence[Request], chunk: int, beside: Sequence[Pass] = ()) -> list[Token]:
        """One more token of each that has one without another pass; where none has, or some join, of all from one.
        Who joins while others are ``ready`` has a pass without them.

        Args:
            chunk: tokens of a prompt computed at a time.
            beside: passes over a part of a prompt whose sequence does not join yet; none is ``ready`` then.
        """
        self.drafts, self.failed = {}, {}
        for request in joining:
            text = OneText(self._model, self._session, request, ends=self._ends, most=self._most)
            text.begin(chunk)
            self._texts[request.uid] = text
        texts = list(self._texts.values())
        one = texts[0] if len(texts) == 1 else None
        if one is not None:
            one.undo = None
            if not beside and not one.prompt and (found := one.look_ahead()) is not None:
                return [found]
        elif joining:
            for text in texts:
                text.stop_ahead()
        waiting = texts if one is not None and one.now is None else [text for text in texts if text.now is None]
        if waiting and (joining or len(waiting) == len(texts)):
            try:
                return self._sweep(waiting, beside, one)
            except BaseException:
                for text in waiting:
                    text.now = None
                raise
        given = self._given()
        if joining and one is not None:
            one.tell(one.total)
        return given

    def end(self, error: BaseException | None = None) -> None:
        """The text, which is alone, is over: as ``OneText.end``."""
        for text in self._texts.values():
            text.end(error)
        self._texts = {}

    def _sweep(self, texts: Sequence[OneText], beside: Sequence[Pass], one: OneText | None) -> list[Token]:
        """Compute prompts, or a part of one, and draft for the others and look at what was drafted, in one pass over
        the weights; then tokens of all texts that have one. What fails leaves the caches of ``one`` as they were; of
        several texts nobody goes on with the caches then."""
        session, clock = self._session, self._session.metrics.clock
        going = texts if one is not None and not one.prompt else [text for text in texts if not text.prompt]
        drafted = [self._draft_alone(one)] if one is not None and going else self._drafted(going)
        controls = [text.drafts.control for text in going if text.drafts.control is not None]
        began, given = clock(), list[Token]()
        within: AbstractContextManager[Undo | None] = contextlib.nullcontext()
        if one is not None:
            fed = len(one.target.pending) + 1 + len(drafted[0]) if going else sum(each.tokens for each in one.prompt)
            within = one.target.transaction(fed)
        elif session.streaming is not None:
            within = session.streaming.transaction(None, 0)
        with mx.stream(generation_stream), within as undo:
            plain = one is not None and going and not (drafted[0] or beside or one.target.pending)
            if one is not None and plain:
                # What chooses the token is computed together with its logits.
                one.now = Computed([one.target.step(mx.array(one.sampler.text[-1:], dtype=mx.int32))])
                given = self._given()
                one.target.drain()
            else:
                self._compute(texts, drafted, beside, began)
            seconds = clock() - began
            # What prompts take says nothing of what is drafted.
            if controls and len(going) == len(texts) and not beside:
                computed = 1 if plain else sum(len(text.target.fed) for text in going)
                drafting = next((each for each in controls if each.source is not None), controls[0])
                drafting.swept(computed, seconds + sum(each.spent for each in controls))
            for text in going:
                if text.now is not None:
                    text.now.seconds = seconds / len(texts)
                elif text.drafts.control is not None:
                    text.drafts.control.judged((), (), seconds)
            if not plain:
                given = self._given()
                texts[0].target.drain()  # all slots are free to read ahead into while the caller looks at tokens
            if not going and one is not None:
                one.tell(one.total)
        if one is not None:
            one.undo = None if going else undo
        return given

    def _compute(
        self, texts: Sequence[OneText], drafted: Sequence[Sequence[Guess]], beside: Sequence[Pass], began: float
    ) -> None:
        """Have each text's ``now`` be what the sweep brought it."""
        session = self._session
        new, going = [text for text in texts if text.prompt], [text for text in texts if not text.prompt]
        passes = [*beside, *(each for text in new for each in text.prompt)]
        ends = list(itertools.accumulate((len(text.prompt) for text in new), initial=len(beside)))[1:]
        windows = [
            text.target.verifying(text.sampler.text[-1], [g.token for g in guesses])
            for text, guesses in zip(going, drafted, strict=True)
        ]
        every, wanted = [*passes, *(each for of_one in windows for each in of_one)], [end - 1 for end in ends]
        wanted += range(len(passes), len(every))
        if session.streaming is None and len(self._texts) > 1:
            session.before_pass()
        context = max((text.target.context + sum(p.tokens for p in text.prompt) for text in new), default=0)

        def between(done: int, made: Sequence[mx.array]) -> None:
            mx.eval(made)
            for text in texts:
                text.target.evaluate()
            if len(texts) == len(new) == 1 and not beside:
                new[0].tell(new[0].request.known.held + sum(each.tokens for each in passes[:done]))

        rows = run_passes(session, every, wanted, between, prompts=len(passes), context=context)
        seconds = session.metrics.clock() - began
        for text in new:
            text.prompted(rows.pop(0), seconds)
        for text, of_one, guesses in zip(going, windows, drafted, strict=True):
            text.now = Computed(text.target.verified(rows[: len(of_one)]), guesses, verified=True)
            del rows[: len(of_one)]
        session.metrics.drafted += sum(map(len, drafted))

    def _draft_alone(self, text: OneText) -> list[Guess]:
        """Guesses for the only text, for which there is room; of ranks that share a model the first one guesses."""
        control, transport, size = text.drafts.control, self._session.transport, self._session.size
        if control is None:
            text.reserve(text.total + text.answered)
            return []
        control.beside = SharedPass()
        control.most = text.drafts.most if self._session.streaming is None else min(text.drafts.most, size.drafted)
        self._share_snapshots([text])
        guesses: list[Guess] = []
        if transport.chooses:
            guesses = text.drafts.guesses(text.sampler.text, text.left - 1)
            text.reserve(text.total + text.answered + len(guesses))
            # The room that drafted tokens took may have been needed.
            del guesses[control.most :]
        tokens = transport.numbers(lambda: [g.token for g in guesses])
        if not transport.chooses:
            text.reserve(text.total + text.answered + len(tokens))
            guesses = [Guess(token, ("told", 0)) for token in tokens]
        return guesses

    def _drafted(self, texts: Sequence[OneText]) -> list[list[Guess]]:
        """Guesses for one after the other, as is worth their common sweep's time; all together as many as there is room
        for."""
        room, done = self._session.size.drafted, SharedPass(len(texts) - 1, len(texts) - 1.0)
        self._share_snapshots(texts)
        found: list[list[Guess]] = []
        for n, text in enumerate(texts):
            control, source, guesses = text.drafts.control, text.drafts.source, list[Guess]()
            if control is not None and source is not None:
                share = room // (len(texts) - n)
                control.most = share if self._most is None else min(self._most, share)
                control.beside = done
                if control.most and text.left > 1:
                    guesses = text.drafts.guesses(text.sampler.text, min(control.most, text.left - 1))
                    source.begin(text.sampler.text)  # caches that it drafted in go: one text's are counted
                room -= len(guesses)
                worth = control.expected - 1 if guesses else 0.0
                done = SharedPass(done.tokens + len(guesses), done.expected + worth)
            found.append(guesses)
        return found

    def _share_snapshots(self, texts: Sequence[OneText]) -> None:
        """States to go back to may take what the plan leaves of the budget now."""
        plan = self._session.plan
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        room = max(0, plan.budget_bytes - plan.peak_bytes) if plan.streams else 0
        for text in texts:
            text.target.snapshots = room // len(texts)

    def _given(self) -> list[Token]:
        """A token of each that has one."""
        tokens = []
        with mx.stream(generation_stream):
            for text in self._texts.values():
                if (now := text.now) is not None:
                    token = text.choose()
                    self.drafts[token.uid] = len(now.guesses) if now.given == 1 else 0, int(token.drafted)
                    if text.sampler.failed is None:
                        tokens.append(token)
                    else:
                        self.failed[token.uid] = text.sampler.failed
        return tokens

    def take_out(self, uid: int) -> tuple[list[Any], int]:
        """End a sequence; its caches, and how many tokens of its prompt and answer they hold: all but the last, or
        fewer where drafted tokens had to be taken back."""
        text = self._texts.pop(uid)
        text.stop()
        in_memory(text.target.cache)
        return text.target.cache, text.target.in_cache

    def remove(self, uids: Sequence[int]) -> None:
        gone = self._texts.keys() & set(uids)
        for uid in gone:
            self._texts.pop(uid).stop()  # what became of its last sweep is learnt from
        if gone:
            clear_cache()

    def close(self) -> None:
        if self._session.streaming is not None:
            self._session.streaming.drain()
        for text in self._texts.values():
            text.stop_ahead()
        self._texts = {}
