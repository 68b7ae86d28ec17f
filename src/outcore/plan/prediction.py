"""Predicts a plan's seconds by simulating the ring on a calibrated machine.

The result is not the larger of reading and computing: a read needs a free slot, and a slot is free only once its unit
has been computed. Units of different sizes, and resident layers between them, make one wait for the other.
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
    """Makes plans that read experts one by one (``expert_plan.OnDemand``)."""

    def best(
        self,
        size: ModelSize,
        budget: int,
        least: int,
        *,
        heads: Sequence[bool],
        rings: Sequence[int],
        steps: Sequence[int],
        slots: int | None,
        calibration: Calibration,
    ) -> Plan | None:
        """Returns the plan that reads least for a token; None if none fits."""

    def smallest(
        self, size: ModelSize, *, heads: Sequence[bool], rings: Sequence[int], step: int, slots: int | None
    ) -> int | None:
        """Returns the smallest budget in bytes for ``slots`` cached experts per layer; None if there is none."""

    def with_pools(
        self, size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration
    ) -> Plan:
        """Returns the plan with these expert cache sizes, by layer."""

    def reads(self, plan: Plan, size: ModelSize, tokens: int) -> bool:
        """Whether a pass over so many tokens reads only the experts that it uses; else it reads all."""

    def turns(self, size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
        """Returns the turns of a pass with one token of every sequence."""


def predict(size: ModelSize, plan: Plan, calibration: Calibration) -> Plan:
    """Returns the plan with its predicted seconds."""
    if size.on_demand is not None and size.on_demand.reads(plan, size, size.sequences):
        token_s = sum(turn.compute_s for turn in size.on_demand.turns(size, plan, calibration))
    else:
        token_s = _timing(size, plan, calibration, [(size.sequences, 1)], size.context).sweep_s
    whole, rest = divmod(max(0, min(size.prompt, size.in_reading(plan.prefill_step)) - 1), plan.prefill_step)
    passes: Passes = [(plan.prefill_step, whole), (rest, 1 if rest else 0), (1, 1)]  # chunks, then the last token alone
    prompt = _timing(size, plan, calibration, passes, size.prompt)
    ttft_s = prompt.first_s + size.further_readings(plan.prefill_step) * prompt.sweep_s
    known = calibration.seconds(size.rest_kind, 1) is not None
    return replace(plan, token_s=token_s, ttft_s=ttft_s, calibrated=calibration.measured and known)


def sweep_s(size: ModelSize, plan: Plan, calibration: Calibration, tokens: int, blocks: bool, texts: int = 1) -> float:
    """Returns seconds of passes that share one reading of the weights, over ``tokens`` of each of ``texts`` texts.

    Args:
        blocks: whether a text's tokens are one pass; otherwise each token is a pass.
    """
    passes = [(tokens, texts)] if blocks else [(1, tokens * texts)]
    return _timing(size, plan, calibration, passes, size.context).sweep_s


# Share of a pass, divided by the square of the number of slots, that is lost to slow single reads and layers if reading
# and computing take equally long (``llama-4gb``: 1.20 times the time with two slots, 1.09 with three, 1.05 with four).
# Nothing is lost if one takes half as long as the other (simulated, times varying by up to .8).
UNEVEN = 0.8

# Tokens per pass, and the number of such passes: long prompts have thousands.
Passes = Sequence[tuple[int, int]]


class Turn(NamedTuple):
    """One step of a pass, as seconds of computing and of reading before it (0: resident). ``layer``: its layer; None:
    everything after the last layer."""

    compute_s: float
    read_s: float = 0.0
    layer: int | None = None


def _timing(size: ModelSize, plan: Plan, calibration: Calibration, passes: Passes, kept: int) -> Timing:
    """Simulates passes that share one reading. ``kept``: tokens whose offloaded keys and values are read or written."""
    turns, slots = turns_of(size, plan, calibration, passes, kept), max(plan.slots, 2)
    timing = simulate(turns, slots)
    less, more = sorted([sum([t.read_s for t in turns]), sum([t.compute_s for t in turns])])
    apart = more - less if calibration.measured else 0.0  # assumed rates do not say which of the two takes longer
    lost = max(0.0, UNEVEN / slots**2 * more - apart / 2) if less else 0.0
    return timing._replace(sweep_s=timing.sweep_s + lost)


def turns_of(size: ModelSize, plan: Plan, calibration: Calibration, passes: Passes, kept: int) -> list[Turn]:
    """Returns, in order, the turns of passes that share one reading. Arguments as of ``_timing``."""
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
            # Decoding happens once for all passes, and was done before for resident pieces. Weights are decoded and
            # cast about as fast as they are computed with.
            share = total / layer.read if layer.read else 1.0
            decoding = calibration.decode_gbps or calibration.weight_gbps
            compute += round(layer.decoded * share) / decoding / 1e9
            compute += share * (layer.joined + layer.to_cast) / calibration.weight_gbps / 1e9
        # Offloaded KV is read with the layer's first part; a prompt's is written as fast.
        text = size.kv_read(i, kept) if size.on_disk else 0
        for part in mine:
            share = part.read / total if total else 1 / len(mine)
            turns.append(Turn(compute * share + calibration.sync_s, (part.read + text) / rate, i))
            text = 0
    head = size.head if plan.head_streamed else None
    outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
    # Only a prompt's last token gets logits.
    rest = computing_s(size.rest_kind, outside + (head.resident if head is not None else 0), calibration, passes[-1:])
    if plan.streams and size.tables:
        rest += calibration.read_latency_s
    if head is None:
        return [*turns, Turn(rest)]
    slices = max(1, -(-head.read // max(plan.shared_at if plan.pools else plan.unit_bytes, 1)))
    each = rest / slices + calibration.sync_s
    return turns + [Turn(each, head.read // slices / rate)] * slices


def computing_s(kind: str, nbytes: int, calibration: Calibration, passes: Passes) -> float:
    """Returns seconds of passes over a layer; estimated from its bytes where its kind was not measured."""
    seconds = 0.0
    for tokens, times in passes:
        known = calibration.seconds(kind, tokens) if times else 0.0
        guess = nbytes / calibration.weight_gbps / 1e9 * max(1.0, tokens / 32)
        seconds += times * (known if known is not None else guess)
    return seconds


# Passes simulated until the ring is steady, after those that the initially full slots cover.
BEFORE = 3


class Timing(NamedTuple):
    """Seconds of a pass in the steady state, and of the first one, which starts with full slots."""

    sweep_s: float
    first_s: float


def simulate(turns: Sequence[Turn], slots: int) -> Timing:
    """Simulates passes through a ring of ``slots`` slots until it is steady.

    Reads follow each other at the disk's rate, and computing follows in order. A slot is free once its unit is
    computed.
    """
    reads = [s.read_s for s in turns if s.read_s > 0]
    if not reads:
        total = sum([s.compute_s for s in turns])
        return Timing(total, total)
    # The ring starts full, so the first read is for the unit ``slots`` later.
    coming = islice(cycle(reads), slots, None)
    ready = deque([0.0] * slots)  # when each slot has been read into, in the order of units
    device = disk = 0.0  # when each becomes free
    marks = []
    for _ in range(BEFORE + slots // len(reads)):
        for compute_s, read_s, _ in turns:  # without ``max``, which takes half of it: a load simulates 50 times
            if read_s > 0:
                filled = ready.popleft()
                device = (filled if filled > device else device) + compute_s
                disk = (device if device > disk else disk) + next(coming)
                ready.append(disk)
            else:
                device += compute_s
        marks.append(device)
    # Initially full slots last for many passes where reading takes hardly longer than computing.
    return Timing(max(marks[-1] - marks[-2], sum(reads)), marks[0])
