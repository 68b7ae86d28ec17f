"""Which layers of a loaded model stay in memory while it runs: some are shed when memory is short, and come back.

Between passes only, so that no token is affected: a layer that was resident is streamed from the next pass on, and one
that is to stay is copied out of its slot when the pass after next brings it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from ..errors import BudgetError, StoreError
from ..plan.machine_profile import Calibration
from ..plan.partition import split_layer
from ..plan.plan import Plan
from ..plan.planner import replan, thin
from ..sizes import format_size
from ..text import counted
from .droppable_draft import DroppableDraft
from .kv_disk import KvDisk
from .model_profile import ModelProfile
from .pools import Pools
from .replanner import Replanner

if TYPE_CHECKING:
    from .session import Session


class ResidentLayers:
    """What of the model is in memory.

    Attributes:
        room: tells how many bytes more may be taken now; None: as many as the budget allows.
        draft: that is in memory and can be given up; None: there is none.
        given_up: the draft that was, and whether the head was streamed then.
        shed_layers: that were resident and are streamed now.
    """

    def __init__(self, engine: Session, calibration: Calibration, chunk: int | None) -> None:
        self.engine = engine
        self._calibration = calibration
        self.plans = Replanner(engine, calibration, chunk)
        self.pools = Pools(engine, self.plans)
        self.shed_layers: set[int] = set()
        self.room: Callable[[], int] | None = None
        self.draft: DroppableDraft | None = None
        self.given_up: tuple[DroppableDraft, bool] | None = None
        self._wide: tuple[int, int] | None = None  # number and bytes of the slots before they were made smaller
        self._smallest: tuple[Plan, int] | None = None  # bytes that smaller slots would free, by this plan

    @property
    def profile(self) -> ModelProfile:
        """Of the model as it is now."""
        return replace(self.engine.profile, size=self.engine.size)

    @property
    def modules(self) -> list[nn.Module]:
        """Each layer's, by the plan's indices."""
        return [layer.module for layer in self.engine.profile.layers]

    def nbytes(self, layers: Iterable[int]) -> int:
        """Bytes of layers in memory."""
        size = self.engine.size
        return sum(size.layers[i].resident + (size.kv(i) if size.on_disk else 0) for i in layers)

    @property
    def sheddable(self) -> list[int]:
        """Resident layers that could be streamed instead, through the slots that there are."""
        plan, layers = self.engine.plan, self.engine.size.layers

        def fits(i: int) -> bool:
            parts = split_layer(layers[i], (), plan.unit_bytes) if plan.streams else ()
            return self.engine.profile.units[i] is not None and all(p.slot <= plan.unit_bytes for p in parts)

        return [] if plan.pools else [i for i in plan.resident if fits(i)]

    @property
    def coming(self) -> list[int]:
        """Layers that were shed and that the next pass brings to stay."""
        streaming, modules = self.engine.streaming, self.modules
        return [i for i in sorted(self.shed_layers) if streaming is not None and streaming.layers.is_coming(modules[i])]

    @property
    def spare_bytes(self) -> int:
        """Bytes that can be given up: of layers or expert caches; where there are none, of what drafts, or of slots."""
        plan = self.engine.plan
        if plan.pools:
            return sum(self.pools.spare)
        if (layers := self.sheddable) or not plan.streams or self.engine.streaming is None:
            return self.nbytes(layers)
        if self.draft is not None:
            return self.draft.draft.weights
        if self._smallest is None or self._smallest[0] is not plan:
            # Planning takes its time, and this is asked for at every look.
            self._smallest = plan, max(0, plan.peak_bytes - self.plans.without_residents(0).peak_bytes)
        return self._smallest[1]

    @property
    def returning_bytes(self) -> list[int]:
        """Of each part that was given up and that the budget has room for."""
        return self.pools.returning if self.engine.plan.pools else [self.nbytes([i]) for i in self.returning()]

    def give(self, nbytes: int) -> tuple[int, str]:
        """Give up so many bytes, or what there is. Returns how many layers or slots of experts went, and what it was,
        for the user; empty for nothing."""
        parts = self.pools.spare if self.engine.plan.pools else [self.nbytes([i]) for i in self.sheddable]
        if parts:
            count = min(len(parts), 1 + sum(total < nbytes for total in accumulate(parts)))
            if self.engine.plan.pools:
                return (n := self.pools.move(count)), f"{counted(n, 'expert')} shed" if n else ""
            return (n := self.shed(count)), f"{counted(n, 'resident layer')} shed" if n else ""
        what = "what drafts given up, for" if self.draft is not None else "slots made smaller by"
        return 0, f"{what} {format_size(freed)}" if (freed := self.shrink(nbytes)) else ""

    def take(self, nbytes: int) -> tuple[int, str]:
        """Take up to so many bytes back. Returns how many layers or slots, and what it was; empty for nothing."""
        count = sum(total <= nbytes for total in accumulate(self.returning_bytes))
        if self.engine.plan.pools:
            return (n := self.pools.move(-count)), f"{counted(n, 'expert')} taken back" if n else ""
        if self.widen():
            return 0, "slots made larger again"
        return (n := self.regrow(count)), f"{counted(n, 'resident layer')} taken back" if n else ""

    def shed(self, count: int) -> int:
        """Stream ``count`` more layers, so that those that stay lie evenly. Returns how many it were."""
        before = self.sheddable
        if not self.engine.plan.streams:
            return self._begin_to_stream(before, count)
        stay = thin(before, max(0, len(before) - count))
        self.move([i for i in before if i not in stay])
        return len(before) - len(stay)

    def returning(self, count: int | None = None) -> list[int]:
        """Of the layers that were shed, up to ``count`` that the budget has room for, evenly placed: a longer context,
        or more sequences, may have taken it."""
        if self.engine.streaming is None or self.engine.plan.pools:
            return []
        return self.plans.returning(sorted(self.shed_layers), count)

    def regrow(self, count: int) -> int:
        """Let up to ``count`` layers that were shed come back with the next pass, as far as the budget allows. Returns
        how many will."""
        streaming, coming = self.engine.streaming, self.coming
        back, modules = self.returning(len(coming) + count), self.modules
        if streaming is not None:
            # Those that come already are among them, or have no room any more.
            streaming.layers.adopt([modules[i] for i in back])
        return max(0, len(back) - len(coming))

    def note_arrivals(self) -> None:
        """Write down what came back with the last pass."""
        streaming, modules = self.engine.streaming, self.modules
        back = {i for i in self.shed_layers if streaming is not None and streaming.layers.is_resident(modules[i])}
        if back:
            self.shed_layers -= back
            self.replan([*self.engine.plan.resident, *back])

    def shrink(self, nbytes: int) -> int:
        """Give up what drafts, or stream through smaller slots, and the head too, so that ``nbytes`` are free. Returns
        how many are."""
        before = self.engine.plan
        if self.sheddable or not self.spare_bytes:
            return 0
        if self.draft is not None:
            return self.give_up_draft(nbytes)
        smaller = self.plans.without_residents(before.peak_bytes - nbytes)
        if smaller.peak_bytes >= before.peak_bytes:
            return 0
        self.stream_by(smaller)
        return before.peak_bytes - smaller.peak_bytes

    def stream_by(self, plan: Plan) -> int:
        """Stream by a plan, through slots of its own; smaller ones can be made larger again. Returns how many layers
        left memory."""
        before = self.engine.plan
        if before.streams:
            self._wide = self._wide or (before.slots, before.unit_bytes)
        else:
            mx.synchronize()
        self.engine.stream(plan)
        gone = set(before.resident) - set(plan.resident)
        self.shed_layers |= set() if plan.pools else gone
        return len(gone)

    def widen(self) -> bool:
        """The slots as they were before they were made smaller, if there is room for them."""
        plan = self.engine.plan
        if self._wide is None or self.room is None:
            return False
        slots, unit = self._wide
        wide = replan(self.engine.size, replace(plan, slots=slots, unit_bytes=unit), plan.resident, self._calibration)
        if wide.peak_bytes > plan.budget_bytes or wide.peak_bytes - plan.peak_bytes > self.room():
            return False
        self.engine.stream(wide)
        self._wide = None
        return True

    def give_up_draft(self, nbytes: int = 0) -> int:
        """What drafts goes out of memory, for good; the text's own repetitions may draft. Returns bytes that are free
        then: ``nbytes``, if there are as many."""
        draft, before = self.draft, self.engine.plan
        if draft is None or not before.streams or self.engine.streaming is None:
            return 0
        self.draft = None
        try:
            draft.check()
        except StoreError as error:
            # Weights would be read from it that are not the model's: it stays in memory.
            logging.getLogger("outcore").warning("%s; what drafts cannot be given up", error)
            return 0
        self.given_up = draft, before.head_streamed
        self.engine.without_draft(draft.profile_without(self.profile, before.head_streamed))
        draft.end()
        if not draft.high_bits:
            self.replan(before.resident)
            return before.peak_bytes - self.engine.plan.peak_bytes
        # Other units, whose slots are larger: layers that stayed in memory come back as there is room.
        smaller = self.plans.without_residents(before.peak_bytes - nbytes)
        self.shed_layers = {i for i, unit in enumerate(self.engine.profile.units) if unit is not None}
        self.engine.stream(smaller)
        return before.peak_bytes - smaller.peak_bytes

    def _begin_to_stream(self, before: Sequence[int], count: int) -> int:
        """Stream a model that was all in memory: the slots are made of what is freed."""
        plan, size = self.engine.plan, self.engine.size
        freed = self.nbytes(thin(before, count))
        whole = replan(size, plan, plan.resident, self._calibration).peak_bytes
        # The chunk stays: it is memory that is given back, not speed of prompts.
        try:
            smaller = self.plans.least(
                size, min(plan.budget_bytes, whole - max(freed, 1)), prefill_step=plan.prefill_step
            )
        except BudgetError:
            return 0
        if smaller.peak_bytes > whole or not smaller.streams:
            return 0
        return self.stream_by(replace(smaller, budget_bytes=plan.budget_bytes))

    def move(self, layers: Sequence[int]) -> None:
        """Stream these layers from the next pass on."""
        streaming, modules = self.engine.streaming, self.modules
        if not layers or streaming is None:
            return
        streaming.shed([modules[i] for i in layers])
        self.shed_layers |= set(layers)
        stay = [i for i in self.engine.plan.resident if i not in layers]
        self.replan(stay)
        # Layers that are streamed in parts take memory for each token of a prompt. Long ones ask for room as they come.
        while self.engine.plan.peak_bytes > self.engine.plan.budget_bytes and self.engine.size.prompt > 1:
            self.engine.resize(replace(self.engine.size, prompt=self.engine.size.prompt // 2))
            self.replan(stay)

    def replan(self, resident: Iterable[int]) -> None:
        """The plan with these layers resident, for the model as it is now."""
        self.engine.adopt(replan(self.engine.size, self.engine.plan, resident, self._calibration))
        plan, streaming = self.engine.plan, self.engine.streaming
        if plan.kv_slot and streaming is not None and isinstance(kv := streaming.beside, KvDisk):
            kv.resize(plan.kv_slot)
