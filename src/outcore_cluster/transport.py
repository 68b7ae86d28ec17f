"""A rank's ``Transport``: the layers' inputs and outputs (``stage``), what all ranks agree on (``agreement``), and the
room that all of them have for texts.

Ranks compute chunks of one prompt one behind the other, of a length by which the first token was predicted soonest when
the model was loaded (``forecast``).
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from outcore.decode.scheduler import Scheduler
from outcore.engine.recorded_pass import Recorded, RecordedPass, Wanted, in_turn
from outcore.engine.session import Session
from outcore.engine.transport import Fit, HasRoom, Transport
from outcore.errors import BudgetError, PromptError, UsageError
from outcore.machine.interrupts import check

from .agreement import RankAgreement
from .foreign import hold_alike
from .leading import RankLeader
from .link_protocol import Link
from .stage import PipelineStage

if TYPE_CHECKING:
    from .forecast import RanksPlan
    from .rank_share import RankShare

ENDLESS = 2**62
"""Tokens of an answer that has no limit."""


class RankRoom(RankAgreement):
    """What ranks agree on before texts are computed.

    Args:
        state: of the running model; held weakly, as it holds this.

    Attributes:
        forecast: what all ranks together are predicted to take.
    """

    def __init__(self, link: Link, state: Session, forecast: RanksPlan | None = None) -> None:
        super().__init__(link)
        self.forecast = forecast
        self._state = weakref.ref(state)
        # Sequences, and tokens of the longest, that all ranks said they have room for; and the least of their chunks.
        self._agreed: tuple[int, int] | None = None
        self._agreed_step: int | None = None

    @property
    def _running(self) -> Session:
        state = self._state()
        assert state is not None
        return state

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        """The least that ranks have room for; see ``Transport``."""
        refusal: PromptError | BudgetError = BudgetError("another machine has no room for it")
        tokens = step = 0
        try:
            tokens, step = has_room()
        except (PromptError, BudgetError) as e:
            refusal = e
        mark = int.from_bytes(hashlib.sha256(array("q", text()).tobytes()).digest()[:7])
        mine = [mark, -mark, ENDLESS if tokens < 0 else tokens, step]
        first, last, tokens, room = self.leasts(mine)
        if first != -last:
            raise UsageError(
                "another machine was given another prompt: each has to be asked the same, in the same order"
            )
        if not room:
            raise refusal
        step = room if self.forecast is None or asked else min(room, self.forecast.step)
        return -1 if tokens == ENDLESS else tokens, step

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        """Room for sequences on all ranks; see ``Transport``."""
        longest = max(lengths) + 1
        if not joining and self._agreed is not None and self._agreed[0] == len(lengths) and longest <= self._agreed[1]:
            return self._agreed_step
        refusal, context = BudgetError("another machine has no room for it"), 0
        try:
            context = here(lengths, joining, begun)
        except BudgetError as e:
            refusal = e
        context, step = self.leasts([context, self._running.plan.prefill_step])
        if len(lengths) == 1 and self.forecast is not None:
            step = min(step, self.forecast.step)  # so that its chunks follow each other over ranks
        if not context:
            # Who had room took it: it is seen to anew.
            self._agreed = None
            raise refusal
        self._agreed, self._agreed_step = (len(lengths), context), step
        return step

    def rest(self) -> None:
        """Room is agreed on anew."""
        self._agreed = None


class RankTransport(RankRoom, PipelineStage, Transport):
    """The other ranks of a model, as this one sees them (``engine.transport.Transport``).

    Args:
        share: what this rank holds of the model.
    """

    def __init__(self, share: RankShare, state: Session) -> None:
        RankRoom.__init__(self, share.link, state, share.forecast)
        PipelineStage.__init__(self, share, state.metrics)

    def leader(self, sequences: Scheduler) -> RankLeader:
        """What other ranks' sequences follow."""
        return RankLeader(sequences, self)

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Caches of other ranks' layers hold nothing, or all of them are filled."""
        for of_layer in zip(*caches, strict=True):
            hold_alike(*of_layer)

    def sweeps(self) -> RankTransport | None:
        """What computes several passes layer by layer, where nothing is streamed here."""
        return None if self.eager else self

    def sweep(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]:
        """As ``Streaming.sweep``, of layers in memory: layer after layer, as ranks do that stream theirs,
        so that what is sent and received comes in the same order, and every rank computes meanwhile."""
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
        """Compute what passes recorded of layers whose outputs go to other ranks."""
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
