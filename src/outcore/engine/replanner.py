"""Other plans for a model that is running: with less in memory, or for a longer text. Nothing is changed here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError
from ..plan.draft_cost import MTP, SELF
from ..plan.expert_plan import ON_DEMAND
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import ENOUGH_STEP, SLOTS, farthest, make_plan, prefill_steps, replan, replanned_bytes
from ..sizes import format_size

if TYPE_CHECKING:
    from .session import Session


class Replanner:
    """Asks the planner, by what the model is now."""

    def __init__(self, engine: Session, calibration: Calibration, chunk: int | None) -> None:
        self.engine = engine
        self.calibration, self._chunk = calibration, chunk
        self._back: tuple[Plan, int, int] | None = None  # layers that may come back, by this plan and as many shed

    def make(
        self, size: ModelSize, budget: int, *, for_context: bool = False, undrafted: bool = False, **options: Any
    ) -> Plan:
        """A plan of its own; as ``make_plan``.

        Args:
            for_context: room is needed for a longer context, so keys and values may go to the disk. Where memory is
                short for another reason, they stay where they are.
            undrafted: as it would be if what drafts were given up.

        Raises:
            BudgetError: there is none for that budget.
        """
        # Some drafts are made with the model's own head: as long as that is there, it has to stay.
        drafting = None if undrafted else self.engine.drafting
        stays = True if drafting is not None and drafting.kind in (SELF, MTP) else None
        size = size if for_context else replace(size, kv_disk="off")
        return _made(size, budget, self.engine.plan.head_streamed, stays, self.calibration, options)

    def least(self, size: ModelSize, budget: int, **options: Any) -> Plan:
        """The plan for that budget, or for the smallest that there is one for; as ``make``."""
        return at_least(lambda budget: self.make(size, budget, **options), budget)

    def without_residents(self, budget: int) -> Plan:
        """The plan without residents for that budget, or the smallest there is."""
        plan = self.engine.plan
        smaller = self.least(self.engine.size, budget, resident=0, prefill_step=plan.prefill_step)
        return replace(smaller, budget_bytes=plan.budget_bytes)

    def pooled(self, size: ModelSize, budget: int, step: int | None) -> Plan | None:
        """The fastest plan with expert caches; None: there is no room for any."""
        steps = [step] if step else [s for s in prefill_steps(size.prompt) if s <= ENOUGH_STEP]
        least = self.engine.plan.smallest_budget_bytes
        return ON_DEMAND.best(size, budget, least, rings=SLOTS, steps=steps, slots=None, calibration=self.calibration)

    def with_pools(self, pools: tuple[tuple[int, int], ...]) -> Plan:
        """The plan with these expert caches."""
        return ON_DEMAND.with_pools(self.engine.size, self.engine.plan, pools, self.calibration)

    def with_residents(self, size: ModelSize, resident: Sequence[int], step: int) -> Plan:
        """The plan as it is, with these layers resident and chunks of so many tokens."""
        return replan(size, replace(self.engine.plan, prefill_step=step), resident, self.calibration)

    def nbytes(self, size: ModelSize, resident: Sequence[int], step: int) -> int:
        """The peak of that plan."""
        return replanned_bytes(size, replace(self.engine.plan, prefill_step=step), resident)

    def returning(self, shed: Sequence[int], count: int | None) -> list[int]:
        """Of these layers up to ``count`` that the budget has room for, evenly placed."""
        plan, size = self.engine.plan, self.engine.size
        # The last of what is streamed stays so: a ring without units could not be filled again.
        most = len(shed) if plan.head_streamed else min(len(shed), len(plan.streamed) - 1)

        def back(count: int) -> list[int]:
            return farthest(shed, plan.resident, count, len(size.layers))

        def peak(count: int) -> int:
            return self.nbytes(size, [*plan.resident, *back(count)], plan.prefill_step)

        if self._back is None or self._back[0] is not plan or self._back[1] != len(shed):
            # Not the first that is too many: what is streamed in parts takes room, too, and less of it is then.
            fits = next((n for n in range(most, 0, -1) if peak(n) <= plan.budget_bytes), 0)
            self._back = (plan, len(shed), fits)
        return back(self._back[2] if count is None else min(count, self._back[2]))

    def holds(self, tokens: int, prompt: int = 1, size: ModelSize | None = None) -> bool:
        """Whether there could be room for a context of ``tokens`` tokens and a prompt of ``prompt`` of them, with less
        resident and smaller chunks if need be; of the model as it is, or of this size."""
        # What is drafted gives way to the text, and so does room for longer prompts.
        for larger in (self.grown(tokens, prompt, size=size), self.grown(tokens, prompt, least=True, size=size)):
            step = self._chunk or prefill_steps(larger.prompt)[-1]
            with contextlib.suppress(BudgetError):
                budget = self.engine.plan.budget_bytes
                self.make(replace(larger, drafted=0), budget, for_context=True, prefill_step=step)
                return True
        return False

    def grown(self, tokens: int, prompt: int, *, least: bool = False, size: ModelSize | None = None) -> ModelSize:
        """What the model weighs with a context and a prompt of at least so many tokens; ``least``: of a prompt of no
        more, but a chunk as it is now."""
        size = size or self.engine.size
        tokens = max(tokens, size.context)
        longest = min(size.prompt, self.engine.plan.prefill_step) if least else size.prompt
        return replace(size.at_context(tokens), prompt=max(longest, min(prompt, tokens)))

    def steps(self, larger: ModelSize, prompt: int) -> list[int]:
        """Chunks that a prompt may be cut into, largest first; for an answer no larger ones than there are."""
        steps, now = prefill_steps(larger.prompt), self.engine.plan.prefill_step
        return steps if prompt > 1 else [now, *(s for s in steps if s < now)]

    def refusal(self, larger: ModelSize, tokens: int, prompt: int, kept: int, step: int) -> BudgetError:
        """There is no room for a context of so many tokens, a prompt of so many of them, and so many bytes of caches as
        they were before; said with the smallest budget that has."""
        of_these = f", {prompt} of them a prompt's" if prompt > 1 else ""
        of_these += ", beside a prompt cache to go on with," if kept else "," if of_these else ""
        smallest = None
        try:
            self.make(replace(larger, drafted=0), 1, for_context=True, prefill_step=step)
        except BudgetError as e:
            smallest = e.smallest
        least = f" ({format_size(smallest, round_up=True)} at least)" if smallest else ""
        return BudgetError(
            f"a context of {tokens} tokens{of_these} does not fit into {format_size(self.engine.plan.budget_bytes)} "
            f"with this model: give it more memory{least}, or ask for fewer tokens",
            smallest,
        )


def _made(
    size: ModelSize, budget: int, streamed: bool, stays: bool | None, calibration: Calibration, options: dict[str, Any]
) -> Plan:
    # A head that is streamed stays so: its arrays are gone.
    stays = False if streamed else stays
    if stays is None:  # it cannot come back, so it goes only where nothing else would fit
        with contextlib.suppress(BudgetError):
            return make_plan(size, budget, head_resident=True, calibration=calibration, **options)
    return make_plan(size, budget, head_resident=stays, calibration=calibration, **options)


def at_least(plan: Callable[[int], Plan], budget: int) -> Plan:
    """The plan for a budget, or for the smallest that there is one for.

    Raises:
        BudgetError: there is none.
    """
    try:
        return plan(budget)
    except BudgetError as e:
        if e.smallest is None:
            raise
        return plan(e.smallest)


def come_down(size: ModelSize, plan: Plan, room: int, calibration: Calibration) -> Plan:
    """Before anything is loaded: the plan, with fewer residents where there is no room for it. A budget is what may be
    used, and not always there to be used."""
    if plan.peak_bytes <= room:
        return plan
    size, options = replace(size, kv_disk="off"), {"prefill_step": plan.prefill_step}
    smaller = at_least(lambda n: _made(size, n, plan.head_streamed, None, calibration, options), room)
    return replace(smaller, budget_bytes=plan.budget_bytes)
