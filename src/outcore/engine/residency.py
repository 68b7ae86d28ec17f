"""Which layers of a loaded model stay in memory while it runs: some are shed when memory is short, and come back.

Between sweeps only, so that no token is affected: a layer that was resident is streamed from the next sweep on, and one
that is to stay is copied out of its slot when the sweep after next brings it.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import BudgetError, StoreError
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.partition import split_layer
from ..plan.plan import Plan
from ..plan.planner import ENOUGH_STEP, WORTH, prefill_steps, replan, thin
from .droppable_draft import DroppableDraft
from .kv_disk import KvDisk
from .model_profile import ModelProfile
from .pools import Pools
from .replanner import Replanner
from .state import State

GROWTH = 256
"""Tokens by which the reserve for context grows at a time, as mlx-lm's caches do."""


class Residency:
    """What stands behind ``model.outcore`` while the model runs.

    Args:
        stream: starts streaming by a plan, where nothing was streamed before.

    Attributes:
        profile: of the model as it is now.
        room: tells how many bytes more may be taken now; None: as many as the budget allows.
        draft: that is in memory and can be given up; None: there is none.
    """

    def __init__(
        self,
        state: State,
        profile: ModelProfile,
        calibration: Calibration,
        stream: Callable[[Plan], None],
    ) -> None:
        self.state = state
        self.calibration = calibration
        self.profile = profile
        self._plans = Replanner(state, calibration)
        self._pools = Pools(state, self._plans, stream)
        self._stream = stream
        self.check_disk: Callable[[Plan, ModelSize], None] = lambda *_: None
        self._shed: set[int] = set()  # layers that were resident once
        self._wide: tuple[int, int] | None = None  # number and bytes of the slots before they were made smaller
        self._spare: tuple[Plan, int] | None = None
        self.room: Callable[[], int] | None = None
        self.draft: DroppableDraft | None = None
        self._given_up: tuple[DroppableDraft, bool] | None = None  # and whether the head was streamed then

    @property
    def sheddable(self) -> list[int]:
        """Resident layers that could be streamed instead."""
        plan = self.state.plan
        if plan.pools:
            return []
        return [i for i in plan.resident if self._fits(i, plan.unit_bytes if plan.streams else None)]

    @property
    def shed_layers(self) -> list[int]:
        """Layers that were resident and are streamed now."""
        return sorted(self._shed)

    def nbytes(self, layers: Iterable[int]) -> int:
        """Bytes of layers in memory."""
        size = self.state.size
        return sum(size.layers[i].resident + (size.kv(i) if size.on_disk else 0) for i in layers)

    @property
    def sheddable_bytes(self) -> list[int]:
        """Of each part of what is in memory that can be given up: layers, or parts of pools of experts."""
        pools = self._pools if self.state.plan.pools else None
        return pools.sheddable if pools else [self.nbytes([i]) for i in self.sheddable]

    @property
    def returning_bytes(self) -> list[int]:
        """Of each part that was given up and that the budget has room for."""
        pools = self._pools if self.state.plan.pools else None
        return pools.returning if pools else [self.nbytes([i]) for i in self.returning()]

    def shed(self, count: int) -> int:
        """Stream ``count`` more layers, so that those that stay lie evenly. Returns how many it were."""
        if self.state.plan.pools:
            return self._pools.move(count)
        before = self.sheddable
        if not self.state.plan.streams:
            return self._start(before, count)
        stay = thin(before, max(0, len(before) - count))
        self._move([i for i in before if i not in stay])
        return len(before) - len(stay)

    @property
    def modules(self) -> list[nn.Module]:
        """Each layer's, by the plan's indices."""
        return [layer.module for layer in self.profile.layers]

    def returning(self, count: int | None = None) -> list[int]:
        """Of the layers that were shed, up to ``count`` that the budget has room for, evenly placed: a longer context,
        or more sequences, may have taken it."""
        if self.state.streaming is None or self.state.plan.pools:
            return []
        return self._plans.returning(sorted(self._shed), count)

    def regrow(self, count: int) -> int:
        """Let up to ``count`` layers that were shed come back with the next sweep, as far as the budget allows. Returns
        how many will."""
        if self.state.plan.pools:
            return self._pools.move(-count)
        streaming, coming = self.state.streaming, self._coming
        back = self.returning(len(coming) + count)
        if streaming is not None:
            # Those that come already are among them, or have no room any more.
            streaming.adopt_none()
            streaming.adopt([self.profile.layers[i].module for i in back])
        return max(0, len(back) - len(coming))

    @property
    def _coming(self) -> list[int]:
        """Layers that were shed and that the next sweep brings to stay."""
        streaming = self.state.streaming
        if streaming is None:
            return []
        return [i for i in sorted(self._shed) if streaming.is_coming(self.profile.layers[i].module)]

    @property
    def spare_bytes(self) -> int:
        """Bytes that would be free without what drafts, or with the smallest slots that the model can be streamed
        through."""
        plan = self.state.plan
        if not plan.streams or plan.pools or self.sheddable or self.state.streaming is None:
            return 0
        if self.draft is not None:
            return self.draft.draft.weights
        if self._spare is None or self._spare[0] is not plan:
            # Planning takes its time, and this is asked for at every look.
            self._spare = (plan, max(0, plan.peak_bytes - self._plans.without_residents(0).peak_bytes))
        return self._spare[1]

    def shrink(self, nbytes: int) -> int:
        """Give up what drafts, or stream through smaller slots, and the head too, so that ``nbytes`` are free. Returns
        how many are."""
        before = self.state.plan
        if not self.spare_bytes:
            return 0
        if self.draft is not None:
            return self.give_up_draft(nbytes)
        smaller = self._plans.without_residents(before.peak_bytes - nbytes)
        if smaller.peak_bytes >= before.peak_bytes:
            return 0
        self._wide = self._wide or (before.slots, before.unit_bytes)
        self._stream(smaller)
        self.state.plan = smaller
        return before.peak_bytes - smaller.peak_bytes

    def give_up_draft(self, nbytes: int = 0) -> int:
        """Between sweeps: what drafts goes out of memory, for good; the text's own repetitions may draft. Returns bytes
        that are free then: ``nbytes``, if there are as many."""
        draft, before = self.draft, self.state.plan
        if draft is None or not before.streams or self.state.streaming is None:
            return 0
        self.draft = None
        try:
            draft.check()
        except StoreError as error:
            # Weights would be read from it that are not the model's: it stays in memory.
            logging.getLogger("outcore").warning("%s; what drafts cannot be given up", error)
            return 0
        self._given_up = draft, before.head_streamed
        self.profile = draft.profile_without(self.profile, before.head_streamed)
        self.state.size = self.profile.size
        draft.end()
        if not draft.high_bits:
            self._replan(before.resident)
            return before.peak_bytes - self.state.plan.peak_bytes
        # Other units, whose slots are larger: layers that stayed in memory come back as there is room.
        smaller = self._plans.without_residents(before.peak_bytes - nbytes)
        self._shed = {i for i, unit in enumerate(self.profile.units) if unit is not None}
        self._stream(smaller)
        self.state.plan = smaller
        return before.peak_bytes - smaller.peak_bytes

    def widen(self) -> bool:
        """Between sweeps: the slots as they were before they were made smaller, if there is room for them."""
        plan = self.state.plan
        if self._wide is None or self.room is None:
            return False
        slots, unit = self._wide
        wide = replan(self.state.size, replace(plan, slots=slots, unit_bytes=unit), plan.resident, self.calibration)
        if wide.peak_bytes > plan.budget_bytes or wide.peak_bytes - plan.peak_bytes > self.room():
            return False
        self._stream(wide)
        self.state.plan, self._wide = wide, None
        return True

    def come_down(self, room: int) -> Plan:
        """Before anything is loaded: the plan, with fewer residents where there is no room for it.

        Those that it leaves out may come back. A budget is what may be used, and not always there to be used.
        """
        plan = self.state.plan
        if plan.peak_bytes <= room:
            return plan
        smaller = self._plans.within(room, self.sheddable)
        self._shed |= set(plan.resident) - set(smaller.resident)
        self.state.plan = replace(smaller, budget_bytes=plan.budget_bytes)
        return self.state.plan

    def note_arrivals(self) -> None:
        """Write down what came back with the last sweep."""
        streaming = self.state.streaming
        if streaming is None:
            return
        back = [i for i in self._shed if streaming.is_resident(self.profile.layers[i].module)]
        if back:
            self._shed.difference_update(back)
            self._replan([*self.state.plan.resident, *back])

    def holds(self, tokens: int, prompt: int = 1, size: ModelSize | None = None) -> bool:
        """Whether there could be room for a context of ``tokens`` tokens and a prompt of ``prompt`` of them, with less
        resident, without a draft, and smaller chunks if need be; of the model as it is, or of this size."""
        if self._plans.holds(tokens, prompt, size):
            return True
        if self.draft is None:
            return False
        without = self.draft.profile_without(self.profile, self.state.plan.head_streamed)
        return self._plans.holds(tokens, prompt, without.size)

    def reserve(self, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
        """Make room for a context of ``tokens`` tokens and a prompt of ``prompt`` of them: layers that are in the way
        are streamed from now on.

        Args:
            step: tokens of the prompt to compute at a time, if they shall be so many.
            kept: bytes of caches as they were before a sweep, to go back to.

        Returns:
            tokens of the prompt to compute at a time.

        Raises:
            BudgetError: there is no room for it within the budget however little is resident.
        """
        state = self.state
        plan, size = state.plan, state.size
        step = step or state.prefill_step_size
        if tokens <= plan.context and prompt <= size.prompt and kept <= size.kept:
            if step is None and plan.prefill_step < min(ENOUGH_STEP, prompt):
                # Chunks may have become small for want of room, or because they were asked to be once.
                self._lengthen()
            if step is None or min(step, prompt) <= plan.prefill_step:
                return step or state.plan.prefill_step
        kept = max(kept, size.kept)
        # Room for more than what is asked for, so that it is not asked for with every token; else for that.
        grown = [-(-tokens // GROWTH) * GROWTH, tokens] if tokens > plan.context else [plan.context]
        if state.max_context is not None:
            grown[0] = max(tokens, min(grown[0], state.max_context))
        larger = [replace(self._plans.grown(context, prompt), kept=kept) for context in dict.fromkeys(grown)]
        steps = [min(step, prompt)] if step else self._plans.steps(larger[-1], prompt)
        # Room for longer prompts is the last to give way: it is asked for again as they come.
        least = replace(self._plans.grown(grown[-1], prompt, least=True), kept=kept, drafted=0)
        try:
            self._fit_one_of([*larger, *(replace(each, drafted=0) for each in larger if each.drafted), least], steps)
        except BudgetError:
            if plan.streams and self._fits_undrafted(least, steps):
                self.give_up_draft()
                return self.reserve(tokens, prompt, step, kept)
            raise self._plans.refusal(least, tokens, prompt, kept, steps[-1]) from None
        if size.drafted and not state.size.drafted and state.drafting is not None and state.plan.streams:
            state.note(f"nothing is drafted: beside a text of {tokens} tokens the budget has no room for guesses")
        return step or state.plan.prefill_step

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
            if keep_draft or not self.state.plan.streams or not self._fits_undrafted(larger, steps):
                raise
            self.give_up_draft()
            if self._given_up is None:
                raise
            self._fit(self.without_draft(larger), steps)

    def without_draft(self, size: ModelSize) -> ModelSize:
        """A size of the model from before its draft was given up, as it is since; the same where it was not."""
        if self._given_up is None:
            return size
        draft, head_streamed = self._given_up
        return replace(draft.size_without(size, head_streamed), layers=self.profile.size.layers)

    def release(self, smaller: ModelSize) -> None:
        """The same model with fewer sequences, or shorter ones: between sweeps, when others have left. Slots and layers
        that were in the way take back what is free then, if memory is there."""
        if self.state.plan.pools:
            self._resize(smaller)
            self._pools.fit(smaller, self.state.plan.prefill_step, self._allowed)
            return
        self._resize(smaller)
        self._replan(self.state.plan.resident)
        if self.state.plan.peak_bytes > self.state.plan.budget_bytes:
            # Fewer, but with room for a longer one, or for drafts: layers may have come back meanwhile.
            step = self.state.prefill_step_size
            steps = prefill_steps(smaller.prompt) if step is None else [min(step, smaller.prompt)]
            self._fit_one_of([smaller, replace(smaller, drafted=0)], steps)
            return
        if self.widen():
            return
        back = self.returning()
        room = None if self.room is None else self.room()
        while back and room is not None and self.nbytes(back) > room:
            back = back[:-1]
        self.regrow(len(back))

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
        size = self.state.size
        try:
            if self.state.plan.pools:
                self._resize(larger)
                self._pools.fit(larger, steps[0] if len(steps) == 1 else None, self._allowed)
            elif self.state.plan.streams:
                self._reserve(larger, steps)
            else:
                self._reserve_whole(larger, steps)
        except BudgetError:
            self._resize(size)
            raise

    def _fits_undrafted(self, larger: ModelSize, steps: Sequence[int]) -> bool:
        """Whether there is a draft, and without it there would be room: nobody gives it up in vain."""
        draft, plan = self.draft, self.state.plan
        if draft is None:
            return False
        without = draft.profile_without(replace(self.profile, size=larger), plan.head_streamed).size
        options = {"resident": 0, "prefill_step": steps[0] if len(steps) == 1 else None}
        try:
            self._plans.make(without, plan.budget_bytes, for_context=True, undrafted=True, **options)
        except BudgetError:
            return False
        return True

    def _fits(self, layer: int, unit_bytes: int | None) -> bool:
        """Whether a layer can be streamed, through slots of that many bytes."""
        if self.profile.units[layer] is None:
            return False
        if unit_bytes is None:
            return True
        return all(p.slot <= unit_bytes for p in split_layer(self.state.size.layers[layer], (), unit_bytes))

    @property
    def _allowed(self) -> int:
        """Bytes of the budget that may be used now."""
        budget = self.state.plan.budget_bytes
        return budget if self.room is None else min(budget, self._held + self.room())

    @property
    def _held(self) -> int:
        """Bytes that are held now, with what the plan keeps free for MLX to use again."""
        return mx.get_active_memory() + max(mx.get_cache_memory(), self.state.plan.allocator_bytes)

    def _lengthen(self) -> None:
        """The longest chunks that there is room for beside what is resident."""
        state = self.state
        plan, size = state.plan, state.size
        longer = (s for s in prefill_steps(size.prompt) if plan.prefill_step < s)
        stay = [*self.sheddable, *self._coming]
        fits = (s for s in longer if self._need(size, stay, s) <= plan.budget_bytes)
        state.adopt(self._plans.with_residents(size, plan.resident, next(fits, plan.prefill_step)))

    def _resize(self, size: ModelSize) -> None:
        self.state.size = size
        self.profile = replace(self.profile, size=size)

    def _reserve(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Room in a plan that streams: of the chunks that are large enough, the one with the fastest run."""
        plan, before = self.state.plan, self.sheddable
        if self.state.streaming is not None:
            self.state.streaming.adopt_none()
        # The budget was made when there was more, perhaps: less may be left of it now.
        allowed = self._allowed
        best: tuple[Plan, list[int]] | None = None
        for step in [s for s in steps if s <= ENOUGH_STEP] or steps:
            # The most that may stay: what is needed grows with each.
            needs = [self._need(larger, thin(before, n), step) for n in range(len(before) + 1)]
            count = bisect_right(needs, allowed)
            stay = thin(before, max(0, count - 1))
            planned = self._plans.with_residents(larger, self._resident_with(stay), step)
            if planned.peak_bytes <= plan.budget_bytes and (best is None or planned.run_s < best[0].run_s * WORTH):
                best = planned, stay
        if best is None:
            self._rebind(larger, steps)
            return
        planned, stay = best
        wider = (s for s in steps if s > planned.prefill_step and self._need(larger, stay, s) <= allowed)
        self._resize(larger)
        self.state.plan = replace(plan, prefill_step=next(wider, planned.prefill_step))
        self._move([i for i in before if i not in stay])
        self._replan(self.state.plan.resident)

    def _rebind(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Another ring, with slots that leave more room; layers that stayed in memory come back as far as they fit."""
        plan = self.state.plan
        step = steps[0] if len(steps) == 1 else None
        smaller = self._plans.make(larger, plan.budget_bytes, for_context=True, resident=0, prefill_step=step)
        self._resize(self._on_disk(larger, smaller))
        self._wide = self._wide or (plan.slots, plan.unit_bytes)
        self._stream(smaller)
        self.state.plan = smaller
        self._shed |= set(plan.resident) - set(smaller.resident)
        room = plan.budget_bytes - smaller.peak_bytes
        if self.room is not None:
            room = min(room, self.room() - smaller.activation_bytes - smaller.cache_bytes)
        self.regrow(max(0, room) // max((self.nbytes([i]) for i in self._shed), default=1))

    def _reserve_whole(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Room beside a model that is all in memory, or by streaming from now on."""
        plan = self.state.plan
        whole = (self._plans.with_residents(larger, plan.resident, step) for step in steps)
        if (fits := next((p for p in whole if p.peak_bytes <= plan.budget_bytes), None)) is not None:
            self._resize(larger)
            self.state.adopt(fits)
            return
        step = steps[0] if len(steps) == 1 else None
        smaller = self._plans.make(larger, plan.budget_bytes, for_context=True, prefill_step=step)
        self._resize(self._on_disk(larger, smaller))
        self._begin(smaller)

    def _on_disk(self, size: ModelSize, plan: Plan) -> ModelSize:
        """The model with its keys and values where a plan has them.

        Raises:
            StoreError: the disk has no room for them; nothing has changed.
        """
        size = replace(size, on_disk=bool(plan.kv_slot))
        self.check_disk(plan, size)
        return size

    def _need(self, size: ModelSize, stay: Sequence[int], step: int) -> int:
        return self._plans.nbytes(size, self._resident_with(stay), step)

    def _resident_with(self, stay: Sequence[int]) -> list[int]:
        fixed = set(self.state.plan.resident) - set(self.sheddable)
        return sorted({*fixed, *stay})

    def _start(self, before: Sequence[int], count: int) -> int:
        """Begin to stream a model that was all in memory: the slots are made of what is freed."""
        plan, size = self.state.plan, self.state.size
        freed = self.nbytes(thin(before, count))
        whole = replan(size, plan, plan.resident, self.calibration).peak_bytes
        budget = min(plan.budget_bytes, whole - max(freed, 1))
        # The chunk stays: it is memory that is given back, not speed of prompts.
        step = plan.prefill_step
        try:
            smaller = self._plans.make(size, budget, prefill_step=step)
        except BudgetError as e:
            if e.smallest is None or e.smallest > whole:
                return 0
            smaller = self._plans.make(size, e.smallest, prefill_step=step)
        return self._begin(replace(smaller, budget_bytes=plan.budget_bytes))

    def _begin(self, smaller: Plan) -> int:
        """Stream by that plan a model that was all in memory. Returns how many layers left it."""
        if not smaller.streams:
            return 0
        gone = set(self.state.plan.resident) - set(smaller.resident)
        mx.synchronize()
        self._stream(smaller)
        self.state.plan = smaller
        if not smaller.pools:
            self._shed |= gone
        return len(gone)

    def _move(self, layers: Sequence[int]) -> None:
        streaming = self.state.streaming
        if not layers or streaming is None:
            return
        streaming.shed([self.profile.layers[i].module for i in layers])
        self._shed |= set(layers)
        stay = [i for i in self.state.plan.resident if i not in layers]
        self._replan(stay)
        # Layers that are streamed in parts take memory for each token of a prompt. Long ones ask for room as they come.
        while self.state.plan.peak_bytes > self.state.plan.budget_bytes and self.state.size.prompt > 1:
            self._resize(replace(self.state.size, prompt=self.state.size.prompt // 2))
            self._replan(stay)

    def _replan(self, resident: Iterable[int]) -> None:
        plan = replan(self.state.size, self.state.plan, resident, self.calibration)
        self.state.adopt(plan)
        streaming = self.state.streaming
        if plan.kv_slot and streaming is not None and isinstance(kv := streaming.beside, KvDisk):
            kv.resize(plan.kv_slot)
