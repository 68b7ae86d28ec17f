"""What to keep resident under a budget: of all plans that fit, the one to take.

The rule: what is not a layer, the caches for the context that was asked for, and one prompt chunk's activations come
first; then two or three slots for whole layers or parts of them; then as many whole layers as fit stay resident, spread
evenly, so that the disk works while they are computed, and single projections of others with what is left. The rest is
streamed. Among the sizes and numbers of slots that fit, the one whose simulated sweep is shortest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypedDict, Unpack

from ..errors import BudgetError, UsageError
from ..options import PLACEMENTS
from ..sizes import format_size
from ..text import counted
from .candidate import Candidate
from .expert_plan import expert_plan, smallest_pooled, with_pools
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import held_between, smallest_slot, spread, unit_sizes
from .plan import Plan
from .prediction import predict
from .search import Search

PREFILL_STEP = 2048
"""Tokens. mlx-lm's default chunk of a prompt; the same chunks give the same bits."""

ENOUGH_STEP = 256
"""Tokens. A larger chunk is hardly faster, since all chunks share a sweep, so layers stay resident first."""

SMALLEST_STEP = 16
"""Tokens of the smallest chunk that a prompt is cut into to save memory."""

SLOTS = (3, 2)
"""Numbers of slots that are looked at: one to compute from, two to read into, or one where memory is short."""

DEEPER = (4, 6)
"""And of what those make best, with more slots: where reading and computing take about equally long, a ring that is not
deep enough loses what single units take longer."""

WORTH = 0.99
"""A plan with more units, fewer slots or smaller chunks is taken if it takes less than this share of the time."""

ASSUMED = Calibration()


class Fixed(TypedDict, total=False):
    """What somebody else has chosen of a plan.

    Attributes:
        slots: number of slots, at least 2; chosen when None.
        resident: how many whole layers stay; chosen when None.
        prefill_step: tokens of a prompt that a pass takes; chosen when None.
        head_resident: whether the head stays in memory; chosen when None.
        placement: one of ``PLACEMENTS``.
        experts: slots of each layer for single experts; 0: layers are streamed whole; None: what is fastest.
    """

    slots: int | None
    resident: int | None
    prefill_step: int | None
    head_resident: bool | None
    placement: str
    experts: int | None


def make_plan(size: ModelSize, budget: int, *, calibration: Calibration = ASSUMED, **fixed: Unpack[Fixed]) -> Plan:
    """Decide what stays resident within ``budget`` bytes; with keys and values on disk where they are to lie there, or
    where the context does not fit otherwise and they may.

    Args:
        calibration: what the machine does.
        fixed: as in ``Fixed``.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
        UsageError: fewer than 2 slots, a number of layers that the model does not have, an unknown placement.
    """
    refused: list[BudgetError] = []
    for each in _with_disk(size, fixed.get("experts")):
        try:
            return _make_plan(each, budget, calibration=calibration, **fixed)
        except BudgetError as e:
            refused.append(e)
    raise min(refused, key=lambda e: e.smallest or budget)


def _with_disk(size: ModelSize, experts: int | None = None) -> list[ModelSize]:
    """The model with its keys and values where they may lie: what is better first."""
    if size.on_disk or not size.kept_apart or size.sequences > 1 or experts:
        return [size]
    there = replace(size, on_disk=True)
    return {"on": [there], "auto": [size, there]}.get(size.kv_disk, [size])


def _make_plan(
    size: ModelSize,
    budget: int,
    *,
    slots: int | None = None,
    resident: int | None = None,
    prefill_step: int | None = None,
    head_resident: bool | None = None,
    placement: str = "even",
    experts: int | None = None,
    calibration: Calibration = ASSUMED,
) -> Plan:
    """As ``make_plan``, with keys and values where ``size`` says.

    Args:
        slots: number of slots, at least 2; chosen when None.
        resident: number of resident layers, and nothing of the others; as many as fit when None.
        head_resident: whether the head stays in memory; None: it does, unless layers would fit in parts alone beside it
            and it is faster to stream it too.
        prefill_step: tokens of a prompt at a time; mlx-lm's 2048 where it fits when None, else less.
        placement: one of ``PLACEMENTS``.
        experts: slots of each layer for single experts; 0: layers are streamed whole; None: what is fastest.
        calibration: what the machine does.
    """
    _check(size, slots, resident, prefill_step, placement)
    if all(layer.experts is None for layer in size.layers):
        experts = None  # other machines hold the layers that have some
    steps = [prefill_step] if prefill_step else prefill_steps(size.prompt)
    heads = _heads(size, head_resident)
    counts = range(len(size.layers), -1, -1) if resident is None else [resident]
    # Whole layers first: of plans that are equally fast the one with the fewest units is taken.
    units = unit_sizes(size.layers, size.most_unit)

    search = Search(size, lambda count: place(size, count, placement))
    numbers = {"slots": slots, "resident": resident, "prefill_step": prefill_step, "experts": experts}
    least = smallest_budget(size, head_resident=head_resident, placement=placement, **numbers)
    if resident is None and False in heads and not experts:
        # Nothing streamed beats any chunk size.
        everything = (search.at(len(size.layers), False, step, 0, 0) for step in steps)
        if draft := next((d for d in everything if d.peak <= budget), None):
            return draft.plan(budget, least, calibration)
    enough = [s for s in steps if s <= ENOUGH_STEP] or steps
    pooled: Plan | None = None
    if resident is None and experts != 0 and False in heads and not size.on_disk:
        rings = [slots] if slots else SLOTS
        pooled = expert_plan(size, budget, least, rings=rings, steps=enough, slots=experts, calibration=calibration)
    if experts:
        return _asked_for(pooled, size, budget, least, experts)
    found: Plan | None = None
    for head in heads:
        best: Plan | None = None
        for step, ring, unit in product(enough, [slots] if slots else SLOTS, units):
            if draft := search.first(counts, head, step, ring, unit, budget):
                plan = (draft.fill(budget) if resident is None else draft).plan(budget, least, calibration)
                if best is None or plan.run_s < best.run_s * WORTH:
                    best = plan
        if best is not None and best.streams and slots is None and resident is None:
            for ring, unit in product(DEEPER, units):
                if draft := search.first(counts, head, best.prefill_step, ring, unit, budget):
                    plan = draft.fill(budget).plan(budget, least, calibration)
                    if plan.run_s < best.run_s * WORTH:
                        best = plan
        if pooled is not None and (best is None or pooled.run_s < best.run_s * WORTH):
            best = pooled
        if best is not None and (found is None or best.run_s < found.run_s * WORTH):
            found = best
        if found is not None and not found.split:
            break
        # Layers in parts wait for each other: memory that the head takes may be worth more to them.
    if found is not None:
        return _with_larger_step(size, found, steps)
    what = f" with {counted(resident, 'resident layer')}" if resident else ""
    raise BudgetError(
        f"a budget of {format_size(budget)} is too small for this model{what} and a context of {size.context} "
        f"tokens: the smallest that works is {format_size(least, round_up=True)}{too_large(size)}",
        least,
    )


def _asked_for(plan: Plan | None, size: ModelSize, budget: int, least: int, experts: int) -> Plan:
    most = max(layer.experts.count for layer in size.layers if layer.experts is not None)
    if experts > most:
        raise UsageError(f"--experts {experts}: a layer of this model has {most}")
    if plan is not None:
        return plan
    raise BudgetError(
        f"a budget of {format_size(budget)} is too small for {counted(experts, 'expert')} of each layer beside all "
        f"else of this model, and a context of {size.context} tokens: the smallest that works is "
        f"{format_size(least, round_up=True)}; or give fewer (--experts)",
        least,
    )


def _with_larger_step(size: ModelSize, plan: Plan, steps: Sequence[int]) -> Plan:
    """The plan with a larger chunk of a prompt, if what could not be used otherwise has room for one."""
    between = held_between(size.layers, plan.parts)
    for step in (s for s in steps if s > plan.prefill_step):
        more = size.activations(step, between) - size.activations(plan.prefill_step, between)
        if more <= plan.budget_bytes - plan.peak_bytes:
            return replace(plan, prefill_step=step, activation_bytes=plan.activation_bytes + more)
    return plan


def smallest_budget(size: ModelSize, **fixed: Unpack[Fixed]) -> int:
    """The smallest budget in bytes that ``make_plan`` takes; arguments and errors as there."""
    return min(_smallest_budget(each, **fixed) for each in _with_disk(size, fixed.get("experts")))


@lru_cache(maxsize=32)
def _smallest_budget(
    size: ModelSize,
    *,
    slots: int | None = None,
    resident: int | None = None,
    prefill_step: int | None = None,
    head_resident: bool | None = None,
    placement: str = "even",
    experts: int | None = None,
) -> int:
    """As ``smallest_budget``, with keys and values where ``size`` says. Every budget of a curve asks for it."""
    _check(size, slots, resident, prefill_step, placement)
    step = prefill_step or _thriftiest_step(size)
    if experts and resident is None:
        rings = [slots] if slots else SLOTS
        if (pooled := smallest_pooled(size, rings=rings, step=step, slots=experts)) is not None:
            return pooled
    counts = range(len(size.layers) + 1) if resident is None else [resident]
    search = Search(size, lambda count: place(size, count, placement))
    return min(
        search.smallest(counts, head, step, slots or SLOTS[-1], unit)
        for head in _heads(size, head_resident)
        for unit in unit_sizes(size.layers, size.most_unit)
    )


def too_large(size: ModelSize) -> str:
    """For the end of a refusal: that layers have to stay in memory for want of slots that are large enough; empty if
    none has to."""
    needed = [n for n in map(smallest_slot, size.layers) if n > size.most_unit]
    if not needed:
        return ""
    return (
        f" ({len(needed)} of {len(size.layers)} layers stay in memory: streaming one takes a slot of "
        f"{format_size(max(needed), round_up=True)}, and this device's hold {format_size(size.most_unit)} at most)"
    )


def _heads(size: ModelSize, head_resident: bool | None) -> list[bool]:
    """Whether the head may be streamed: what is looked at first, first."""
    if size.head is None or head_resident:
        return [False]
    return [True] if head_resident is False else [False, True]


def _check(size: ModelSize, slots: int | None, resident: int | None, prefill_step: int | None, placement: str) -> None:
    if slots is not None and slots < 2:
        raise UsageError(f"--slots {slots}: at least 2 are needed, one to compute from and one to read into")
    if resident is not None and not 0 <= resident <= len(size.layers):
        raise UsageError(f"--resident {resident}: this model has {len(size.layers)} layers")
    if prefill_step is not None and prefill_step < 1:
        raise UsageError(f"--prefill-step-size {prefill_step}: at least 1 token")
    if placement not in PLACEMENTS:
        raise UsageError(f"placement {placement}: choose one of {', '.join(PLACEMENTS)}")


def replan(size: ModelSize, plan: Plan, resident: Iterable[int], calibration: Calibration) -> Plan:
    """The plan with other layers resident, the ring as it is; for a model that may have grown."""
    made = _redrafted(size, plan, resident)
    if plan.pools:
        return with_pools(size, made, plan.pools, calibration)
    return predict(size, made, calibration)


def replanned_bytes(size: ModelSize, plan: Plan, resident: Iterable[int]) -> int:
    """The peak of ``replan``'s plan, without simulating what it takes."""
    return _redrafted(size, plan, resident).peak_bytes


def _redrafted(size: ModelSize, plan: Plan, resident: Iterable[int]) -> Plan:
    stay = frozenset(resident)
    kept = tuple((i, pieces) for i, pieces in plan.kept if i not in stay)
    draft = Candidate(size, stay, plan.head_streamed, plan.prefill_step, plan.slots, plan.unit_bytes, kept)
    bare = replace(draft.bare, unit_bytes=plan.unit_bytes) if plan.slots else draft.bare
    return replace(
        bare,
        budget_bytes=plan.budget_bytes,
        smallest_budget_bytes=plan.smallest_budget_bytes,
        pools=plan.pools,
        pool_bytes=plan.pool_bytes,
        experts=plan.experts,
    )


def resident_budget(size: ModelSize) -> int:
    """The smallest budget in bytes with which everything stays resident."""
    return Candidate(size, frozenset(range(len(size.layers))), False, _thriftiest_step(size), 0, 0).peak


def _thriftiest_step(size: ModelSize) -> int:
    """The chunk of a prompt that takes the least memory: the smallest, but where each pass holds something for later
    layers."""
    return min(reversed(prefill_steps(size.prompt)), key=size.activations)


def prefill_steps(prompt: int) -> list[int]:
    """Chunks that a prompt may be cut into, in tokens, largest first."""
    step, smallest = min(PREFILL_STEP, prompt), min(SMALLEST_STEP, prompt)
    steps = []
    while step > smallest:
        steps.append(step)
        step //= 2
    return [*steps, smallest]


def place(size: ModelSize, count: int, placement: str = "even") -> list[int]:
    """Which ``count`` layers stay resident; at least those that cannot be streamed."""
    fixed = [i for i, layer in enumerate(size.layers) if not layer.streamable]
    free = [i for i, layer in enumerate(size.layers) if layer.streamable]
    wanted = max(0, count - len(fixed))
    if placement == "first":
        chosen = list(range(wanted))
    elif placement == "last":
        chosen = list(range(len(free) - wanted, len(free)))
    elif placement == "interleaved":
        chosen = [*range(1, len(free), 2), *range(0, len(free), 2)][:wanted]
    else:
        chosen = spread(wanted, len(free))
    return sorted([*fixed, *(free[i] for i in chosen)])


def thin(layers: Sequence[int], count: int) -> list[int]:
    """``count`` of these layers, as evenly spread among them as whole numbers allow."""
    return [layers[i] for i in spread(min(count, len(layers)), len(layers))]


def farthest(layers: Sequence[int], others: Sequence[int], count: int, of: int) -> list[int]:
    """``count`` of these layers, one after the other the one that is farthest from ``others`` and those before it.

    Sweeps follow each other: the first of ``of`` layers comes after the last.
    """
    there, left, found = list(others), list(layers), []
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda i: min((min(abs(i - j), of - abs(i - j)) for j in there), default=of))
        left.remove(best)
        there.append(best)
        found.append(best)
    return sorted(found)
