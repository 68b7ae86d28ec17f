"""Sequences that share sweeps and are drafted each: in caches and passes of their own, so a text has the bits that it
has alone, and several sweeps' tokens of each come from one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import greedy_sampler

from ..model.call_values import handles
from ..runtime.session import Session
from ..system.allocator import clear_cache
from ..system.device import on_cpu
from ..system.interrupts import check
from .agreement import Agreement
from .batch_engine import Request, Token, own_cache, told
from .model_runner import Target
from .one_text import OneText, drafting_of
from .speculative.draft_length import Beside
from .speculative.proposers import Guess
from .speculative.speculate import Chooser, Speculation, Waits, cut_behind

FOLLOWS = 64
"""Tokens that are new of a text at most that was under way before: more of them are computed as a prompt."""


@dataclass
class _Text:
    """A sequence.

    Attributes:
        how: it is drafted; None: its first logits have not come.
        last: its newest token, which is in no cache yet.
        guesses, logits: of the last sweep; ``kept``: guesses that were right, ``given``: tokens given out, so far.
    """

    request: Request
    target: Target
    chooser: Chooser
    one: OneText
    last: int
    how: Speculation | None = None
    guesses: list[Guess] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    kept: int = 0
    given: int = 0
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether a token can be chosen without another sweep."""
        return bool(self.logits)

    @property
    def left(self) -> int:
        """Tokens that may follow."""
        return self.request.max_tokens - (len(self.chooser.text) - len(self.request.earlier) - len(self.request.tokens))


class DraftedSweeps:
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
        self._texts: dict[int, _Text] = {}
        self._ended = session.metrics.worked()  # the last sweep
        self._drafts: dict[int, tuple[int, int]] = {}

    def step(self, joining: Sequence[Request]) -> list[Token]:
        """One more token of each that has one without another sweep; where none has, of all from one."""
        self._drafts = {}
        tokens = [token for request in joining if (token := self._join(request)) is not None]
        if joining:
            clear_cache()
        if not tokens and not any(text.ready for text in self._texts.values()):
            self._sweep()
        joined = {token.uid for token in tokens}
        return [*tokens, *(self._next(text) for uid, text in self._texts.items() if text.ready and uid not in joined)]

    def drafts(self) -> dict[int, tuple[int, int]]:
        """Of the last step, tokens that were drafted for each text, and those that were right."""
        return self._drafts

    def _join(self, request: Request) -> Token | None:
        """A text begins, with its first token if its prompt was computed; None: the next sweep brings it."""
        goes_on = request.cache is not None and not request.known.held and len(request.tokens) <= FOLLOWS
        drafting, most = drafting_of(self._session, {"num_draft_tokens": self._most})
        target = Target(
            self._model,
            functools.partial(getattr, self._session, "streaming"),
            own_cache(self._model, request),
            in_blocks=not on_cpu(),
        )
        chooser = Chooser(
            request.sampler or greedy_sampler,
            request.processors,
            [*request.earlier, *request.tokens],
            agreement=Agreement(None),
        )
        one = OneText(self._session, len(request.earlier), drafting, most, (), request.sampler, self._ends)
        text = _Text(request, target, chooser, one, request.tokens[-1])
        if goes_on:
            target.goes_on(request.tokens[:-1])
            self._texts[request.uid] = text
            return None
        known = request.known
        target.in_cache = known.held
        logits = known.logits
        with mx.stream(generation_stream):
            if logits is None:
                passed = functools.partial(known.passed, target.cache)
                prompt = mx.array(list(request.tokens[known.held :]), dtype=mx.int32)
                logits = target.prompt(prompt, self.prefill_step, passed=passed)
                known.save(target.cache, logits)
            self._texts[request.uid] = text
            text.logits = [logits]
            token = self._choose(text)
            target.drain()
        self._ended = self._session.metrics.worked()
        return token

    def _sweep(self) -> None:
        """Draft for all of them, and look at what was drafted in one sweep."""
        metrics, streaming = self._session.metrics, self._session.streaming
        texts = list(self._texts.values())
        self._draft(texts)
        waits, began = Waits(metrics, Agreement(None)), metrics.worked()
        idle_s = began - self._ended
        with mx.stream(generation_stream):
            passes = [text.target.verifying(text.last, [g.token for g in text.guesses]) for text in texts]
            every = [run for of_one in passes for run in of_one]
            if streaming is None or len(every) == 1:
                rows = self._in_turn(every, texts)
            else:
                # If it fails, nobody goes on with these caches.
                with streaming.transaction(None, 0):
                    rows = streaming.sweep(every, tokens=_computed(texts))
            for text, of_one in zip(texts, passes, strict=True):
                text.logits = text.target.verified(rows[: len(of_one)])
                del rows[: len(of_one)]
                text.kept = text.given = 0
        self._ended = metrics.worked()
        seconds, stall_s = self._ended - began, waits.for_disks()
        metrics.drafted += sum(len(text.guesses) for text in texts)
        drafted = [text for text in texts if text.one.control is not None]
        for text in texts:
            text.seconds = seconds / len(texts)
        if drafted and drafted[0].one.control is not None:
            drafted[0].one.control.swept(_computed(texts), seconds, stall_s, idle_s)

    def _in_turn(self, passes: Sequence[Callable[[], mx.array]], texts: Sequence[_Text]) -> list[mx.array]:
        """What passes put out of a model that is all in memory, or of one pass."""
        self._session.before_pass()
        rows = []
        for run in passes:
            rows.append(run())
            # What is queued all at once needs memory all at once.
            mx.eval(rows[-1], [handles(*text.target.cache) for text in texts])
            check()
        return rows

    def _draft(self, texts: Sequence[_Text]) -> None:
        """Guess for one after the other, as is worth their common sweep's time; all together as many as there is room
        for."""
        streaming, metrics = self._session.streaming, self._session.metrics
        room, done = self._session.size.drafted, Beside(len(texts) - 1, len(texts) - 1.0)
        for n, text in enumerate(texts):
            text.guesses = []
            control, how = text.one.control, text.how
            if control is None or how is None:
                continue
            control.most = room // (len(texts) - n) if self._most is None else min(self._most, room // (len(texts) - n))
            control.ahead = 0.0 if streaming is None else streaming.ring.ahead
            control.beside, began = done, metrics.worked()
            most = min(control.most, text.left - 1)
            if most > 0:
                text.guesses = cut_behind(control.draft(how.source, text.chooser.text, most), how.ends)
                how.source.begin(text.chooser.text)  # caches that it drafted in go: one text's at a time are counted
            room -= len(text.guesses)
            drafted = len(text.guesses)
            worth = control.expected - 1 if drafted else 0.0
            done = Beside(done.tokens + drafted, done.expected + worth, done.seconds + metrics.worked() - began)

    def _next(self, text: _Text) -> Token:
        with mx.stream(generation_stream):
            return self._choose(text)

    def _choose(self, text: _Text) -> Token:
        """The next token by the last sweep's logits."""
        first = text.how is None
        guess = text.guesses[text.kept] if text.kept < len(text.guesses) else None
        text.last, logprobs, right = text.chooser.choose(text.logits[text.kept], guess)
        text.kept += right
        text.given += 1
        self._count(text, right)
        if first:
            # What follows is drafted: of these logits it is known what they are like.
            text.how = text.one.speculation(text.target, logprobs) if text.target.verifies else None
            text.target.snapshots = text.how.snapshots // max(1, len(self._texts)) if text.how is not None else 0
        if not right:
            self._settle(text)
        return told(text.request, text.last, logprobs)

    def _count(self, text: _Text, right: bool) -> None:
        metrics, uid = self._session.metrics, text.request.uid
        metrics.accepted += right
        drafted, accepted = self._drafts.get(uid, (0, 0))
        new = len(text.guesses) if text.given == 1 else 0
        self._drafts[uid] = drafted + new, accepted + right

    def _settle(self, text: _Text) -> None:
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


def _computed(texts: Sequence[_Text]) -> int:
    """Tokens that a sweep computes."""
    return sum(text.target.computed for text in texts)
