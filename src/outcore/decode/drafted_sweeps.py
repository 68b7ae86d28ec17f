"""Sequences that share sweeps and are drafted each: in caches and passes of their own, so a text has the bits that it
has alone, and several sweeps' tokens of each come from one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..engine.session import Session
from ..engine.transport import Solo
from ..machine.allocator import clear_cache
from .batch_engine import Request, Token, to_token
from .model_runner import ModelRunner
from .one_text import OneText, drafting_of
from .passes import Pass, run_passes
from .speculative.draft_length import SharedPass
from .speculative.proposers import Guess
from .speculative.speculate import Sampler, Speculation, Waits, cut_behind


@dataclass
class _DraftedSequence:
    """A sequence.

    Attributes:
        how: it is drafted; None: its first logits have not come.
        prompt: passes of it that are to be computed.
        last: its newest token, which is in no cache yet.
        guesses, logits: of the last sweep; ``kept``: guesses that were right, ``given``: tokens given out, so far.
    """

    one: OneText
    last: int
    how: Speculation | None = None
    prompt: list[Pass] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    kept: int = 0
    given: int = 0
    seconds: float = 0.0

    @property
    def request(self) -> Request:
        return self.one.request

    @property
    def target(self) -> ModelRunner:
        return self.one.target

    @property
    def chooser(self) -> Sampler:
        return self.one.sampler

    @property
    def ready(self) -> bool:
        """Whether a token can be chosen without another sweep."""
        return bool(self.logits)

    @property
    def left(self) -> int:
        """Tokens that may follow."""
        return self.request.max_tokens - (len(self.chooser.text) - len(self.request.earlier) - len(self.request.tokens))


class SpeculativeDecoder:
    """Sequences that run side by side, each in caches of its own.

    Args:
        ends: tokens that end a text: nothing is drafted behind them.
        prefill_step: tokens of a prompt computed at a time.
        most: tokens drafted of a text for a sweep at most; None: as many as are worth it.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        *,
        ends: Collection[int],
        prefill_step: int,
        most: int | None = None,
    ) -> None:
        self._model, self._session, self._ends, self._most = model, session, ends, most
        self.prefill_step = prefill_step
        self._texts: dict[int, _DraftedSequence] = {}
        self._ended = session.metrics.clock()  # the last sweep
        self._drafts: dict[int, tuple[int, int]] = {}

    @property
    def ready(self) -> bool:
        """Whether some of them have tokens without another sweep."""
        return any(text.ready for text in self._texts.values())

    def step(self, joining: Sequence[Request], beside: Sequence[Pass] = ()) -> list[Token]:
        """One more token of each that has one without another sweep; where none has, or some join, of all from one.
        Who joins while others are ``ready`` has a sweep without them.

        Args:
            beside: passes over a part of a prompt whose sequence does not join yet; none is ``ready`` then.
        """
        self._drafts = {}
        for request in joining:
            self._texts[request.uid] = self._joined(request)
        waiting = [text for text in self._texts.values() if not text.ready]
        if waiting and (joining or len(waiting) == len(self._texts)):
            self._sweep(waiting, beside)
        with mx.stream(generation_stream):
            return [self._choose(text) for text in self._texts.values() if text.ready]

    def drafts(self) -> dict[int, tuple[int, int]]:
        """Of the last step, tokens that were drafted for each text, and those that were right."""
        return self._drafts

    def _joined(self, request: Request) -> _DraftedSequence:
        known = request.known
        drafting, most = drafting_of(self._session, asked=self._most)
        one = OneText(self._model, self._session, request, drafting=drafting, most=most, ends=self._ends)
        text, target = _DraftedSequence(one, request.tokens[-1]), one.target
        if request.begun:
            target.goes_on(request.tokens[:-1])
            return text
        if known.logits is not None:
            text.logits = [known.logits]
            return text
        ids = mx.array(list(request.tokens[known.held :]), dtype=mx.int32)
        passed = functools.partial(known.passed, target.cache)
        text.prompt = target.prompting(ids, self.prefill_step, passed=passed)
        return text

    def _sweep(self, texts: Sequence[_DraftedSequence], beside: Sequence[Pass]) -> None:
        """Compute prompts, or a part of one, and draft for the others and look at what was drafted, in one sweep."""
        metrics, streaming = self._session.metrics, self._session.streaming
        beginning, going = [t for t in texts if t.prompt], [t for t in texts if not t.prompt]
        self._draft(going)
        self._share_snapshots(going)
        waits, began = Waits(metrics, Solo()), metrics.clock()
        idle_s = began - self._ended
        with mx.stream(generation_stream):
            passes = [*beside, *(each for text in beginning for each in text.prompt)]
            ends = list(itertools.accumulate((len(text.prompt) for text in beginning), initial=len(beside)))[1:]
            windows = [text.target.verifying(text.last, [g.token for g in text.guesses]) for text in going]
            every, wanted = [*passes, *(each for of_one in windows for each in of_one)], [end - 1 for end in ends]
            wanted += range(len(passes), len(every))
            if streaming is None:
                self._session.before_pass()
            context = max((text.target.context + sum(p.tokens for p in text.prompt) for text in beginning), default=0)

            def between(_: int, made: Sequence[mx.array]) -> None:
                mx.eval(made)
                for text in texts:
                    text.target.evaluate()

            # If it fails, nobody goes on with these caches.
            with contextlib.nullcontext() if streaming is None else streaming.transaction(None, 0):
                how = {"prompts": len(passes), "context": context}
                rows = run_passes(self._session, every, wanted, between, **how)
            self._ended = metrics.clock()
            seconds, stall_s = self._ended - began, waits.for_disks()
            for text in beginning:
                logits = text.target.prompted(rows.pop(0), sum(each.tokens for each in text.prompt), seconds)
                text.request.known.save(text.target.cache, logits)
                text.logits, text.prompt = [logits], []
            for text, of_one in zip(going, windows, strict=True):
                text.logits, text.seconds = text.target.verified(rows[: len(of_one)]), seconds / len(texts)
                del rows[: len(of_one)]
        metrics.drafted += sum(len(text.guesses) for text in going)
        controls = [text.one.control for text in going if text.one.control is not None]
        if controls and not passes:  # what prompts take says nothing of what is drafted
            controls[0].swept(sum(text.target.computed for text in going), seconds, stall_s, idle_s)

    def _draft(self, texts: Sequence[_DraftedSequence]) -> None:
        """Guess for one after the other, as is worth their common sweep's time; all together as many as there is room
        for."""
        metrics = self._session.metrics
        room, done = self._session.size.drafted, SharedPass(len(texts) - 1, len(texts) - 1.0)
        for n, text in enumerate(texts):
            text.guesses = []
            control, how = text.one.control, text.how
            if control is None or how is None:
                continue
            control.most = room // (len(texts) - n) if self._most is None else min(self._most, room // (len(texts) - n))
            text.one.look()
            control.beside, began = done, metrics.clock()
            most = min(control.most, text.left - 1)
            if most > 0:
                text.guesses = cut_behind(control.draft(how.source, text.chooser.text, most), how.ends)
                how.source.begin(text.chooser.text)  # caches that it drafted in go: one text's at a time are counted
            room -= len(text.guesses)
            drafted = len(text.guesses)
            worth = control.expected - 1 if drafted else 0.0
            done = SharedPass(done.tokens + drafted, done.expected + worth, done.seconds + metrics.clock() - began)

    def _share_snapshots(self, texts: Sequence[_DraftedSequence]) -> None:
        """States to go back to may take what the plan leaves of the budget now."""
        plan = self._session.plan
        room = max(0, plan.budget_bytes - plan.peak_bytes) if plan.streams else 0
        for text in texts:
            text.target.snapshots = room // len(texts)

    def _choose(self, text: _DraftedSequence) -> Token:
        """The next token by the last sweep's logits."""
        first = text.how is None
        guess = text.guesses[text.kept] if text.kept < len(text.guesses) else None
        text.last, logprobs, right = text.chooser.choose(text.logits[text.kept], guess)
        text.kept += right
        text.given += 1
        self._count(text, right)
        if first:
            # What follows is drafted: of these logits it is known what they are like.
            text.how = text.one.speculation(logprobs)
        if not right:
            self._settle(text)
        return to_token(text.request, text.last, logprobs)

    def _count(self, text: _DraftedSequence, right: bool) -> None:
        metrics, uid = self._session.metrics, text.request.uid
        metrics.accepted += right
        drafted, accepted = self._drafts.get(uid, (0, 0))
        new = len(text.guesses) if text.given == 1 else 0
        self._drafts[uid] = drafted + new, accepted + right

    def _settle(self, text: _DraftedSequence) -> None:
        """Nothing more is taken of the last sweep: caches go back to what was given out, but for the last token."""
        if not text.ready:
            return
        if text.target.computed:
            text.target.keep(text.given - 1)
            if text.one.control is not None:
                text.one.control.judged(text.guesses, text.chooser.text[-text.given :], text.seconds)
        text.logits, text.guesses, text.kept, text.given = [], [], 0, 0

    def take_out(self, uid: int) -> tuple[list[Any], int]:
        """End a sequence; its caches, and how many tokens of its prompt and answer they hold: all but the last, or
        fewer where drafted tokens had to be taken back."""
        text = self._texts.pop(uid)
        with mx.stream(generation_stream):
            self._settle(text)
        return text.target.cache, text.target.in_cache

    def remove(self, uids: Sequence[int]) -> None:
        gone = self._texts.keys() & set(uids)
        for uid in gone:
            text = self._texts.pop(uid)
            # What became of its last sweep is learnt from.
            with mx.stream(generation_stream):
                self._settle(text)
        if gone:
            clear_cache()

    def close(self) -> None:
        if self._session.streaming is not None:
            self._session.streaming.drain()
        self._texts = {}
