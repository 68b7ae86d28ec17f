"""Predicts how long all ranks together take for a pass. Each rank sends the times of its own layers to all others, and
every rank computes the same prediction from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.prediction import Turn, turns_of

from .rank_share import RankShare
from .timing import LinkTimes, RankStage, pass_ends, steady_s

# Stands for the place of work that is no layer and follows the last one, such as the head.
BEHIND = 1 << 30

# Fields of a ``RankPart`` that the JSON for users leaves out.
OUTSIDE = "token", "prompt"


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a model, in bytes, seconds and GB/s. Plain values, sent to the other ranks as JSON.

    Attributes:
        layers, resident: how many layers the rank has, and how many of these stay in memory. ``slots``: of its ring.
        token: its layers in a decode step: place in the model's order of calls, seconds of reading and of computing.
        prompt: for each chunk length, its layers in a prompt's pass: place, seconds of reading, of computing a chunk,
            and of computing one token.
        calibrated: whether the times rest on measurements.
    """

    host: str
    layers: int
    resident: int
    slots: int
    bytes_per_token: int
    peak_bytes: int
    budget_bytes: int
    read_gbps: float
    calibrated: bool
    token: list[tuple[int, float, float]]
    prompt: dict[str, list[tuple[int, float, float, float]]]
    notes: list[str]

    @classmethod
    def of(
        cls, share: RankShare, size: ModelSize, plan: Plan, known: Calibration, steps: Sequence[int], **more: Any
    ) -> RankPart:
        """Returns this rank's part, from the size and plan of its own layers. ``steps``: chunk lengths of prompts, in
        tokens; ``more``: ``host`` and ``notes``."""

        def placed(turns: list[Turn]) -> list[tuple[int, float, float]]:
            found = [(BEHIND if t.layer is None else share.places[t.layer], t.read_s, t.compute_s) for t in turns]
            return [each for each in found if share.link.rank == 0 or each[0] != BEHIND]

        def chunks(tokens: int) -> list[tuple[int, float, float]]:
            return placed(turns_of(size, plan, known, [(max(1, tokens), 1)], size.prompt))

        experts = size.on_demand
        if experts is not None and experts.reads(plan, size, size.sequences):
            token = experts.turns(size, plan, known)
        else:
            token = turns_of(size, plan, known, [(size.sequences, 1)], size.context)
        last = chunks(1)
        return cls(
            layers=len(size.layers),
            resident=len(plan.resident),
            slots=max(plan.slots, 2),
            bytes_per_token=plan.bytes_per_token,
            peak_bytes=plan.peak_bytes,
            budget_bytes=plan.budget_bytes,
            read_gbps=known.read_gbps,
            calibrated=plan.calibrated,
            token=placed(token),
            prompt={
                # Only the prompt's last token gets logits.
                str(step): [
                    (at, read, 0.0 if at == BEHIND else compute, one)
                    for (at, read, compute), (_, _, one) in zip(chunks(step), last, strict=True)
                ]
                for step in steps
            },
            **more,
        )


@dataclass(frozen=True)
class RanksPlan:
    """The prediction for all ranks together.

    Attributes:
        token_s: predicted seconds of a decode step, one token of every sequence.
        ttft_s: predicted seconds to the first token after a prompt of ``prompt`` tokens, with empty slots at first.
        step: chunk length of the prompt, in tokens.
    """

    parts: tuple[RankPart, ...]
    token_s: float
    ttft_s: float
    prompt: int
    link: LinkTimes
    step: int

    @classmethod
    def of(
        cls, parts: Sequence[RankPart], prompt: int, step: int, sent: Sequence[int], sequences: int, link: LinkTimes
    ) -> RanksPlan:
        """Predicts a prompt in chunks of ``step`` tokens, and decode steps of ``sequences`` sequences. ``sent``: bytes
        per token that each layer sends to other ranks, in the order of calls."""
        slots = [part.slots for part in parts]

        def stages(turns: Sequence[Sequence[Any]], tokens: Sequence[int]) -> list[RankStage]:
            """Merges the ranks' layers by place; each is a place, seconds of reading, and seconds of computing per
            pass."""
            each = sorted((place, rank, n, *t) for rank, its in enumerate(turns) for n, (place, *t) in enumerate(its))
            sizes = [tuple(nbytes * n for n in tokens) for nbytes in sent]
            return [RankStage(rank, c, read, () if at == BEHIND else sizes[at]) for at, rank, _, read, c in each]

        token = [[(at, read, (compute,)) for at, read, compute in part.token] for part in parts]
        whole, rest = divmod(max(0, prompt - 1), step)
        chunks = [step] * whole + [rest] * bool(rest)
        first = [
            [(at, read, (*(c * n / step for n in chunks), last)) for at, read, c, last in part.prompt[str(step)]]
            for part in parts
        ]
        token_s = steady_s(stages(token, [sequences]), slots, link)
        (ttft_s,) = pass_ends(stages(first, [*chunks, 1]), slots, link)
        return cls(tuple(parts), token_s, ttft_s, prompt, link, step)

    @property
    def calibrated(self) -> bool:
        return all(part.calibrated for part in self.parts)

    @property
    def line(self) -> str:
        layers = ", ".join(f"{part.layers} on {part.host}" for part in self.parts)
        in_words = f", {self.layout}" if self.layout else ""
        how = "Predicted" if self.calibrated else "Assumed, not measured (outcore launch ... -- plan does)"
        return (
            f"{len(self.parts)} machines share the layers{in_words}: {layers}. {how}: {1 / self.token_s:.3g} tokens a "
            f"second, {self.ttft_s:.3g} s to the first"
        )

    @property
    def layout(self) -> str:
        """``in blocks`` if each rank's layers follow each other, else ``in turn``; empty if one rank has all layers."""
        places = sorted({(each[0], rank) for rank, part in enumerate(self.parts) for each in part.token})
        blocks = [rank for rank, _ in itertools.groupby(rank for at, rank in places if at != BEHIND)]
        if len(blocks) < 2:
            return ""
        return "in blocks" if len(blocks) == len(set(blocks)) else "in turn"

    def record(self) -> dict[str, Any]:
        return {
            "predicted_token_s": self.token_s,
            "predicted_ttft_s": self.ttft_s,
            "prompt": self.prompt,
            "prefill_step": self.step,
            "calibrated": self.calibrated,
            "latency_s": self.link.latency_s,
            "link_bytes_per_s": self.link.rate,
            "layout": self.layout or None,
            "ranks": [{k: v for k, v in asdict(part).items() if k not in OUTSIDE} for part in self.parts],
        }
