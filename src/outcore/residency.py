"""Which layers of a loaded model stay in memory while it runs: some are shed when memory is short, and come back.

Between sweeps only, so that no token is affected: a layer that was resident is streamed from the next sweep on, and one
that is to stay is copied out of its slot when the sweep after next brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .calibration import Calibration
from .errors import BudgetError
from .plan import Plan, make_plan, replan, split_layer, spread
from .session import Session
from .sizes import format_size
from .survey import Survey

GROWTH = 256
"""Tokens by which the reserve for context grows at a time, as mlx-lm's caches do."""


class Residency:
    """What stands behind ``model.outcore`` while the model runs.

    Args:
        stream: starts streaming by a plan, where nothing was streamed before.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        found: Survey,
        calibration: Calibration,
        stream: Callable[[Plan], None],
    ) -> None:
        self.session = session
        self.calibration = calibration
        self._model = model
        self._found = found
        self._stream = stream
        self._shed: set[int] = set()  # layers that were resident once

    @property
    def sheddable(self) -> list[int]:
        """Resident layers that could be streamed instead."""
        plan = self.session.plan
        return [i for i in plan.resident if self._fits(i, plan.unit_bytes if plan.streams else None)]

    @property
    def shed_layers(self) -> list[int]:
        """Layers that were resident and are streamed now."""
        return sorted(self._shed)

    def nbytes(self, layers: Iterable[int]) -> int:
        """Bytes of layers in memory."""
        return sum(self.session.size.layers[i].resident for i in layers)

    def shed(self, count: int) -> int:
        """Stream ``count`` more layers, so that those that stay lie evenly. Returns how many it were."""
        before = self.sheddable
        if not self.session.plan.streams:
            return self._start(before, count)
        stay = thin(before, max(0, len(before) - count))
        self._move([i for i in before if i not in stay])
        return len(before) - len(stay)

    def regrow(self, count: int) -> int:
        """Let up to ``count`` layers that were shed come back with the next sweep. Returns how many will."""
        streaming, plan = self.session.streaming, self.session.plan
        if streaming is None:
            return 0
        # The last of what is streamed stays so: a ring without units could not be filled again.
        most = len(self._shed) if plan.head_streamed else min(len(self._shed), len(plan.streamed) - 1)
        back = thin(sorted(self._shed), min(count, most))
        streaming.adopt([self._found.layers[i].module for i in back])
        return len(back)

    def settle(self) -> None:
        """Write down what came back with the last sweep."""
        streaming = self.session.streaming
        if streaming is None:
            return
        back = [i for i in self._shed if streaming.is_resident(self._found.layers[i].module)]
        if back:
            self._shed.difference_update(back)
            self._replan([*self.session.plan.resident, *back])

    def holds(self, tokens: int) -> bool:
        """Whether there could be room for a context of ``tokens`` tokens, with less resident if need be."""
        session = self.session
        plan, larger = session.plan, session.size.at_context(tokens)
        if plan.streams:
            least = replan(larger, plan, self._resident_with(()), self.calibration)
            return least.peak_bytes <= plan.budget_bytes
        try:
            make_plan(larger, plan.budget_bytes, prefill_step=plan.prefill_step, calibration=self.calibration)
        except BudgetError:
            return False
        return True

    def reserve(self, tokens: int) -> None:
        """Make room for a context of ``tokens`` tokens: layers that are in the way are streamed from now on.

        Raises:
            BudgetError: there is no room for it within the budget however little is resident.
        """
        session = self.session
        plan, size = session.plan, session.size
        if tokens <= plan.context:
            return
        context = -(-tokens // GROWTH) * GROWTH
        if session.max_context is not None:
            context = max(tokens, min(context, session.max_context))
        larger = size.at_context(context)
        if not plan.streams:
            if replan(larger, plan, plan.resident, self.calibration).peak_bytes > plan.budget_bytes:
                session.size = larger
                self._found = replace(self._found, size=larger)
                self._start(self.sheddable, 0)
                return
        else:
            self._found = replace(self._found, size=larger)
            session.size = larger
            stay = before = self.sheddable
            while replan(larger, plan, self._resident_with(stay), self.calibration).peak_bytes > plan.budget_bytes:
                if not stay:
                    session.size = size
                    self._found = replace(self._found, size=size)
                    raise BudgetError(
                        f"a context of {tokens} tokens does not fit into {format_size(plan.budget_bytes)} with this "
                        "model: give it more memory, or ask for fewer tokens"
                    )
                stay = thin(stay, len(stay) - 1)
            self._move([i for i in before if i not in stay])
        session.size = larger
        self._replan(session.plan.resident)

    # How it is done

    def _fits(self, layer: int, unit_bytes: int | None) -> bool:
        """Whether a layer can be streamed, through slots of that many bytes."""
        if self._found.units[layer] is None:
            return False
        if unit_bytes is None:
            return True
        return all(p.slot <= unit_bytes for p in split_layer(self.session.size.layers[layer], (), unit_bytes))

    def _resident_with(self, stay: Sequence[int]) -> list[int]:
        fixed = set(self.session.plan.resident) - set(self.sheddable)
        return sorted({*fixed, *stay})

    def _start(self, before: Sequence[int], count: int) -> int:
        """Begin to stream a model that was all in memory: the slots are made of what is freed."""
        plan, size = self.session.plan, self.session.size
        freed = self.nbytes(thin(before, count))
        whole = replan(size, plan, plan.resident, self.calibration).peak_bytes
        budget = min(plan.budget_bytes, whole - max(freed, 1))
        # The chunk stays: it is memory that is given back, not speed of prompts.
        step = plan.prefill_step
        try:
            smaller = make_plan(size, budget, prefill_step=step, calibration=self.calibration)
        except BudgetError as e:
            if e.smallest is None or e.smallest > whole:
                return 0
            smaller = make_plan(size, e.smallest, prefill_step=step, calibration=self.calibration)
        smaller = replace(smaller, budget_bytes=plan.budget_bytes)
        if not smaller.streams:
            return 0
        mx.synchronize()
        self._stream(smaller)
        self.session.plan = smaller
        gone = set(plan.resident) - set(smaller.resident)
        self._shed |= gone
        return len(gone)

    def _move(self, layers: Sequence[int]) -> None:
        streaming = self.session.streaming
        if not layers or streaming is None:
            return
        streaming.shed([self._found.layers[i].module for i in layers])
        self._shed |= set(layers)
        self._replan([i for i in self.session.plan.resident if i not in layers])

    def _replan(self, resident: Iterable[int]) -> None:
        self.session.plan = replan(self.session.size, self.session.plan, resident, self.calibration)


def thin(layers: Sequence[int], count: int) -> list[int]:
    """``count`` of these layers, as evenly spread among them as whole numbers allow."""
    return [layers[i] for i in spread(min(count, len(layers)), len(layers))]
