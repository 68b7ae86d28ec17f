"""The seconds that a plan takes: a simulated ring on a calibrated machine.

The ring is not a maximum of reading and computing: a unit can be read only when a slot is free, and a slot is free only
when what was read into it has been computed. Where units differ in size, or residents lie between them, one waits for
the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import StreamedPart
from .plan import Plan


class ExpertPlans(Protocol):
    """Plans that keep all but routed experts in memory, and read those one by one (``expert_plan.OnDemand``)."""

    def best(
        self,
        size: ModelSize,
        budget: int,
        least: int,
        *,
        rings: Sequence[int],
        steps: Sequence[int],
        slots: int | None,
        calibration: Calibration,
    ) -> Plan | None:
        """The fastest one; None where the budget has no room."""

    def smallest(self, size: ModelSize, *, rings: Sequence[int], step: int, slots: int) -> int | None:
        """The smallest budget in bytes with so many slots for each layer's experts; None: there is none."""

    def with_pools(
        self, size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration
    ) -> Plan:
        """The plan with so many slots for experts of these layers."""

    def reads(self, plan: Plan, size: ModelSize, tokens: int) -> bool:
        """Whether a forward pass over so many tokens reads the experts that it uses; else all of them."""

    def turns(self, size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
        """What a token of every sequence is made of then."""


def predict(size: ModelSize, plan: Plan, calibration: Calibration) -> Plan:
    """The plan with the seconds that it will take on a calibrated machine."""
    if size.on_demand is not None and size.on_demand.reads(plan, size, size.sequences):
        token_s = sum(turn.compute_s for turn in size.on_demand.turns(size, plan, calibration))
    else:
        token_s = _timing(size, plan, calibration, [(size.sequences, 1)], size.context).sweep_s
    prompt = _timing(size, plan, calibration, _passes(size.prompt, plan.prefill_step), size.prompt)
    known = calibration.seconds(size.rest_kind, 1) is not None
    return replace(plan, token_s=token_s, ttft_s=prompt.first_s, calibrated=calibration.measured and known)


def sweep_s(size: ModelSize, plan: Plan, calibration: Calibration, tokens: int, blocks: bool, texts: int = 1) -> float:
    """Seconds of a sweep over so many tokens of each text, in one pass for each text or in one for each token; of one
    token of one text what ``predict`` says."""
    passes = [(tokens, texts)] if blocks else [(1, tokens * texts)]
    return _timing(size, plan, calibration, passes, size.context).sweep_s


UNEVEN = 0.8
"""Where reading and computing take equally long, so much of a sweep, over the square of the slots, is lost by single
reads and layers that take longer than others of their size (``llama-4gb``: 1.20 with two slots, 1.09 with three,
1.05 with four). Nothing is lost where one takes half as long as the other (simulated, times varying by up to .8)."""

Passes = Sequence[tuple[int, int]]
"""Tokens of a pass over the model, and how many such passes there are: long prompts have thousands."""


def _passes(prompt: int, step: int) -> Passes:
    """The passes of a prompt: chunks, and the last token by itself."""
    whole, rest = divmod(max(0, prompt - 1), step)
    return [(step, whole), (rest, 1 if rest else 0), (1, 1)]


class Turn(NamedTuple):
    """What is computed of one layer at one go, or of what lies behind all of them (None). Seconds of computing, and of
    reading before that (0: it is in memory)."""

    compute_s: float
    read_s: float = 0.0
    layer: int | None = None


def _timing(size: ModelSize, plan: Plan, calibration: Calibration, passes: Passes, kept: int) -> Timing:
    """``kept``: tokens whose keys and values are read or written, where they lie on disk."""
    turns, slots = turns_of(size, plan, calibration, passes, kept), max(plan.slots, 2)
    timing = simulate(turns, slots)
    less, more = sorted([sum([t.read_s for t in turns]), sum([t.compute_s for t in turns])])
    lost = max(0.0, UNEVEN / slots**2 * more - (more - less) / 2) if less else 0.0
    return timing._replace(sweep_s=timing.sweep_s + lost)


def turns_of(size: ModelSize, plan: Plan, calibration: Calibration, passes: Passes, kept: int) -> list[Turn]:
    """What a sweep is made of, in order. Arguments as of ``_timing``."""
    parts: dict[int, list[StreamedPart]] = {}
    for part in plan.parts:
        parts.setdefault(part.layer, []).append(part)
    rate, computing = calibration.read_gbps * 1e9, dict[tuple[str, int], float]()
    turns: list[Turn] = []
    for i, layer in enumerate(size.layers):
        key = layer.kind, layer.joined or layer.resident
        if key not in computing:
            computing[key] = computing_s(*key, calibration, passes)
        compute, mine = computing[key], parts.get(i)
        if mine is None:
            turns.append(Turn(compute, layer=i))
            continue
        total = sum(map(attrgetter("read"), mine))
        if layer.joined or layer.decoded or layer.to_cast:
            # Once for all passes; of pieces that stay in memory it was done before. Codes are put together, and weights
            # brought to another dtype, about as fast as weights are computed with.
            share = total / layer.read if layer.read else 1.0
            compute += calibration.decode_s(round(layer.decoded * share))
            compute += share * (layer.joined + layer.to_cast) / calibration.weight_gbps / 1e9
        # What lies on disk of the text comes with the layer's first part; of a prompt it is written, as fast.
        text = size.kv_read(i, kept) if size.on_disk else 0
        for part in mine:
            share = part.read / total if total else 1 / len(mine)
            turns.append(Turn(compute * share + calibration.sync_s, (part.read + text) / rate, i))
            text = 0
    head = size.head if plan.head_streamed else None
    outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
    # Of a prompt only the last token gets logits.
    rest = computing_s(size.rest_kind, outside + (head.resident if head is not None else 0), calibration, passes[-1:])
    if plan.streams and size.tables:
        rest += calibration.read_latency_s
    if head is None:
        return [*turns, Turn(rest)]
    slices = max(1, -(-head.read // max(plan.unit_bytes, 1)))
    each = rest / slices + calibration.sync_s
    return turns + [Turn(each, head.read // slices / rate)] * slices


def computing_s(kind: str, nbytes: int, calibration: Calibration, passes: Passes) -> float:
    """Seconds of some passes over a layer, or what is not a layer; a guess by its bytes where it was not measured."""
    seconds = 0.0
    for tokens, times in passes:
        known = calibration.seconds(kind, tokens) if times else 0.0
        guess = nbytes / calibration.weight_gbps / 1e9 * max(1.0, tokens / 32)
        seconds += times * (known if known is not None else guess)
    return seconds


BEFORE = 3
"""Sweeps that are simulated after those that full slots hold already, until the ring is in step."""


class Timing(NamedTuple):
    """Seconds of one sweep in the steady state, and of the first one, which starts with its slots full."""

    sweep_s: float
    first_s: float


def simulate(turns: Sequence[Turn], slots: int) -> Timing:
    """Run the turns of one sweep, in order, again and again through a ring of ``slots`` slots.

    Reads follow each other at the disk's rate, computing follows in order. A slot is free again when its unit has been
    computed.
    """
    reads = [s.read_s for s in turns if s.read_s > 0]
    if not reads:
        total = sum([s.compute_s for s in turns])
        return Timing(total, total)
    # The ring is full in the beginning: the first read is of what comes so many units later.
    coming = islice(cycle(reads), slots, None)
    ready = deque([0.0] * slots)  # when each slot has been read into, in the order of units
    device = disk = 0.0  # when they are free
    marks = []
    for _ in range(BEFORE + slots // len(reads)):
        for turn in turns:
            if turn.read_s > 0:
                device = max(device, ready.popleft()) + turn.compute_s
                disk = max(disk, device) + next(coming)
                ready.append(disk)
            else:
                device += turn.compute_s
        marks.append(device)
    # Slots that were full at first may take many sweeps to run dry where reading takes hardly longer than computing.
    return Timing(max(marks[-1] - marks[-2], sum(reads)), marks[0])
