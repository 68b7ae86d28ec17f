"""What a model that lies on several ranks takes: each rank tells what it does in a sweep, and all foresee the same.

Plain numbers, so that they go from rank to rank as JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.prediction import Turn, turns_of

from .timing import LinkTimes, RankStage, RankTiming, rank_timing

BEHIND = -1
"""In place of a layer: what lies behind all of them."""

SIMULATED = 96
"""Chunks of a prompt that are simulated; those beyond take as long as the last of these."""


@dataclass(frozen=True)
class PromptPasses:
    """The passes of a prompt: so many whole chunks of ``step`` tokens, one of the rest, and the last token alone."""

    step: int
    whole: int
    rest: int

    @classmethod
    def of(cls, prompt: int, step: int) -> PromptPasses:
        """As prompts are computed."""
        whole, rest = divmod(max(0, prompt - 1), step)
        return cls(step, whole, rest)

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Of each kind of pass."""
        return self.step, self.rest, 1

    def counted(self, whole: int) -> list[int]:
        """Which kind each pass is, with so many whole chunks."""
        return [0] * whole + [1] * (self.rest > 0) + [2]


@dataclass(frozen=True)
class RankPart:
    """What one rank has and does; bytes, seconds, GB/s.

    Attributes:
        layers: it has, of which ``resident`` stay in memory. ``slots``: of its ring.
        token: of a sweep for a token, in order: a layer's place in the order of calls, computing, reading before that.
        prompt: the same of a prompt's sweep, with computing for each kind of pass.
        sync_s: what it costs to wait for what is sent, where nothing is read.
        calibrated: its numbers rest on measurements.
        notes: what else there is to say of it.
    """

    host: str
    layers: int
    resident: int
    slots: int
    bytes_per_token: int
    peak_bytes: int
    budget_bytes: int
    read_gbps: float
    sync_s: float
    calibrated: bool
    token: tuple[tuple[int, float, float], ...]
    prompt: tuple[tuple[int, tuple[float, float, float], float], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def told(cls, values: Mapping[str, Any]) -> RankPart:
        """Back from JSON."""
        token = tuple((int(place), float(c), float(r)) for place, c, r in values["token"])
        prompt = tuple((int(place), (c[0], c[1], c[2]), float(r)) for place, c, r in values["prompt"])
        return cls(**{**values, "token": token, "prompt": prompt, "notes": tuple(values["notes"])})


@dataclass(frozen=True)
class RanksPlan:
    """What all ranks together take.

    Attributes:
        parts: of each rank.
        token_s, ttft_s: predicted seconds for a token (of every sequence), and from a prompt of ``prompt`` tokens to
            the first one, when nothing has been read yet.
        link: as it was measured.
        step: tokens of the prompt's chunks.
    """

    parts: tuple[RankPart, ...]
    token_s: float
    ttft_s: float
    prompt: int
    link: LinkTimes
    step: int

    @property
    def calibrated(self) -> bool:
        """Whether all ranks were."""
        return all(part.calibrated for part in self.parts)

    @property
    def line(self) -> str:
        """In words."""
        layers = ", ".join(f"{part.layers} on {part.host}" for part in self.parts)
        in_words = f", {self.layout}" if self.layout else ""
        how = "Predicted" if self.calibrated else "Assumed, not measured (outcore launch ... -- plan does)"
        return (
            f"{len(self.parts)} machines share the layers{in_words}: {layers}. {how}: {1 / self.token_s:.3g} tokens a "
            f"second, {self.ttft_s:.3g} s to the first"
        )

    @property
    def layout(self) -> str:
        """How layers lie: ``in turn``, or ``in blocks``, each rank's one after the other; empty where one has all."""
        turns = [(place, rank) for rank, part in enumerate(self.parts) for place, _, _ in part.token]
        owners = [rank for place, rank in sorted(set(turns)) if place != BEHIND]
        blocks = [rank for rank, _ in itertools.groupby(owners)]
        if len(blocks) < 2:
            return ""
        return "in blocks" if len(blocks) == len(set(blocks)) else "in turn"

    @property
    def hosts_shared(self) -> dict[str, list[int]]:
        """Hosts that have several ranks, and these."""
        found: dict[str, list[int]] = {}
        for rank, part in enumerate(self.parts):
            found.setdefault(part.host, []).append(rank)
        return {host: ranks for host, ranks in found.items() if len(ranks) > 1}

    def record(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {k: v for k, v in asdict(part).items() if k not in ("token", "prompt", "sync_s")} for part in self.parts
        ]
        return {
            "predicted_token_s": self.token_s,
            "predicted_ttft_s": self.ttft_s,
            "prompt": self.prompt,
            "prefill_step": self.step,
            "calibrated": self.calibrated,
            "latency_s": self.link.latency_s,
            "link_bytes_per_s": self.link.rate,
            "layout": self.layout or None,
            "ranks": rows,
        }


def token_turns(size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
    """What a rank's sweep for a token of every sequence is made of, in order, and what lies behind all layers."""
    if size.on_demand is not None and size.on_demand.reads(plan, size, size.sequences):
        return size.on_demand.turns(size, plan, calibration)
    return turns_of(size, plan, calibration, [(size.sequences, 1)], size.context)


def rank_part(
    size: ModelSize,
    plan: Plan,
    calibration: Calibration,
    places: Sequence[int],
    passes: PromptPasses,
    host: str,
    *,
    first: bool,
    notes: tuple[str, ...] = (),
) -> RankPart:
    """What this rank tells the others.

    Args:
        size, plan: of what it holds. ``places``: of its layers, in the order of calls of the whole model.
        passes: of a prompt, the same on all ranks.
        first: it has the head.
    """
    token = token_turns(size, plan, calibration)
    kinds = [turns_of(size, plan, calibration, [(max(1, n), 1)], size.prompt) for n in passes.tokens]

    def place(turn: Turn) -> int:
        return BEHIND if turn.layer is None else places[turn.layer]

    def mine(turn: Turn) -> bool:
        return first or turn.layer is not None

    return RankPart(
        host=host,
        layers=len(size.layers),
        resident=len(plan.resident),
        slots=max(plan.slots, 2),
        bytes_per_token=plan.bytes_per_token,
        peak_bytes=plan.peak_bytes,
        budget_bytes=plan.budget_bytes,
        read_gbps=calibration.read_gbps,
        sync_s=calibration.sync_s,
        calibrated=plan.calibrated,
        token=tuple((place(t), t.compute_s, t.read_s) for t in token if mine(t)),
        prompt=tuple(
            # Of a prompt only the last token gets logits.
            (place(a), (a.compute_s, b.compute_s, c.compute_s) if place(a) != BEHIND else (0, 0, c.compute_s), a.read_s)
            for a, b, c in zip(*kinds, strict=True)
            if mine(a)
        ),
        notes=notes,
    )


def ranks_plan(
    parts: Sequence[RankPart], passes: PromptPasses, prompt: int, sent: Sequence[int], sequences: int, link: LinkTimes
) -> RanksPlan:
    """What they take together.

    Args:
        sent: bytes that each layer puts out for one token, in the order of calls, where they go to another rank.
        sequences: that share a sweep for a token.
    """
    token = _timing(parts, [[(p, (c,), r) for p, c, r in part.token] for part in parts], sent, link, (sequences,))

    def first_s(whole: int) -> float:
        kinds = passes.counted(whole)
        turns = [[(p, tuple(c[kind] for kind in kinds), r) for p, c, r in part.prompt] for part in parts]
        return _timing(parts, turns, sent, link, tuple(passes.tokens[kind] for kind in kinds)).first_s

    ttft = first_s(min(passes.whole, SIMULATED))
    if passes.whole > SIMULATED:
        each = (ttft - first_s(SIMULATED // 2)) / (SIMULATED - SIMULATED // 2)
        ttft += each * (passes.whole - SIMULATED)
    return RanksPlan(tuple(parts), token.sweep_s, ttft, prompt, link, passes.step)


def _timing(
    parts: Sequence[RankPart],
    turns: Sequence[Sequence[tuple[int, tuple[float, ...], float]]],
    sent: Sequence[int],
    link: LinkTimes,
    tokens: tuple[int, ...],
) -> RankTiming:
    """``turns``: of each rank. ``tokens``: of each pass."""
    found: list[tuple[int, RankStage]] = []
    for rank, mine in enumerate(turns):
        for place, compute_s, read_s in mine:
            at = len(sent) if place == BEHIND else place
            sizes = tuple(sent[at] * n for n in tokens) if at < len(sent) else ()
            found.append((at, RankStage(rank, compute_s, read_s, sizes)))
    found.sort(key=lambda each: each[0])  # parts of a layer stay in their order
    stages = [stage for _, stage in found]
    for i, (stage, then) in enumerate(itertools.pairwise(stages)):
        if then.rank != stage.rank and not stage.read_s:
            stages[i] = replace(stage, compute_s=tuple(c + parts[stage.rank].sync_s for c in stage.compute_s))
    return rank_timing(stages, [part.slots for part in parts], link)
