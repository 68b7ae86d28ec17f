"""Room for texts on all ranks of a model, and the chunks that its prompts are computed in.

Ranks compute chunks of one prompt one behind the other, of a length by which the first token is predicted soonest
(``forecast``). That rests on what each rank holds in memory, so before each text ranks agree whether one of them holds
something else than when it was predicted last.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outcore.engine.engine import Engine
from outcore.engine.transport import Fit, HasRoom
from outcore.errors import BudgetError, PromptError, UsageError
from outcore.plan.plan import Plan

from .agreement import Agreement
from .link.link import Link
from .ranks_plan import RanksPlan

if TYPE_CHECKING:
    from .forecast import RankForecast

NOTE = "other memory: "
"""How the note begins that tells of another forecast; the last one is kept."""

ENDLESS = 2**62
"""Tokens of an answer that has no limit."""


class RankRoom(Agreement):
    """What ranks agree on before texts are computed.

    Args:
        state: of the running model; held weakly, as it holds this.
        planned: the plan of this rank that ``forecast`` rests on.

    Attributes:
        forecast: what all ranks together are predicted to take. ``forecaster``: predicts it anew.
    """

    def __init__(
        self,
        link: Link,
        state: Engine,
        planned: Plan | None = None,
        forecast: RanksPlan | None = None,
        forecaster: RankForecast | None = None,
    ) -> None:
        super().__init__(link)
        self.forecast, self.forecaster, self._planned = forecast, forecaster, planned
        self._state = weakref.ref(state)
        # Sequences, and tokens of the longest, that all ranks said they have room for; and the least of their chunks.
        self._agreed: tuple[int, int] | None = None
        self._agreed_step: int | None = None

    @property
    def _running(self) -> Engine:
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
        mine = [mark, -mark, ENDLESS if tokens < 0 else tokens, step, self._holds_as_planned()]
        first, last, tokens, room, same = self.leasts(mine)
        if first != -last:
            raise UsageError(
                "another machine was given another prompt: each has to be asked the same, in the same order"
            )
        if not room:
            raise refusal
        return -1 if tokens == ENDLESS else tokens, self._chunk(room, bool(same), asked=asked)

    def chunk(self, most: int, *, asked: bool) -> int:
        """Tokens of a prompt to compute at a time."""
        least, same = self.leasts([most, self._holds_as_planned()])
        return self._chunk(least, bool(same), asked=asked)

    def _chunk(self, least: int, same: bool, *, asked: bool) -> int:
        if not same:
            self._predict_anew()
        return least if self.forecast is None or asked else min(least, self.forecast.step)

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
        context, step, same = self.leasts([context, self._running.plan.prefill_step, self._holds_as_planned()])
        if not same:
            self._predict_anew()
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

    def _holds_as_planned(self) -> bool:
        """Whether this rank has in memory what it had when it was last predicted what all take."""
        return self._planned is None or _held(self._planned) == _held(self._running.plan)

    def _predict_anew(self) -> None:
        """Have all ranks tell what they hold, and predict by that; all call it. Layers stay where they are."""
        before, session = self.forecast, self._running
        if before is None or self.forecaster is None:
            return
        self.forecast, self._planned = self.forecaster.foresee(session.size, session.plan), session.plan
        if self.chooses:
            session.note(_note(before, self.forecast), instead=NOTE)


def _held(plan: Plan) -> tuple[object, ...]:
    """What decides on a rank's sweeps, but for chunks."""
    return plan.resident, plan.kept, plan.pools, plan.slots, plan.unit_bytes, plan.head_streamed, plan.kv_slot


def _note(before: RanksPlan, now: RanksPlan) -> str:
    changed = [
        f"{new.host} keeps {new.resident} of {new.layers} layers, {old.resident} before"
        for old, new in zip(before.parts, now.parts, strict=True)
        if (old.resident, old.bytes_per_token) != (new.resident, new.bytes_per_token)
    ]
    return f"{NOTE}{', '.join(changed) or 'as before'}; {1 / now.token_s:.3g} tokens a second are foreseen"
