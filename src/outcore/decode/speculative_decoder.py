"""Decodes texts in separate caches and passes, so that each has the same bits as alone, and verifies drafted tokens.

One undrafted text of a model that is all in memory is decoded one token ahead (``OneText.look_ahead``).
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
from ..modules.cache_rollback import in_memory
from .one_text import Computed, OneText
from .passes import Pass, run_passes
from .request import Request, Token
from .speculative.draft_length import DraftLengthPolicy, SharedPass
from .speculative.proposers import Guess


class SpeculativeDecoder:
    """Sequences that are decoded together, each in caches of its own; arguments as in ``Scheduler``.

    Attributes:
        drafts: per sequence, how many tokens were drafted for the last step, and how many accepted in it.
        failed: sequences whose own sampler or processors raised in the last step, with the error; they got no token.
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
        """Whether some sequence's next token can be chosen without another pass."""
        return any(text.now is not None for text in self._texts.values())

    def step(self, joining: Sequence[Request], chunk: int, extra: Sequence[Pass] = ()) -> list[Token]:
        """Returns the next token of each sequence that needs no pass for it. If none is such, runs a pass for all
        first; if some are, and others join, a pass for those that need one. ``chunk``: prompt tokens per chunk;
        ``extra``: passes over part of a prompt whose sequence does not join yet."""
        self.drafts, self.failed = {}, {}
        for request in joining:
            text = OneText(self._model, self._session, request, ends=self._ends, most=self._most)
            text.begin(chunk)
            self._texts[request.uid] = text
        texts = list(self._texts.values())
        one = texts[0] if len(texts) == 1 else None
        if one is not None:
            one.undo = None
            looks = self._session.streaming is None or one.ahead is not None or one.failed
            if looks and not extra and not one.prompt and (found := one.look_ahead()) is not None:
                return [found]
        elif joining:
            for text in texts:
                text.stop_ahead()
        waiting = texts if one is not None and one.now is None else [text for text in texts if text.now is None]
        if waiting and (joining or len(waiting) == len(texts)):
            try:
                return self._run_pass(waiting, extra, one)
            except BaseException:
                for text in waiting:
                    text.now = None
                raise
        tokens = self._choose()
        if joining and one is not None:
            one.report(one.total)
        return tokens

    def end(self, error: BaseException | None = None) -> None:
        for text in self._texts.values():
            text.end(error)
        self._texts = {}

    def _run_pass(self, texts: Sequence[OneText], extra: Sequence[Pass], one: OneText | None) -> list[Token]:
        """Computes prompts, drafts for the other texts and verifies their drafts, with one reading of the weights.
        Returns a token of each text that has one. ``one``: the only text, whose caches are restored after a failure
        (the caller drops those of several)."""
        session, clock = self._session, self._session.metrics.clock
        going = texts if one is not None and not one.prompt else [text for text in texts if not text.prompt]
        drafted: list[list[Guess]] = [[]]
        if one is None or not going:
            drafted = self._drafted(going)
        elif one.drafts.control is None:
            one.reserve()
        else:
            drafted = [self._draft_alone(one, one.drafts.control)]
        undrafted = one is not None and one.drafts.control is None
        controls = [] if undrafted else [text.drafts.control for text in going if text.drafts.control is not None]
        began, tokens, experts = clock(), list[Token](), session.metrics.experts
        brought = experts.brought if controls else 0
        within: AbstractContextManager[Undo | None] = contextlib.nullcontext()
        if one is not None:
            fed = len(one.runner.pending) + 1 + len(drafted[0]) if going else sum(each.tokens for each in one.prompt)
            within = one.runner.transaction(fed)
        elif session.streaming is not None:
            within = session.streaming.transaction(None, 0)
        with mx.stream(generation_stream), within as undo:
            plain = one is not None and going and not (drafted[0] or extra or one.runner.pending)
            if one is not None and plain:
                # The sampler's graph is evaluated together with the logits.
                one.now = Computed([one.runner.step(mx.array(one.sampler.text[-1:], dtype=mx.int32))])
                tokens = self._choose()
            else:
                self._compute(texts, drafted, extra, began)
            seconds = clock() - began
            # Do not count a pass with prompts in it as the cost of drafts.
            if controls and len(going) == len(texts) and not extra:
                computed = 1 if plain else sum(len(text.runner.fed) for text in going)
                drafting = next((each for each in controls if each.source is not None), controls[0])
                seconds_of_all = seconds + sum(each.spent for each in controls)
                drafting.swept(computed, seconds_of_all, experts.brought - brought)
            for text in going:
                if text.now is not None:
                    text.now.seconds = seconds / len(texts)
                elif text.drafts.control is not None:
                    text.drafts.control.judged((), (), seconds)
            if not plain:
                tokens = self._choose()
            if session.streaming is not None:
                session.streaming.drain()  # frees all slots, so that reading goes on while the caller handles tokens
            if not going and one is not None:
                one.report(one.total)
        if one is not None:
            one.undo = None if going else undo
        return tokens

    def _compute(
        self, texts: Sequence[OneText], drafted: Sequence[Sequence[Guess]], extra: Sequence[Pass], began: float
    ) -> None:
        """Runs the passes over prompts and drafts, and sets each text's ``now`` to the result."""
        session = self._session
        new, going = [text for text in texts if text.prompt], [text for text in texts if not text.prompt]
        passes = [*extra, *(each for text in new for each in text.prompt)]
        ends = list(itertools.accumulate((len(text.prompt) for text in new), initial=len(extra)))[1:]
        windows = [
            text.runner.verifying(text.sampler.text[-1], [g.token for g in guesses])
            for text, guesses in zip(going, drafted, strict=True)
        ]
        every, wanted = [*passes, *itertools.chain.from_iterable(windows)], [end - 1 for end in ends]
        wanted += range(len(passes), len(every))
        if session.streaming is None and len(self._texts) > 1:
            session.before_pass()
        context = max((text.runner.context + sum(p.tokens for p in text.prompt) for text in new), default=0)

        def between(done: int, made: Sequence[mx.array]) -> None:
            mx.eval(made)
            for text in texts:
                text.runner.evaluate()
            if len(texts) == len(new) == 1 and not extra:
                new[0].report(new[0].request.cached.tokens + sum(each.tokens for each in passes[:done]))

        rows = run_passes(session, every, wanted, between, prompts=len(passes), context=context)
        for text in new:
            text.prompted(rows.pop(0), began)
        for text, window, guesses in zip(going, windows, drafted, strict=True):
            text.now = Computed(text.runner.verified(rows[: len(window)]), guesses, verified=True)
            del rows[: len(window)]
        session.metrics.drafted += sum(map(len, drafted))

    def _draft_alone(self, text: OneText, control: DraftLengthPolicy) -> list[Guess]:
        """Returns guesses for the only text, after making room. If ranks share the model, the first guesses."""
        transport, size = self._session.transport, self._session.size
        control.shared = SharedPass()
        control.most = text.drafts.most if self._session.streaming is None else min(text.drafts.most, size.drafted)
        self._share_snapshots([text])
        guesses: list[Guess] = []
        if transport.chooses:
            guesses = text.drafts.guesses(text.sampler.text, text.left - 1)
            text.reserve(len(guesses))
            # Making room may have lowered how many drafted tokens there is memory for.
            del guesses[control.most :]
        tokens = transport.numbers(lambda: [g.token for g in guesses])
        if not transport.chooses:
            text.reserve(len(tokens))
            guesses = [Guess(token, ("first rank", 0)) for token in tokens]
        return guesses

    def _drafted(self, texts: Sequence[OneText]) -> list[list[Guess]]:
        """Returns guesses for each of the texts: as many as pay in the shared pass and together fit into memory."""
        room, done = self._session.size.drafted, SharedPass(len(texts) - 1, len(texts) - 1.0)
        self._share_snapshots(texts)
        found: list[list[Guess]] = []
        for n, text in enumerate(texts):
            control, source, guesses = text.drafts.control, text.drafts.source, list[Guess]()
            if control is not None and source is not None:
                share = room // (len(texts) - n)
                control.most = share if self._most is None else min(self._most, share)
                control.shared = done
                if control.most and text.left > 1:
                    guesses = text.drafts.guesses(text.sampler.text, min(control.most, text.left - 1))
                    source.begin(text.sampler.text)  # drops its draft's caches: the plan counts those of one text
                room -= len(guesses)
                worth = control.expected - 1 if guesses else 0.0
                done = SharedPass(done.tokens + len(guesses), done.expected + worth)
            found.append(guesses)
        return found

    def _share_snapshots(self, texts: Sequence[OneText]) -> None:
        """Lets the texts' cache snapshots use the bytes that the plan leaves of the budget."""
        plan = self._session.plan
        # If nothing is streamed, the allocator may use these bytes.
        room = max(0, plan.budget_bytes - plan.peak_bytes) if plan.streams else 0
        for text in texts:
            text.runner.snapshots = room // len(texts)

    def _choose(self) -> list[Token]:
        """Returns the next token of each text that has logits for it."""
        tokens = []
        with mx.stream(generation_stream):
            for text in self._texts.values():
                if (now := text.now) is not None:
                    token = text.choose()
                    self.drafts[token.uid] = len(now.guesses) if now.given == 1 else 0, int(token.drafted)
                    if text.sampler.failed:
                        self.failed[token.uid] = text.sampler.failed.pop()
                    else:
                        tokens.append(token)
        return tokens

    def take_out(self, uid: int) -> tuple[list[Any], int]:
        """Ends a sequence. Returns its caches and how many tokens of prompt and answer they hold: all but the last, or
        fewer if drafted tokens were removed."""
        text = self._texts.pop(uid)
        text.stop()
        in_memory(text.runner.cache)
        return text.runner.cache, text.runner.in_cache

    def remove(self, uids: Sequence[int]) -> None:
        gone = self._texts.keys() & set(uids)
        for uid in gone:
            self._texts.pop(uid).stop()  # its last draft still counts for the acceptance statistics
        if gone:
            clear_cache()

    def close(self) -> None:
        if self._session.streaming is not None:
            self._session.streaming.drain()
        for text in self._texts.values():
            text.stop_ahead()
        self._texts = {}
