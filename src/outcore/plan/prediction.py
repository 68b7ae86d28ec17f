"""The seconds that a plan takes: a simulated ring, or waits for routers and what they miss, on a calibrated machine.

The ring is not a maximum of reading and computing: a unit can be read only when a slot is free, and a slot is free only
when what was read into it has been computed. Where units differ in size, or residents lie between them, one waits for
the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from operator import attrgetter

from .draft_cost import Draft
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import LayerSize, StreamedPart
from .plan import Plan


def predict(size: ModelSize, plan: Plan, calibration: Calibration) -> Plan:
    """The plan with the seconds that it will take on a calibrated machine."""
    if plan.goes_to_pools(size, size.sequences):
        token_s = sum(turn.compute_s for turn in pooled_turns(size, plan, calibration))
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


def guess_s(size: ModelSize, draft: Draft, calibration: Calibration) -> float:
    """Seconds in which a draft that is in memory computes a token: a copy of the model takes as long as the model
    itself where all of it stays."""
    outside = size.non_layer - size.tables
    if draft.bits is None:
        # Another model's weights are all there are; a multi-token-prediction head goes on to the model's own.
        own = _compute(size.rest_kind, outside - draft.weights, calibration, [(1, 1)]) if draft.uses_head else 0.0
        return draft.weights / calibration.weight_gbps / 1e9 + own + calibration.sync_s
    layers = sum(_compute(x.kind, x.joined or x.resident, calibration, [(1, 1)]) for x in size.layers)
    return layers + _compute(size.rest_kind, outside, calibration, [(1, 1)]) + calibration.sync_s


FORESEEN = 0.55
"""Of the experts that are missing, those that the layer before asks for, where there is time to read them (56 to 65 %
of code and prose with py-qwen35moe-30m, a quarter and a half of the experts in memory)."""


def pooled_turns(size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
    """What a token of every sequence is made of where experts are read one by one: computing, a wait for each router,
    and what is missing then and was not read while the layer before was computed."""
    passes = [(size.sequences, 1)]
    head = size.head if plan.head_streamed else None
    outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
    rest = _compute(size.rest_kind, outside, calibration, passes)
    rest += calibration.read_latency_s if size.tables else 0.0
    slots = dict(plan.pools)
    turns = []
    for i, layer in enumerate(size.layers):
        experts = layer.experts
        compute = seconds = _compute(layer.kind, active_bytes(layer), calibration, passes)
        if i in slots and experts is not None:
            missing = experts.missing(slots[i], size.sequences)
            reading = missing * experts.read / calibration.read_gbps / 1e9
            groups = -(-min(experts.count, experts.used * size.sequences) // slots[i])
            if groups > 1:
                # One after the other, each read, waited for and computed with for all tokens; nothing is foreseen.
                share = experts.used * experts.resident / active_bytes(layer)
                seconds += (groups - 1) * (compute * share + calibration.sync_s + calibration.read_latency_s)
            else:
                reading -= min(FORESEEN * reading, compute)
            seconds += calibration.sync_s + min(1.0, missing) * calibration.read_latency_s + reading
        turns.append(Turn(i, seconds))
    return [*turns, Turn(None, rest)]


def active_bytes(layer: LayerSize) -> int:
    """Bytes of a layer's weights that one token is computed with."""
    experts = layer.experts
    if experts is None:
        return layer.resident
    return layer.resident - (experts.count - experts.used) * experts.resident


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


@dataclass(frozen=True)
class Turn:
    """What is computed of one layer at one go, or of what lies behind all of them (None). Seconds of computing, and of
    reading before that (0: it is in memory)."""

    layer: int | None
    compute_s: float
    read_s: float = 0.0


def _timing(size: ModelSize, plan: Plan, calibration: Calibration, passes: Passes, kept: int) -> Timing:
    """``kept``: tokens whose keys and values are read or written, where they lie on disk."""
    stages: list[Stage] = []
    pending = 0.0  # of resident layers: on the device's queue with what follows
    for turn in turns_of(size, plan, calibration, passes, kept):
        if turn.layer is not None and not turn.read_s:
            pending += turn.compute_s
            continue
        if turn.read_s and pending:
            stages.append(Stage(pending))
            pending = 0.0
        stages.append(Stage(pending + turn.compute_s, turn.read_s))
        pending = 0.0
    if pending:
        stages.append(Stage(pending))
    slots = max(plan.slots, 2)
    timing = simulate(stages, slots)
    less, more = sorted([sum([s.read_s for s in stages]), sum([s.compute_s for s in stages])])
    lost = max(0.0, UNEVEN / slots**2 * more - (more - less) / 2) if less else 0.0
    return replace(timing, sweep_s=timing.sweep_s + lost)


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
            computing[key] = _compute(*key, calibration, passes)
        compute, mine = computing[key], parts.get(i)
        if mine is None:
            turns.append(Turn(i, compute))
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
            turns.append(Turn(i, compute * share + calibration.sync_s, (part.read + text) / rate))
            text = 0
    head = size.head if plan.head_streamed else None
    outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
    # Of a prompt only the last token gets logits.
    rest = _compute(size.rest_kind, outside + (head.resident if head is not None else 0), calibration, passes[-1:])
    if plan.streams and size.tables:
        rest += calibration.read_latency_s
    if head is None:
        return [*turns, Turn(None, rest)]
    slices = max(1, -(-head.read // max(plan.unit_bytes, 1)))
    each = rest / slices + calibration.sync_s
    return turns + [Turn(None, each, head.read // slices / rate)] * slices


def _compute(kind: str, nbytes: int, calibration: Calibration, passes: Passes) -> float:
    """Seconds of some passes over a layer, or what is not a layer; a guess by its bytes where it was not measured."""
    seconds = 0.0
    for tokens, times in passes:
        known = calibration.seconds(kind, tokens) if times else 0.0
        guess = nbytes / calibration.weight_gbps / 1e9 * max(1.0, tokens / 32)
        seconds += times * (known if known is not None else guess)
    return seconds


BEFORE = 3
"""Sweeps that are simulated after those that full slots hold already, until the ring is in step."""


@dataclass(frozen=True)
class Stage:
    """What the device computes at one go: seconds of computing, and of reading before that (0: it is in memory)."""

    compute_s: float
    read_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Seconds of one sweep in the steady state, and of the first one, which starts with its slots full."""

    sweep_s: float
    first_s: float


def simulate(stages: Sequence[Stage], slots: int) -> Timing:
    """Run ``stages``, of one sweep in order, again and again through a ring of ``slots`` slots.

    Reads follow each other at the disk's rate, computing follows in order. A slot is free again when its unit has been
    computed.
    """
    reads = [s.read_s for s in stages if s.read_s > 0]
    if not reads:
        total = sum([s.compute_s for s in stages])
        return Timing(total, total)
    # The ring is full in the beginning: the first read is of what comes so many units later.
    coming = islice(cycle(reads), slots, None)
    ready = deque([0.0] * slots)  # when each slot has been read into, in the order of units
    device = disk = 0.0  # when they are free
    marks = []
    for _ in range(BEFORE + slots // len(reads)):
        for stage in stages:
            if stage.read_s > 0:
                device = max(device, ready.popleft()) + stage.compute_s
                disk = max(disk, device) + next(coming)
                ready.append(disk)
            else:
                device += stage.compute_s
        marks.append(device)
    # Slots that were full at first may take many sweeps to run dry where reading takes hardly longer than computing.
    return Timing(max(marks[-1] - marks[-2], sum(reads)), marks[0])
