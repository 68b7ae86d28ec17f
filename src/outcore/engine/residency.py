"""Makes room for longer contexts or more sequences: between passes, sheds resident layers and takes them back later."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import BudgetError
from ..plan.cache_size import ALL
from ..plan.candidate import replan, replanned_bytes, thin
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import ENOUGH_STEP, WORTH, prefill_steps, reading_sizes
from ..sizes import format_size
from .resident_layers import ResidentLayers, another

if TYPE_CHECKING:
    from .session import Session

# Tokens by which the reserved context grows at a time, as mlx-lm's caches do.
GROWTH = 256


class Residency:
    """Makes room in a running model. ``chunk``: prompt tokens per chunk that the user asked for; None: as the plan
    says."""

    def __init__(self, session: Session, calibration: Calibration, chunk: int | None) -> None:
        self.session, self.calibration, self.chunk = session, calibration, chunk
        self.layers = ResidentLayers(session, calibration)

    def holds(self, tokens: int, prompt: int = 1, size: ModelSize | None = None) -> bool:
        """Whether a context of ``tokens`` tokens, ``prompt`` of them the prompt's, would fit into the budget after
        shedding layers and the draft."""
        if self._could_hold(tokens, prompt, size or self.session.size):
            return True
        if (draft := self.layers.draft) is None:
            return False
        without = draft.profile_without(self.session.profile, self.session.plan.head_streamed)
        return self._could_hold(tokens, prompt, without.size)

    def reserve(self, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0, cut: bool = True) -> int:
        """Makes room for a context of ``tokens`` tokens, ``prompt`` of which are the prompt's.

        Args:
            step: tokens of the prompt to compute at a time; None: as many as there is room for.
            kept: bytes of the caches that a failed pass is rolled back to.
            cut: readings of the weights may be for fewer tokens of a prompt than so far.

        Returns:
            tokens of the prompt to compute at a time.

        Raises:
            BudgetError: the budget is too small even with nothing resident.
        """
        session = self.session
        plan, size = session.plan, session.size
        step = step or self.chunk
        if tokens <= plan.context and prompt <= size.prompt and kept <= size.kept:
            if (step is None and plan.prefill_step < min(ENOUGH_STEP, prompt)) or size.reading < prompt:
                # An earlier call may have made chunks or readings short, for lack of room or at its caller's request.
                self._lengthen()
            if step is None or min(step, prompt) <= plan.prefill_step:
                return step or session.plan.prefill_step
        kept = max(kept, size.kept)
        # Reserve more than requested if possible, so that not every token makes room again.
        grown = [-(-tokens // GROWTH) * GROWTH, tokens] if tokens > plan.context else [plan.context]
        if session.max_context is not None:
            grown[0] = max(tokens, min(grown[0], session.max_context))
        larger = [replace(self._grown(size, context, prompt), kept=kept) for context in dict.fromkeys(grown)]
        steps = prefill_steps(larger[-1].prompt)
        if step:
            steps = [min(step, prompt)]
        elif prompt <= 1:  # an answer needs no longer chunks
            steps = [plan.prefill_step, *(s for s in steps if s < plan.prefill_step)]
        ways = [larger, [replace(each, drafted=0) for each in larger]] if size.drafted else [larger]
        sizes = [each for way in ways for each in (*way, *(reading_sizes(way[-1])[1:] if cut else ()))]
        try:
            self._fit_one_of(sizes, steps)
        except BudgetError:
            if plan.streams and self._fits_undrafted(sizes[-1], steps):
                self.layers.give_up_draft()
                return self.reserve(tokens, prompt, step, kept, cut)
            raise self._refusal(sizes[-1], tokens, prompt, kept, steps[-1]) from None
        if size.drafted and not session.size.drafted and session.drafting is not None and session.plan.streams:
            session.note(f"nothing is drafted: with a text of {tokens} tokens the budget has no room for draft tokens")
        return step or session.plan.prefill_step

    def accommodate(self, larger: ModelSize, steps: Sequence[int] | None = None, *, keep_draft: bool = False) -> None:
        """Makes room for more or longer sequences, which need the size ``larger``, with one of the chunk lengths
        ``steps``.

        Args:
            keep_draft: fail rather than give up the draft.

        Raises:
            BudgetError: the budget is too small.
        """
        steps = steps or prefill_steps(larger.prompt)
        try:
            self._fit(larger, steps)
        except BudgetError:
            if keep_draft or not self.session.plan.streams or not self._fits_undrafted(larger, steps):
                raise
            self.layers.give_up_draft()
            if self.layers.given_up is None:
                raise
            self._fit(self.without_draft(larger), steps)

    def without_draft(self, size: ModelSize) -> ModelSize:
        """Returns ``size`` less the draft's part if the draft was given up since; otherwise ``size`` itself."""
        if self.layers.given_up is None:
            return size
        draft, head_streamed = self.layers.given_up
        return replace(draft.size_without(size, head_streamed), layers=self.session.size.layers)

    def release(self, smaller: ModelSize) -> None:
        """Adopts a smaller size after sequences have left, and uses the freed room for layers and larger slots."""
        session, layers = self.session, self.layers
        session.resize(smaller)
        if (caches := layers.expert_caches) is not None:
            caches.fit(smaller, session.plan.prefill_step, self._allowed)
            return
        layers.replan(session.plan.resident)
        if session.plan.peak_bytes > session.plan.budget_bytes:
            # Fewer sequences may need more: with a longer context, with drafts, or since layers were taken back.
            step = self.chunk
            steps = prefill_steps(smaller.prompt) if step is None else [min(step, smaller.prompt)]
            self._fit_one_of([smaller, replace(smaller, drafted=0)], steps)
        else:
            layers.take(session.plan.budget_bytes if layers.room is None else layers.room())

    # Candidates

    def _grown(self, size: ModelSize, tokens: int, prompt: int) -> ModelSize:
        """Returns the size with at least this context and prompt."""
        tokens = max(tokens, size.context)
        return replace(size.at_context(tokens), prompt=max(size.prompt, min(prompt, tokens)))

    def _could_hold(self, tokens: int, prompt: int, size: ModelSize) -> bool:
        # The text has priority over drafts.
        least = reading_sizes(replace(self._grown(size, tokens, prompt), drafted=0))[-1]
        return self._fits(least, prefill_step=self.chunk or prefill_steps(least.prompt)[-1])

    def _fits(self, size: ModelSize, **how: Any) -> bool:
        with contextlib.suppress(BudgetError):
            another(self.session, size, self.session.plan.budget_bytes, for_context=True, **how)
            return True
        return False

    def _refusal(self, larger: ModelSize, tokens: int, prompt: int, kept: int, step: int) -> BudgetError:
        of_these = f", {prompt} of them a prompt's" if prompt > 1 else ""
        of_these += ", with a prompt cache or images," if kept else "," if of_these else ""
        smallest = None
        try:
            another(self.session, replace(larger, drafted=0), 1, for_context=True, prefill_step=step)
        except BudgetError as e:
            smallest = e.smallest
        least = f" ({format_size(smallest, round_up=True)} at least)" if smallest else ""
        return BudgetError(
            f"a context of {tokens} tokens{of_these} does not fit into {format_size(self.session.plan.budget_bytes)} "
            f"with this model: give it more memory{least}, or ask for fewer tokens",
            smallest,
        )

    @property
    def _allowed(self) -> int:
        """Bytes of the budget that may be used now; other processes may have taken memory since it was set."""
        plan, room = self.session.plan, self.layers.room
        if room is None:
            return plan.budget_bytes
        # Memory in use, with the freed memory that the plan leaves in MLX's cache.
        held = mx.get_active_memory() + max(mx.get_cache_memory(), plan.allocator_bytes)
        return min(plan.budget_bytes, held + room())

    def _fits_undrafted(self, larger: ModelSize, steps: Sequence[int]) -> bool:
        draft, plan = self.layers.draft, self.session.plan
        if draft is None:
            return False
        size = draft.profile_without(replace(self.session.profile, size=larger), plan.head_streamed).size
        return self._fits(size, undrafted=True, resident=0, prefill_step=steps[0] if len(steps) == 1 else None)

    # Making room

    def _fit_one_of(self, sizes: Sequence[ModelSize], steps: Sequence[int]) -> None:
        *others, last = sizes
        for size in others:
            with contextlib.suppress(BudgetError):
                self._fit(size, steps)
                return
        self._fit(last, steps)

    def _fit(self, larger: ModelSize, steps: Sequence[int]) -> None:
        session, size = self.session, self.session.size
        step = steps[0] if len(steps) == 1 else None
        try:
            if (caches := self.layers.expert_caches) is not None:
                session.resize(larger)
                caches.fit(larger, step, self._allowed)
            elif session.plan.streams:
                self._fit_streamed(larger, steps)
            else:
                # Keep everything resident if it fits; otherwise stream from now on.
                whole = (self._with(larger, session.plan.resident, each) for each in steps)
                if (fits := next((p for p in whole if p.peak_bytes <= session.plan.budget_bytes), None)) is not None:
                    session.adopt(fits, larger)
                else:
                    self._fit_anew(larger, prefill_step=step)
        except BudgetError:
            session.resize(size)
            raise

    def _fit_streamed(self, larger: ModelSize, steps: Sequence[int]) -> None:
        """Makes room while layers are streamed, with the chunk length that gives the fastest run."""
        plan, layers, before = self.session.plan, self.layers, self.layers.sheddable
        if self.session.streaming is not None:
            self.session.streaming.layers.adopt(())
        fixed, allowed = set(plan.resident) - set(before), self._allowed

        def need(stay: Sequence[int], step: int) -> int:
            return replanned_bytes(larger, replace(plan, prefill_step=step), sorted({*fixed, *stay}))

        best: tuple[Plan, list[int]] | None = None
        for step in [s for s in steps if s <= ENOUGH_STEP] or steps:
            # Find the most layers that may stay, as the need grows with each.
            needs = [need(thin(before, n), step) for n in range(len(before) + 1)]
            stay = thin(before, max(0, bisect_right(needs, allowed) - 1))
            planned = self._with(larger, sorted({*fixed, *stay}), step)
            if planned.peak_bytes <= plan.budget_bytes and (best is None or planned.run_s < best[0].run_s * WORTH):
                best = planned, stay
        if best is not None:
            planned, stay = best
            wider = (s for s in steps if s > planned.prefill_step and need(stay, s) <= allowed)
            self.session.adopt(replace(plan, prefill_step=next(wider, planned.prefill_step)), larger)
            layers.move([i for i in before if i not in stay])
            layers.replan(self.session.plan.resident)
            return
        # Use smaller slots; resident layers come back as far as they fit.
        smaller = self._fit_anew(larger, resident=0, prefill_step=steps[0] if len(steps) == 1 else None)
        room = plan.budget_bytes - smaller.peak_bytes
        if layers.room is not None:
            room = min(room, layers.room() - smaller.activation_bytes - smaller.cache_bytes)
        layers.regrow(max(0, room) // max((layers.nbytes([i]) for i in layers.shed_layers), default=1))

    def _fit_anew(self, larger: ModelSize, **how: Any) -> Plan:
        """Makes room by a new plan, which may move keys and values to disk. Changes nothing if the disk has no room
        (StoreError)."""
        session = self.session
        made = another(session, larger, session.plan.budget_bytes, for_context=True, **how)
        larger = replace(larger, on_disk=bool(made.kv_slot))
        session.check_disk(made, larger)
        session.resize(larger)
        if made.streams:
            self.layers.stream_by(made)
        return made

    def _with(self, size: ModelSize, resident: Sequence[int], step: int) -> Plan:
        return replan(size, replace(self.session.plan, prefill_step=step), resident, self.calibration)

    def _lengthen(self) -> None:
        session, layers = self.session, self.layers
        plan, size = session.plan, session.size
        stay = sorted({*plan.resident, *layers.coming})
        more = (s for s in reading_sizes(replace(size, reading=ALL)) if s.reading > size.reading)
        size = next((s for s in more if replanned_bytes(s, plan, stay) <= plan.budget_bytes), size)
        longer = (s for s in prefill_steps(size.prompt) if plan.prefill_step < s)
        fits = (s for s in longer if replanned_bytes(size, replace(plan, prefill_step=s), stay) <= plan.budget_bytes)
        session.adopt(self._with(size, plan.resident, next(fits, plan.prefill_step)), size)
