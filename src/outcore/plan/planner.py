"""Chooses what stays resident under a budget: the fastest plan that fits.

Memory goes first to non-layer weights, caches for the requested context and one prompt chunk's activations; then to two
or three slots for layers or parts of them; then to as many whole resident layers as fit, evenly spread so that the disk
works while they compute; then to single projections. The rest is streamed. Of the unit sizes and numbers of slots that
fit, the one with the shortest simulated run is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ..errors import BudgetError, UsageError, called, offered
from ..sizes import format_size
from ..text import counted
from .candidate import ALLOCATOR_SHARE, Candidates
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import held_between, smallest_slot, unit_sizes
from .plan import Plan

# Tokens. mlx-lm's default prompt chunk; equal chunks give equal bits.
PREFILL_STEP = 2048

# Tokens. A larger chunk is chosen only if no resident layer needs its memory: all chunks share one reading of the
# weights, so it is hardly faster.
ENOUGH_STEP = 256

# Tokens of the smallest prompt chunk that is tried to save memory.
SMALLEST_STEP = 16

# Numbers of slots to compare: one is computed with while two, or if memory is short one, are read into.
SLOTS = (3, 2)

# More slots to try with the best chunk: where reading and computing take about equally long, a short ring waits for
# every slow unit.
DEEPER = (4, 6)

# A budget below this many bytes was probably typed without its unit.
FEW_BYTES = 1_000_000

# A plan with more units, fewer slots or smaller chunks is chosen only if it takes less than this share of the time.
WORTH = 0.99

# Experts are read one by one if a token then reads less than this share of what it does if all of a layer are streamed.
FEWER = 0.8

ASSUMED = Calibration()


@dataclass(frozen=True)
class Fixed:
    """Choices that the planner has to keep; None: it chooses.

    Attributes:
        slots: how many slots the ring has, at least 2.
        resident: how many layers are resident; then no pieces of other layers are.
        prefill_step: tokens of a prompt per pass; None: mlx-lm's 2048 or what fits.
        head_resident: whether the head is resident; None: yes, unless layers fit only in parts or in two slots, and
            streaming the head is faster.
        experts: cached experts per layer; 0: layers are streamed whole.
    """

    slots: int | None = None
    resident: int | None = None
    prefill_step: int | None = None
    head_resident: bool | None = None
    experts: int | None = None

    def checked(self, size: ModelSize) -> Fixed:
        """Returns the choices for a model, without ``experts`` if no layer has experts to read one by one.

        Raises:
            UsageError: more resident layers than the model has.
        """
        if self.resident is not None and not 0 <= self.resident <= len(size.layers):
            raise UsageError(f"{called('resident')} {self.resident}: this model has only {len(size.layers)} layers")
        # Another rank may hold the layers with experts.
        return replace(self, experts=None) if all(layer.experts is None for layer in size.layers) else self

    @property
    def rings(self) -> Sequence[int]:
        """Numbers of slots to compare."""
        return [self.slots] if self.slots else SLOTS

    def heads(self, size: ModelSize) -> list[bool]:
        """Whether to stream the head: values to compare, in order."""
        if size.head is None or self.head_resident:
            return [False]
        return [True] if self.head_resident is False else [False, True]

    def steps(self, size: ModelSize) -> list[int]:
        """Prompt chunks to compare, largest first."""
        return [self.prefill_step] if self.prefill_step else prefill_steps(size.prompt)

    def counts(self, size: ModelSize) -> Sequence[int]:
        """Numbers of resident layers to compare, largest first."""
        return range(len(size.layers), -1, -1) if self.resident is None else [self.resident]


def make_plan(size: ModelSize, budget: int, *, calibration: Calibration = ASSUMED, **fixed: Any) -> Plan:
    """Returns the fastest plan within ``budget`` bytes, with KV offload where it is requested or the context needs it.

    Args:
        fixed: fields of ``Fixed``.

    Raises:
        BudgetError: the budget is too small; names the smallest that works.
        UsageError: as ``Fixed.checked``.
    """
    asked, refused = Fixed(**fixed).checked(size), list[BudgetError]()
    try:
        for each in _with_disk(size, asked):
            try:
                return _make_plan(each, budget, asked, calibration)
            except BudgetError as e:
                refused.append(e)
        raise min(refused, key=lambda e: e.smallest or budget)
    finally:
        # A frame that holds an error which passed it is a cycle: its callers' arrays would wait for the collector.
        refused.clear()


def smallest_budget(size: ModelSize, **fixed: Any) -> int:
    """Returns the smallest budget in bytes that ``make_plan`` accepts; arguments and errors as there."""
    asked = Fixed(**fixed).checked(size)
    return min([_smallest_budget(each, asked) for each in _with_disk(size, asked)])


def _with_disk(size: ModelSize, asked: Fixed) -> list[ModelSize]:
    """Returns the model's size without KV offload, with it, or both in this order, as ``size.kv_disk`` allows."""
    if size.on_disk or not size.kept_apart or size.sequences > 1 or asked.experts:
        return [size]
    there = replace(size, on_disk=True)
    return {"on": [there], "auto": [size, there]}.get(size.kv_disk, [size])


def _make_plan(size: ModelSize, budget: int, asked: Fixed, calibration: Calibration) -> Plan:
    candidates, least = Candidates(size), _smallest_budget(size, asked)
    steps, heads = asked.steps(size), asked.heads(size)
    if asked.resident is None and False in heads and not asked.experts:
        # A plan that streams nothing is the fastest, whatever its chunk.
        for step in steps:
            if (whole := candidates.at(len(size.layers), False, step, 0, 0)).peak <= budget:
                return whole.plan(budget, least, calibration)
    # A larger step may take less memory where each pass holds arrays for later layers.
    enough = [s for s in steps if s <= ENOUGH_STEP or s == _thriftiest_step(size)] or steps
    pooled: Plan | None = None
    if size.on_demand and asked.resident is None and asked.experts != 0 and not size.on_disk:
        how: dict[str, Any] = {"heads": heads, "rings": asked.rings, "steps": enough, "slots": asked.experts}
        pooled = size.on_demand.best(size, budget, least, **how, calibration=calibration)
    if asked.experts:
        return _with_experts(pooled, size, budget, least, asked.experts)
    found: Plan | None = None
    for head in heads:
        best = _fastest(candidates, budget, least, asked, head, enough, calibration)
        for plan in (best, pooled):
            if plan is not None and (found is None or plan.run_s < found.run_s * WORTH):
                found = plan
        if pooled is not None and best is not None and pooled.bytes_per_token < FEWER * best.bytes_per_token:
            # What is read falls as memory grows, whatever else is predicted.
            found = pooled
        if found is not None and not found.split and found.slots > SLOTS[-1]:
            break
        # Layers in parts or in two slots wait for each other: more slots in the head's place may be faster.
    if found is not None:
        return _with_larger_step(size, found, steps)
    raise BudgetError(refusal(size, budget, least, asked.resident), least)


def _fastest(
    candidates: Candidates,
    budget: int,
    least: int,
    asked: Fixed,
    head: bool,
    steps: Sequence[int],
    calibration: Calibration,
) -> Plan | None:
    """Returns the fastest plan that fits, over numbers of slots, unit sizes and prompt chunks."""
    size = candidates.size
    counts, best = asked.counts(size), None
    # Whole layers first: of plans that are equally fast the one with the fewest units is taken.
    units = unit_sizes(size.layers, size.most_unit)

    def look(step: int, ring: int, unit: int) -> None:
        nonlocal best
        if (found := candidates.first(counts, head, step, ring, unit, budget)) is not None:
            whole = found if asked.resident is not None else found.fill(budget)
            plan = whole.plan(budget, least, calibration)
            if best is None or plan.run_s < best.run_s * WORTH:
                best = plan

    for step, ring, unit in product(steps, asked.rings, units):
        look(step, ring, unit)
    if best is not None and best.streams and asked.slots is None and asked.resident is None:
        step = best.prefill_step
        for ring, unit in product(DEEPER, units):
            look(step, ring, unit)
    return best


def _with_experts(plan: Plan | None, size: ModelSize, budget: int, least: int, experts: int) -> Plan:
    most = max(layer.experts.count for layer in size.layers if layer.experts is not None)
    if experts > most:
        raise UsageError(f"{called('experts')} {experts}: a layer of this model has only {counted(most, 'expert')}")
    if plan is not None:
        return plan
    raise BudgetError(
        f"a budget of {format_size(budget)} is too small for {counted(experts, 'expert')} of each layer and all "
        f"other weights of this model, and a context of {size.context} tokens: the smallest that works is "
        f"{format_size(least, round_up=True)}; or give fewer ({called('experts')})",
        least,
    )


def _with_larger_step(size: ModelSize, plan: Plan, steps: Sequence[int]) -> Plan:
    """Uses leftover memory for a larger prompt chunk."""
    between = held_between(size.layers, plan.parts)
    for step in (s for s in steps if s > plan.prefill_step):
        more = size.activations(step, between) - size.activations(plan.prefill_step, between)
        reused = min(size.reuse, plan.allocator_bytes + int(more * ALLOCATOR_SHARE) + 1)
        longer = replace(plan, prefill_step=step, activation_bytes=plan.activation_bytes + more, allocator_bytes=reused)
        if longer.peak_bytes <= plan.budget_bytes:
            return longer
    return plan


@lru_cache(maxsize=32)
def _smallest_budget(size: ModelSize, asked: Fixed) -> int:
    """Like ``smallest_budget``, with KV offload if ``size.on_disk``. Cached: every budget of a curve needs it."""
    step = asked.prefill_step or _thriftiest_step(size)
    pooled = None
    if size.on_demand and asked.experts != 0 and asked.resident is None and not size.on_disk:
        how: dict[str, Any] = {"heads": asked.heads(size), "rings": asked.rings}
        pooled = size.on_demand.smallest(size, **how, step=step, slots=asked.experts)
        if asked.experts and pooled is not None:
            return pooled
    candidates, slots = Candidates(size), asked.slots or SLOTS[-1]
    counts, units = asked.counts(size)[::-1], unit_sizes(size.layers, size.most_unit)
    least = min([candidates.smallest(counts, head, step, slots, unit) for head in asked.heads(size) for unit in units])
    return least if pooled is None else min(least, pooled)


def refusal(size: ModelSize, budget: int, least: int, resident: int | None = None, also: str = "") -> str:
    """Returns the message for a budget that is too small. It also counts layers that are too large for any slot.

    Args:
        also: appended to what the budget has to cover.
    """
    what = f" with {counted(resident, 'resident layer')}" if resident else ""
    texts = f"a context of {size.context} tokens"
    if fewer := offered("context"):
        texts += f"; fewer need less ({fewer[0]})"
    else:
        texts += f"; a shorter prompt{' or fewer --max-tokens need' if offered('max_tokens') else ' needs'} less"
    stay = ""
    if needed := [n for n in map(smallest_slot, size.layers) if n > size.most_unit]:
        stay = (
            f" ({len(needed)} of {len(size.layers)} layers stay in memory: streaming one takes a slot of "
            f"{format_size(max(needed), round_up=True)}, and this device's hold {format_size(size.most_unit)} at most)"
        )
    few = ""
    if budget < FEW_BYTES:
        memory, unit = called("memory"), "GB" if budget < 1000 else "MB"
        few = f' ({memory}={budget} is {budget} bytes: write {memory}="{budget}{unit}")'
    return (
        f"a budget of {format_size(budget)}{few} is too small for this model{what}{also}: "
        f"the smallest that works is {format_size(least, round_up=True)}{stay} for {texts}"
    )


def resident_budget(size: ModelSize, step: int | None = None) -> int:
    """Returns the smallest budget in bytes with which everything stays resident; ``step``: as in ``make_plan``."""
    return Candidates(size).at(len(size.layers), False, min(step or _thriftiest_step(size), size.prompt), 0, 0).peak


def _thriftiest_step(size: ModelSize) -> int:
    """The prompt chunk with the least memory: usually the smallest, unless each pass holds arrays for later layers."""
    return min(reversed(prefill_steps(size.prompt)), key=size.activations)


def reading_sizes(size: ModelSize) -> list[ModelSize]:
    """Returns the size, and with ever fewer tokens of prompts that share a reading of the weights: the last resort."""
    most = min(max(size.prompt, size.joining), size.reading)
    return [size, *(replace(size, reading=n) for n in prefill_steps(most) if n < most)]


def prefill_steps(prompt: int) -> list[int]:
    """Returns the prompt chunks to try, in tokens, largest first."""
    step, smallest = min(PREFILL_STEP, prompt), min(SMALLEST_STEP, prompt)
    steps = []
    while step > smallest:
        steps.append(step)
        step //= 2
    return [*steps, smallest]
