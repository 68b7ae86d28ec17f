"""Room for a context that outgrows the plan, or for more sequences: layers that are in the way are streamed from then
on, and come back when it has gone. Between passes only."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import BudgetError
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import ENOUGH_STEP, WORTH, prefill_steps, thin
from .resident_layers import ResidentLayers

if TYPE_CHECKING:
    from .session import Session

GROWTH = 256
"""Tokens by which the reserve for context grows at a time, as mlx-lm's caches do."""


class Residency:
    """Makes room in a running model.

    Args:
        chunk: tokens of a prompt to compute at a time, if they were asked for.

    Attributes:
        layers: what of the model is in memory.
        calibration: of the machine; what layers are expected to take.
    """

    def __init__(self, engine: Session, calibration: Calibration, chunk: int | None) -> None:
        self.engine, self.calibration, self.chunk = engine, calibration, chunk
        self.layers = ResidentLayers(engine, calibration, chunk)
        self._plans = self.layers.plans

    def holds(self, tokens: int, prompt: int = 1, size: ModelSize | None = None) -> bool:
        """Whether there could be room for a context of ``tokens`` tokens and a prompt of ``prompt`` of them, with less
        resident, without a draft, and smaller chunks if need be; of the model as it is, or of this size."""
        if self._plans.holds(tokens, prompt, size):
            return True
        if (draft := self.layers.draft) is None:
            return False
        without = draft.profile_without(self.layers.profile, self.engine.plan.head_streamed)
        return self._plans.holds(tokens, prompt, without.size)

    def reserve(self, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
        """Make room for a context of ``tokens`` tokens and a prompt of ``prompt`` of them.

        Args:
            step: tokens of the prompt to compute at a time, if they shall be so many.
            kept: bytes of caches as they were before a pass, to go back to.

        Returns:
            tokens of the prompt to compute at a time.

        Raises:
            BudgetError: there is no room for it within the budget however little is resident.
        """
        engine = self.engine
        plan, size = engine.plan, engine.size
        step = step or self.chunk
        if tokens <= plan.context and prompt <= size.prompt and kept <= size.kept:
            if step is None and plan.prefill_step < min(ENOUGH_STEP, prompt):
                # Chunks may have become small for want of room, or because they were asked to be once.
                self._lengthen()
            if step is None or min(step, prompt) <= plan.prefill_step:
                return step or engine.plan.prefill_step
        kept = max(kept, size.kept)
        # Room for more than what is asked for, so that it is not asked for with every token; else for that.
        grown = [-(-tokens // GROWTH) * GROWTH, tokens] if tokens > plan.context else [plan.context]
        if engine.profile.max_context is not None:
            grown[0] = max(tokens, min(grown[0], engine.profile.max_context))
        larger = [replace(self._plans.grown(context, prompt), kept=kept) for context in dict.fromkeys(grown)]
        steps = [min(step, prompt)] if step else self._plans.steps(larger[-1], prompt)
        # Room for longer prompts is the last to give way: it is asked for again as they come.
        least = replace(self._plans.grown(grown[-1], prompt, least=True), kept=kept, drafted=0)
        try:
            self._fit_one_of([*larger, *(replace(each, drafted=0) for each in larger if each.drafted), least], steps)
        except BudgetError:
            if plan.streams and self._fits_undrafted(least, steps):
                self.layers.give_up_draft()
                return self.reserve(tokens, prompt, step, kept)
            raise self._plans.refusal(least, tokens, prompt, kept, steps[-1]) from None
        if size.drafted and not engine.size.drafted and engine.drafting is not None and engine.plan.streams:
            engine.note(f"nothing is drafted: beside a text of {tokens} tokens the budget has no room for guesses")
        return step or engine.plan.prefill_step

    def accommodate(self, larger: ModelSize, steps: Sequence[int] | None = None, *, keep_draft: bool = False) -> None:
        """Room for the same model with more sequences, or longer ones; as ``reserve``. ``steps``: chunks of prompts, of
        which there is a choice; None: any. ``keep_draft``: it is refused before what drafts is given up.

        Raises:
            BudgetError: there is none within the budget.
        """
        steps = steps or prefill_steps(larger.prompt)
        try:
            self._fit(larger, steps)
        except BudgetError:
            if keep_draft or not self.engine.plan.streams or not self._fits_undrafted(larger, steps):
                raise
            self.layers.give_up_draft()
            if self.layers.given_up is None:
                raise
            self._fit(self.without_draft(larger), steps)

    def without_draft(self, size: ModelSize) -> ModelSize:
        """A size of the model from before its draft was given up, as it is since; the same where it was not."""
        if self.layers.given_up is None:
            return size
        draft, head_streamed = self.layers.given_up
        return replace(draft.size_without(size, head_streamed), layers=self.engine.size.layers)

    def release(self, smaller: ModelSize) -> None:
        """The same model with fewer sequences, or shorter ones, when others have left. Slots and layers that were in
        the way take back what is free then, if memory is there."""
        engine, layers = self.engine, self.layers
        engine.resize(smaller)
        if engine.plan.pools:
            layers.pools.fit(smaller, engine.plan.prefill_step, self._allowed)
            return
        layers.replan(engine.plan.resident)
        if engine.plan.peak_bytes > engine.plan.budget_bytes:
            # Fewer, but with room for a longer one, or for drafts: layers may have come back meanwhile.
            step = self.chunk
            steps = prefill_steps(smaller.prompt) if step is None else [min(step, smaller.prompt)]
            self._fit_one_of([smaller, replace(smaller, drafted=0)], steps)
        else:
            layers.take(engine.plan.budget_bytes if layers.room is None else layers.room())

    # How it is done

    def _fit_one_of(self, sizes: Sequence[ModelSize], steps: Sequence[int]) -> None:
        """Room for the first of these that there is room for; as ``_fit``."""
        *others, last = sizes
        for size in others:
            with contextlib.suppress(BudgetError):
                self._fit(size, steps)
                return
        self._fit(last, steps)

    def _fit(self, larger: ModelSize, steps: Sequence[int]) -> None:
        size = self.engine.size
        try:
            if self.engine.plan.pools:
                self.engine.resize(larger)
                self.layers.pools.fit(larger, steps[0] if len(steps) == 1 else None, self._allowed)
            elif self.engine.plan.streams:
                self._fit_streamed(larger, steps)
            else:
                self._fit_whole(larger, steps)
        except BudgetError:
            self.engine.resize(size)
            raise

    def _fits_undrafted(self, larger: ModelSize, steps: Sequence[int]) -> bool:
        """Whether there is a draft, and without it there would be room: nobody gives it up in vain."""
        draft, plan = self.layers.draft, self.engine.plan
        if draft is None:
            return False
        without = draft.profile_without(replace(self.layers.profile, size=larger), plan.head_streamed).size
        options = {"resident": 0, "prefill_step": steps[0] if len(steps) == 1 else None}
        with contextlib.suppress(BudgetError):
            self._plans.make(without, plan.budget_bytes, for_context=True, undrafted=True, **options)
            return True
        return False

    @property
    def _allowed(self) -> int:
        """Bytes of the budget that may be used now: it was made when there was more, perhaps."""
        plan, room = self.engine.plan, self.layers.room
        if room is None:
            return plan.budget_bytes
        # What is held, with what the plan keeps free for MLX to use again.
        held = mx.get_active_memory() + max(mx.get_cache_memory(), plan.allocator_bytes)
        return min(plan.budget_bytes, held + room())

    def _lengthen(self) -> None:
        """The longest chunks that there is room for beside what is resident."""
        engine = self.engine
        plan, size = engine.plan, engine.size
        stay = [*self.layers.sheddable, *self.layers.coming]
        longer = (s for s in prefill_steps(size.prompt) if plan.prefill_step < s)
        fits = (s for s in longer if self._need(size, stay, s) <= plan.budget_bytes)
        engine.adopt(self._plans.with_residents(size, plan.resident, next(fits, plan.prefill_step)))

    def _fit_streamed(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Room in a plan that streams: of the chunks that are large enough, the one with the fastest run."""
        plan, layers, before = self.engine.plan, self.layers, self.layers.sheddable
        if self.engine.streaming is not None:
            self.engine.streaming.layers.adopt(())
        allowed = self._allowed
        best: tuple[Plan, list[int]] | None = None
        for step in [s for s in steps if s <= ENOUGH_STEP] or steps:
            # The most that may stay: what is needed grows with each.
            needs = [self._need(larger, thin(before, n), step) for n in range(len(before) + 1)]
            stay = thin(before, max(0, bisect_right(needs, allowed) - 1))
            planned = self._plans.with_residents(larger, self._resident_with(stay), step)
            if planned.peak_bytes <= plan.budget_bytes and (best is None or planned.run_s < best[0].run_s * WORTH):
                best = planned, stay
        if best is None:
            self._fit_through_smaller_slots(larger, steps)
            return
        planned, stay = best
        wider = (s for s in steps if s > planned.prefill_step and self._need(larger, stay, s) <= allowed)
        self.engine.adopt(replace(plan, prefill_step=next(wider, planned.prefill_step)), larger)
        layers.move([i for i in before if i not in stay])
        layers.replan(self.engine.plan.resident)

    def _fit_through_smaller_slots(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Another ring, with slots that leave more room; layers that stayed in memory come back as far as they fit."""
        plan, layers = self.engine.plan, self.layers
        step = steps[0] if len(steps) == 1 else None
        smaller = self._plans.make(larger, plan.budget_bytes, for_context=True, resident=0, prefill_step=step)
        self.engine.resize(self._on_disk(larger, smaller))
        layers.stream_by(smaller)
        room = plan.budget_bytes - smaller.peak_bytes
        if layers.room is not None:
            room = min(room, layers.room() - smaller.activation_bytes - smaller.cache_bytes)
        layers.regrow(max(0, room) // max((layers.nbytes([i]) for i in layers.shed_layers), default=1))

    def _fit_whole(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Room beside a model that is all in memory, or by streaming from now on."""
        plan = self.engine.plan
        whole = (self._plans.with_residents(larger, plan.resident, step) for step in steps)
        if (fits := next((p for p in whole if p.peak_bytes <= plan.budget_bytes), None)) is not None:
            self.engine.adopt(fits, larger)
            return
        step = steps[0] if len(steps) == 1 else None
        smaller = self._plans.make(larger, plan.budget_bytes, for_context=True, prefill_step=step)
        self.engine.resize(self._on_disk(larger, smaller))
        if smaller.streams:
            self.layers.stream_by(smaller)

    def _on_disk(self, size: ModelSize, plan: Plan) -> ModelSize:
        """The model with its keys and values where a plan has them.

        Raises:
            StoreError: the disk has no room for them; nothing has changed.
        """
        size = replace(size, on_disk=bool(plan.kv_slot))
        self.engine.check_disk(plan, size)
        return size

    def _need(self, size: ModelSize, stay: Sequence[int], step: int) -> int:
        return self._plans.nbytes(size, self._resident_with(stay), step)

    def _resident_with(self, stay: Sequence[int]) -> list[int]:
        fixed = set(self.engine.plan.resident) - set(self.layers.sheddable)
        return sorted({*fixed, *stay})
