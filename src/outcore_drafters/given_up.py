"""A drafter that was given up comes back with a later text, since that may be one that it can draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from outcore.decode.speculative.acceptance import AcceptanceStats
from outcore.decode.speculative.draft_length import PROBE, SURE
from outcore.decode.speculative.drafting import Drafting
from outcore.decode.text_drafts import SETTLED
from outcore.engine.resident_layers import DroppableDraft
from outcore.engine.session import Session
from outcore.errors import BudgetError, OutcoreError
from outcore.plan.candidate import replanned_bytes
from outcore.plan.joint_plan import drafted_tokens
from outcore.plan.model_size import ModelSize

# What it costs at most to look again: passes with the drafter until it is weighed, and passes that its wrong guesses
# take (simulated).
LOOK, WRONG = 2 * SETTLED + SURE, 2


class GivenUp(Drafting):
    """N-grams in the place of a drafter that was given up. It comes back at the beginning of a text once this costs at
    most ``PROBE`` of the time since. Where it does not pay again, it is given up again.

    Args:
        drafted: the most drafted tokens that there was room for with the drafter.
        back: reads the drafter's weights within the memory of a pass's activations; None: they have no room there, or
            others are in the file now. It is not called again then.
    """

    def __init__(self, session: Session, drafted: int, back: Callable[[Session], Drafting | None]) -> None:
        super().__init__()
        self._drafted, self._back = drafted, back
        learnt = session.acceptance
        self._from_s = learnt.total_s if learnt is not None else 0.0

    def new_text(self, session: Session, most: int) -> None:
        layers, learnt, plan = session.residency.layers, session.acceptance, session.plan
        if learnt is None or layers.given_up is None or plan.pools or plan.kv_slot or not session.metrics.bytes_read:
            return
        draft, head_streamed = layers.given_up
        drafted = min(self._drafted, drafted_tokens(session.size, plan.budget_bytes, False, most))
        if not drafted or head_streamed or plan.head_streamed or session.size.sequences > 1:
            return
        size = replace(draft.size_with(session.profile), drafted=drafted)
        short = replanned_bytes(size, plan, plan.resident) - plan.budget_bytes
        shed, waited_s = (
            max(0, -(-short // max(layer.resident for layer in size.layers))),
            learnt.total_s - self._from_s,
        )
        if shed <= len(layers.sheddable) and self._look_s(session, draft, shed) <= PROBE * waited_s:
            self._from_s = learnt.total_s
            self._take(session, draft, size)

    def _look_s(self, session: Session, draft: DroppableDraft, shed: int) -> float:
        """Returns the seconds that a look takes if the drafter is never right and ``shed`` layers make room for it."""
        metrics, learnt = session.metrics, session.acceptance
        nbytes = draft.draft.weights + LOOK * shed * max(layer.read for layer in session.size.layers)
        return nbytes * metrics.reading()[1] / metrics.bytes_read + WRONG * (learnt.plain.value or 0.0)

    def _take(self, session: Session, draft: DroppableDraft, size: ModelSize) -> None:
        residency, before, drafter = session.residency, session.size, None
        with contextlib.suppress(BudgetError):
            residency.accommodate(size, [session.plan.prefill_step], keep_draft=True)
            residency.layers.given_up = None
            try:
                with contextlib.suppress(OutcoreError):
                    drafter = self._back(session)
            finally:
                if drafter is None:
                    residency.release(before)
                else:
                    session.draft_with(drafter, draft)
                    forget(session.acceptance, draft.draft.kind)
                    session.note("the drafter has memory again, as this is another text")


def forget(learnt: AcceptanceStats, source: str) -> None:
    """Forgets how many guesses of a source were right, and begins to weigh anew."""
    learnt.sources.pop(source, None)
    learnt.rates = {key: rate for key, rate in learnt.rates.items() if key[0] != source}
    learnt.weighed, learnt.lately = learnt.sweeps, (0.0, 0.0, 0.0)
