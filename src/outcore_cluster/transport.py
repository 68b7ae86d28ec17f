"""A rank's ``Transport``: layer inputs and outputs (``stage``), agreement (``agreement``), and the room for texts.

The prediction (``forecast``) limits the chunk length of prompts, so that ranks compute successive chunks in parallel.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from outcore.decode.scheduler import Scheduler
from outcore.engine.executor import Recorded, RecordedPass, Wanted, in_turn
from outcore.engine.session import Session
from outcore.engine.transport import Fit, HasRoom, Transport
from outcore.errors import BudgetError, OutcoreError, PromptError, UsageError
from outcore.machine.interrupts import check

from .foreign import hold_alike
from .leading import RankLeader
from .link_protocol import Link, RankAgreement
from .stage import PipelineStage

if TYPE_CHECKING:
    from .forecast import RanksPlan
    from .rank_share import RankShare

# Tokens of an answer without a limit.
ENDLESS = 2**62


class RankRoom(RankAgreement):
    """Agrees with the other ranks on the room for texts. ``state``: the running model (a weak reference: no cycle)."""

    def __init__(self, link: Link, state: Session, forecast: RanksPlan | None = None) -> None:
        super().__init__(link)
        self.forecast = forecast
        self._state = weakref.ref(state)
        # What all ranks had room for when last asked: number of sequences, and tokens of the longest; the chunk length.
        self._agreed: tuple[int, int] | None = None
        self._agreed_step: int | None = None

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        refusal: list[OutcoreError] = [BudgetError("another machine has too little memory: shorten this text")]
        tokens = step = 0
        try:
            tokens, step = has_room()
        except (PromptError, BudgetError) as e:
            refusal = [e]
        mark = int.from_bytes(hashlib.sha256(array("q", text()).tobytes()).digest()[:7])
        mine = [mark, -mark, ENDLESS if tokens < 0 else tokens, step]
        first, last, tokens, room = self.leasts(mine)
        if first != -last:
            raise UsageError(
                "another machine was given another prompt: give all machines the same prompts in the same order"
            )
        if not room:
            raise refusal.pop()
        step = room if self.forecast is None or asked else min(room, self.forecast.step)
        return -1 if tokens == ENDLESS else tokens, step

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        longest = max(lengths) + 1
        if not joining and self._agreed is not None and self._agreed[0] == len(lengths) and longest <= self._agreed[1]:
            return self._agreed_step
        refusal, context = [BudgetError("another machine has too little memory: shorten this text")], 0
        try:
            context = here(lengths, joining, begun)
        except BudgetError as e:
            refusal = [e]
        state = self._state()
        assert state is not None
        context, step = self.leasts([context, state.plan.prefill_step])
        if len(lengths) == 1 and self.forecast is not None:
            step = min(step, self.forecast.step)  # so that ranks compute its chunks in parallel
        if not context:
            # Other ranks may have made room for this text, so the next call must ask them again.
            self._agreed = None
            raise refusal.pop()
        self._agreed, self._agreed_step = (len(lengths), context), step
        return step

    def rest(self) -> None:
        self._agreed = None


class RankTransport(RankRoom, PipelineStage, Transport):
    """The other ranks of a model (``engine.transport.Transport``)."""

    def __init__(self, share: RankShare, state: Session) -> None:
        RankRoom.__init__(self, share.link, state, share.forecast)
        PipelineStage.__init__(self, share, state.metrics)

    def leader(self, sequences: Scheduler) -> RankLeader:
        return RankLeader(sequences, self)

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        for of_layer in zip(*caches, strict=True):
            hold_alike(*of_layer)

    def passes_together(self) -> RankTransport | None:
        return None if self.eager else self

    def run_passes(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]:
        """Runs several passes over layers in memory, layer by layer as on ranks that stream, so that all ranks send and
        receive in the same order and compute at the same time."""
        recorded, outputs = list[RecordedPass](), list[mx.array]()
        before, self.recorder = self.recorder, self
        try:
            with self.passes() as next_pass:
                for number, run in enumerate(passes):
                    self.recording = RecordedPass()
                    next_pass()
                    result = run()
                    outputs += [result] if wanted is None or number in wanted else []
                    del result
                    recorded.append(self.recording)
                    check()
            self.recording = None
            for turn in in_turn(recorded, (), self.reached, wanted):
                self._compute(turn)
            for each in recorded:
                each.settle()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.recording, self.recorder = None, before
        return outputs

    def _compute(self, passes: Sequence[Recorded]) -> None:
        for recorded in passes:
            for each in recorded.arriving:
                each.wait()
            self.reached(recorded.moved)
            recorded.moved = []
            with self.link.working():
                mx.eval(recorded.arrays)
            self.depart(recorded.leaving)
            recorded.arrays, recorded.leaving = [], []
            check()
