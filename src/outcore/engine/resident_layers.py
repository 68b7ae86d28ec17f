"""Sheds resident layers of a running model when memory is short, and takes them back.

This happens between passes, so no token is affected: a shed layer is streamed from the next pass on, and a layer that
is taken back is copied out of its slot when the next pass has read it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..errors import BudgetError
from ..plan.candidate import farthest, replan, replanned_bytes, thin
from ..plan.joint_plan import Draft
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import make_plan
from ..sizes import format_size, held_bytes
from ..text import counted
from .binding import sheddable
from .extensions import ExpertCacheSizes, on_demand
from .model_profile import ModelProfile

if TYPE_CHECKING:
    from .session import Session


class Drafter(Protocol):
    """Proposes tokens for a model (``decode.speculative.drafting``).

    Attributes:
        kind: ``ngram``, or the draft source's word for ``--draft``.
        holds_head: it uses the model's own head, which therefore has to stay in memory.
        intact: it can be given up: the files that the model would then read are unchanged.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def holds_head(self) -> bool: ...

    @property
    def intact(self) -> bool: ...

    def hidden(self) -> Any:
        """Returns an object that collects a text's hidden states for the drafter; None if it does not need them."""

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        """Returns the model's profile without this drafter; its ``size`` still counts the draft."""

    def give_up(self, session: Session) -> Drafter:
        """Frees the drafter's memory, also that of running texts, and returns the drafter that replaces it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class DroppableDraft:
    """A draft in memory that can be given up, with the context and ``kv_disk`` that the model was planned with."""

    draft: Draft
    context: int
    kv_disk: str
    drafter: Drafter

    def size_without(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        draft = self.draft
        states = draft.cache - held_bytes(draft.growing, self.context)
        return replace(
            size,
            non_layer=size.non_layer - draft.weights - (draft.head if head_streamed else 0),
            cache=size.cache - states - held_bytes(draft.growing, size.context),
            growing=size.growing[: len(size.growing) - len(draft.growing)],
            kv_disk=self.kv_disk,
            drafted=0,
        )

    def size_with(self, profile: ModelProfile) -> ModelSize:
        """Returns the size with this draft again, which is in none of ``profile``. The head is in memory."""
        size, draft = profile.size, self.draft
        states = draft.cache - held_bytes(draft.growing, self.context) + held_bytes(draft.growing, size.context)
        weights, growing = size.non_layer + draft.weights, size.growing + draft.growing
        rest = 2 * size.rest - self.drafter.profile_without(profile).size.rest
        return replace(size, non_layer=weights, cache=size.cache + states, growing=growing, rest=rest)

    def profile_without(self, profile: ModelProfile, head_streamed: bool) -> ModelProfile:
        profile = self.drafter.profile_without(profile)
        return replace(profile, size=self.size_without(profile.size, head_streamed))


class ResidentLayers:
    """The layers of a model that are in memory.

    Attributes:
        room: returns how many more bytes may be taken now; None: only the budget limits them.
        given_up: the draft that was given up, and whether the head was streamed then; None: none, or it came back.
        adapts: memory goes to drafts or to layers, whichever pays: nobody asked for a draft.
        shed_layers: numbers of the layers that were resident and are streamed for now.
    """

    def __init__(self, session: Session, calibration: Calibration) -> None:
        self.session, self._calibration = session, calibration
        found = on_demand()
        self._expert_caches = None if found is None else found.CacheSizes(session, calibration)
        self.shed_layers: set[int] = set()
        self.room: Callable[[], int] | None = None
        self.draft: DroppableDraft | None = None
        self.given_up: tuple[DroppableDraft, bool] | None = None
        self.adapts = False
        self._wide: tuple[int, int] | None = None  # number and bytes of the slots before they were made smaller

    @property
    def expert_caches(self) -> ExpertCacheSizes | None:
        return self._expert_caches if self.session.plan.pools else None

    @property
    def modules(self) -> list[nn.Module]:
        return [layer.module for layer in self.session.profile.layers]

    def nbytes(self, layers: Iterable[int]) -> int:
        size = self.session.size
        return sum(size.layers[i].resident + (size.kv(i) if size.on_disk else 0) for i in layers)

    @property
    def sheddable(self) -> list[int]:
        """Resident layers that could be streamed, through the current slots if there are any."""
        plan, parts = self.session.plan, self.session.profile.parts
        if plan.streams:
            return sheddable(self.session.profile, plan)
        return [i for i in plan.resident if parts[i].unit is not None]

    # Bytes

    def movable(self) -> tuple[int, list[int]]:
        """Returns the bytes that can be given up, and the bytes of each part that the budget lets come back.

        The former are those of resident layers or expert caches; without any, those of the draft; or else of slots.
        """
        plan, session = self.session.plan, self.session
        if (caches := self.expert_caches) is not None:
            return sum(caches.spare), caches.returning
        if (layers := self.sheddable) or not plan.streams or session.streaming is None:
            spare = self.nbytes(layers)
        elif self.draft is not None:
            spare = self.draft.draft.weights
        else:
            spare = max(0, plan.peak_bytes - self._without_residents(0).peak_bytes)
        return spare, [self.nbytes([i]) for i in self.returning()]

    def give(self, nbytes: int) -> tuple[int, str]:
        """Gives up ``nbytes`` bytes, or as many as there are. Returns how many layers or expert slots were shed, and a
        line for the user (empty: nothing was given up)."""
        caches = self.expert_caches
        parts = [self.nbytes([i]) for i in self.sheddable] if caches is None else caches.spare
        if parts:
            count = min(len(parts), 1 + sum(total < nbytes for total in accumulate(parts)))
            count = self.shed(count) if caches is None else caches.move(count)
            return count, f"{counted(count, 'expert' if caches else 'resident layer')} shed" if count else ""
        what = "draft given up, freeing" if self.draft is not None else "slots made smaller by"
        return 0, f"{what} {format_size(freed)}" if (freed := self.shrink(nbytes)) else ""

    def take(self, nbytes: int) -> tuple[int, str]:
        """Takes back up to ``nbytes`` bytes. Returns how many layers or expert slots, and a line as from ``give``."""
        count, caches = sum(total <= nbytes for total in accumulate(self.movable()[1])), self.expert_caches
        if caches is None and self.widen():
            return 0, "slots made larger again"
        count = self.regrow(count) if caches is None else caches.move(-count)
        return count, f"{counted(count, 'expert' if caches else 'resident layer')} taken back" if count else ""

    # Layers

    def shed(self, count: int) -> int:
        """Streams ``count`` resident layers, so that the others stay evenly spread. Returns how many were shed."""
        before, plan, size = self.sheddable, self.session.plan, self.session.size
        if plan.streams:
            stay = thin(before, max(0, len(before) - count))
            self.move([i for i in before if i not in stay])
            return len(before) - len(stay)
        # Everything was resident: the new slots take some of the memory that this frees.
        whole = replan(size, plan, plan.resident, self._calibration).peak_bytes
        room = min(plan.budget_bytes, whole - max(self.nbytes(thin(before, count)), 1))
        try:
            # Keep the chunk length, and so the speed of prompts.
            smaller = at_least(lambda n: another(self.session, size, n, prefill_step=plan.prefill_step), room)
        except BudgetError:
            return 0
        if smaller.peak_bytes > whole or not smaller.streams:
            return 0
        return self.stream_by(replace(smaller, budget_bytes=plan.budget_bytes))

    def returning(self, count: int | None = None) -> list[int]:
        """Returns up to ``count`` shed layers, evenly spread, that fit the budget at the current context and batch."""
        plan, size, shed = self.session.plan, self.session.size, sorted(self.shed_layers)
        if self.session.streaming is None or plan.pools:
            return []
        # Keep one streamed layer: a ring without units could not be filled again.
        most = len(shed) if plan.head_streamed else min(len(shed), len(plan.streamed) - 1)
        # Try every count, as more residents may need less: layers streamed in parts take room as well.
        for n in range(most, 0, -1):
            back = farthest(shed, plan.resident, n, len(size.layers))
            if replanned_bytes(size, plan, [*plan.resident, *back]) <= plan.budget_bytes:
                return back if count is None or count >= n else farthest(shed, plan.resident, count, len(size.layers))
        return []

    @property
    def coming(self) -> list[int]:
        streaming, modules = self.session.streaming, self.modules
        return [i for i in sorted(self.shed_layers) if streaming is not None and streaming.layers.is_coming(modules[i])]

    def regrow(self, count: int) -> int:
        """Lets up to ``count`` shed layers come back with the next pass, within the budget. Returns how many will."""
        streaming, coming = self.session.streaming, self.coming
        back, modules = self.returning(len(coming) + count), self.modules
        if streaming is not None:
            # ``back`` includes the layers that are coming already, as far as they still fit.
            streaming.layers.adopt([modules[i] for i in back])
        return max(0, len(back) - len(coming))

    def note_arrivals(self) -> None:
        if (streaming := self.session.streaming) is not None:
            modules = self.modules
            back = {i for i in self.shed_layers if streaming.layers.is_resident(modules[i])}
            if back:
                self.shed_layers -= back
                self.replan([*self.session.plan.resident, *back])

    def move(self, layers: Sequence[int]) -> None:
        session, modules = self.session, self.modules
        if not layers or session.streaming is None:
            return
        session.streaming.shed([modules[i] for i in layers])
        self.shed_layers |= set(layers)
        stay = [i for i in session.plan.resident if i not in layers]
        self.replan(stay)
        # Layers streamed in parts take memory per prompt token. Long prompts reserve room when they come.
        while session.plan.peak_bytes > session.plan.budget_bytes and session.size.prompt > 1:
            session.resize(replace(session.size, prompt=session.size.prompt // 2))
            self.replan(stay)

    def replan(self, resident: Iterable[int]) -> None:
        self.session.adopt(replan(self.session.size, self.session.plan, resident, self._calibration))
        plan, streaming = self.session.plan, self.session.streaming
        if plan.kv_slot and streaming is not None and streaming.kv is not None:
            streaming.kv.resize(plan.kv_slot)

    # Slots and the draft

    def _without_residents(self, budget: int) -> Plan:
        """Returns a plan without residents for ``budget``, or for the smallest possible budget if that is larger."""
        session, plan = self.session, self.session.plan
        how: dict[str, Any] = {"resident": 0, "prefill_step": plan.prefill_step}
        smaller = at_least(lambda n: another(session, session.size, n, **how), budget)
        return replace(smaller, budget_bytes=plan.budget_bytes)

    def shrink(self, nbytes: int) -> int:
        """Frees up to ``nbytes`` once no layer can be shed: gives up the draft, or makes slots smaller and streams the
        head. Returns the bytes freed."""
        before = self.session.plan
        if self.sheddable or not self.movable()[0]:
            return 0
        if self.draft is not None:
            return self.give_up_draft(nbytes)
        smaller = self._without_residents(before.peak_bytes - nbytes)
        if smaller.peak_bytes >= before.peak_bytes:
            return 0
        self.stream_by(smaller)
        return before.peak_bytes - smaller.peak_bytes

    def stream_by(self, plan: Plan) -> int:
        """Streams by a plan through new slots, remembering the old slot size for ``widen``. Returns how many layers
        left memory."""
        before = self.session.plan
        if before.streams:
            self._wide = self._wide or (before.slots, before.unit_bytes)
        else:
            mx.synchronize()
        self.session.stream(plan)
        gone = set(before.resident) - set(plan.resident)
        self.shed_layers |= set() if plan.pools else gone
        return len(gone)

    def widen(self) -> bool:
        """Restores the slots that ``stream_by`` made smaller, if there is room. Returns whether it did."""
        plan = self.session.plan
        if self._wide is None or self.room is None:
            return False
        slots, unit = self._wide
        wide = replan(self.session.size, replace(plan, slots=slots, unit_bytes=unit), plan.resident, self._calibration)
        if wide.peak_bytes > plan.budget_bytes or wide.peak_bytes - plan.peak_bytes > self.room():
            return False
        self.session.stream(wide)
        self._wide = None
        return True

    def give_up_draft(self, nbytes: int = 0) -> int:
        """Frees the draft; if layers get other units by that, sheds them all and makes slots smaller to free
        ``nbytes``. Returns the bytes freed."""
        draft, before = self.draft, self.session.plan
        if draft is None or not before.streams or self.session.streaming is None:
            return 0
        self.draft = None
        if not draft.drafter.intact:
            # The model's high bits would be read from these files, so the draft stays in memory.
            logging.getLogger("outcore").warning(
                "the draft's files in the cache were changed or deleted: the draft stays in memory"
            )
            return 0
        self.given_up = draft, before.head_streamed
        profile, parts = draft.profile_without(self.session.profile, before.head_streamed), self.session.profile.parts
        self.session.without_draft(profile)
        if profile.parts is parts:
            self.replan(before.resident)
            return before.peak_bytes - self.session.plan.peak_bytes
        # The units are others now, and larger: start without residents, which are taken back as far as there is room.
        smaller = self._without_residents(before.peak_bytes - nbytes)
        self.shed_layers = {i for i, part in enumerate(profile.parts) if part.unit is not None}
        self.session.stream(smaller)
        return before.peak_bytes - smaller.peak_bytes


def another(
    session: Session,
    size: ModelSize,
    budget: int,
    *,
    for_context: bool = False,
    undrafted: bool = False,
    **options: Any,
) -> Plan:
    """Returns a new plan for the running model within ``budget`` bytes; ``options`` are ``make_plan``'s.

    Args:
        for_context: room is needed for a longer context, so keys and values may move to disk; otherwise they stay.
        undrafted: plan as if the draft were given up.
    """
    drafting = None if undrafted else session.drafting
    stays = True if drafting is not None and drafting.holds_head else None
    size = size if for_context else replace(size, kv_disk="off")
    return _made(size, budget, session.plan.head_streamed, stays, session.residency.calibration, options)


def come_down(size: ModelSize, plan: Plan, room: int, calibration: Calibration) -> Plan:
    """Returns ``plan`` if it fits into ``room``, the bytes that are free; otherwise one with fewer resident layers."""
    if plan.peak_bytes <= room:
        return plan
    size, options = replace(size, kv_disk="off"), {"prefill_step": plan.prefill_step}
    smaller = at_least(lambda n: _made(size, n, plan.head_streamed, None, calibration, options), room)
    return replace(smaller, budget_bytes=plan.budget_bytes)


def at_least(plan: Callable[[int], Plan], budget: int) -> Plan:
    """Returns the plan for a budget, or for the smallest possible budget if that is larger."""
    try:
        return plan(budget)
    except BudgetError as e:
        if e.smallest is None:
            raise
        return plan(e.smallest)


def _made(
    size: ModelSize, budget: int, streamed: bool, stays: bool | None, calibration: Calibration, options: dict[str, Any]
) -> Plan:
    # A streamed head stays streamed: its arrays are gone.
    stays = False if streamed else stays
    if stays is None:  # a streamed head cannot become resident again: stream it only if nothing else fits
        with contextlib.suppress(BudgetError):
            return make_plan(size, budget, head_resident=True, calibration=calibration, **options)
    return make_plan(size, budget, head_resident=stays, calibration=calibration, **options)
