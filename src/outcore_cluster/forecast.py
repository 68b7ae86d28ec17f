"""What ranks that share a model are predicted to take together, by what each of them holds when it is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict

from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan

from .agreement import Agreement
from .link_times import link_times
from .rank_share import RankShare
from .ranks_plan import PromptPasses, RankPart, RanksPlan, rank_part, ranks_plan

STEPS = 32, 64, 128, 256, 512
"""Tokens of a prompt's chunks that are tried where they follow each other over ranks. Shorter ones cost more computing
than they save waiting."""

WORTH = 0.9
"""Part of the time to the first token from which on shorter chunks than planned are worth it."""


def predicted(
    share: RankShare,
    size: ModelSize,
    plan: Plan,
    calibration: Calibration,
    *,
    host: str,
    asked: int | None,
    notes: tuple[str, ...],
) -> RanksPlan:
    """What all ranks together take; all of them ask at the same time.

    A prompt in one chunk would be computed by one rank after the other: it is cut into chunks of the length by which
    the first token is there soonest, which all ranks predict alike.

    Args:
        size, plan: of what this rank holds. ``calibration``: of this machine. ``host``: as users call it.
        asked: tokens of a prompt's chunk, if they were asked for. ``notes``: of this rank.
    """
    link = share.link
    # What they all see is what rank 0 was told.
    prompt, sequences = json.loads(link.agree(json.dumps([size.prompt, size.sequences]).encode()))
    (longest,) = Agreement(link).leasts([plan.prefill_step])
    steps = [longest, *(n for n in STEPS if asked is None and n < min(longest, prompt))]
    passes = [PromptPasses.of(prompt, step) for step in steps]
    first = link.rank == 0
    mine = [rank_part(size, plan, calibration, share.places, p, host, first=first, notes=notes) for p in passes]
    told = [json.loads(each) for each in link.gather(json.dumps([asdict(part) for part in mine]).encode())]
    times, sent = link_times(link), share.sent
    found = [
        ranks_plan([RankPart.told(each[n]) for each in told], p, prompt, sent, sequences, times)
        for n, p in enumerate(passes)
    ]
    best = min(found, key=lambda each: each.ttft_s)
    return best if best.ttft_s < WORTH * found[0].ttft_s else found[0]
