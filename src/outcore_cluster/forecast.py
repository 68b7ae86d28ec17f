"""What ranks that share a model take together, foreseen by what each of them holds.

That is done when it is loaded, and anew before a text where one holds something else (``shared_chunks``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan

from .agreement import Agreement
from .link_times import link_times
from .rank_share import RankShare
from .ranks_plan import PromptPasses, RankPart, RanksPlan, rank_part, ranks_plan

if TYPE_CHECKING:
    from .group import RankGroup

STEPS = 32, 64, 128, 256, 512
"""Tokens of a prompt's chunks that are tried where they follow each other over ranks. Shorter ones cost more computing
than they save waiting."""

WORTH = 0.9
"""Part of the time to the first token from which on shorter chunks than planned are worth it."""


@dataclass
class RankForecast:
    """Asks all ranks, which ask at the same time.

    Args:
        calibration: of this machine.
        asked: tokens of a prompt's chunk, if they were asked for. ``notes``: of this rank.
    """

    ranks: RankGroup
    share: RankShare
    calibration: Calibration
    asked: int | None
    notes: tuple[str, ...] = ()
    _longest: int = field(default=0, init=False)

    def foresee(self, size: ModelSize, plan: Plan) -> RanksPlan:
        """What they take by what this rank's is, and others' are.

        A prompt in one chunk would be computed by one rank after the other: it is cut into chunks of the length by
        which the first token is there soonest, which all ranks foresee alike.
        """
        link = self.ranks.link
        # What they all see is what rank 0 was told.
        prompt, sequences = json.loads(link.agree(json.dumps([size.prompt, size.sequences]).encode()))
        # A plan's chunks may be short because they were found to be best.
        (self._longest,) = Agreement(link).leasts([max(plan.prefill_step, self._longest)])
        steps = [self._longest, *(n for n in STEPS if self.asked is None and n < min(self._longest, prompt))]
        host = self.ranks.host or f"rank {link.rank}"
        passes = [PromptPasses.of(prompt, step) for step in steps]
        places, first = self.share.places, link.rank == 0
        mine = [rank_part(size, plan, self.calibration, places, p, host, first=first, notes=self.notes) for p in passes]
        told = [json.loads(each) for each in link.gather(json.dumps([asdict(part) for part in mine]).encode())]
        times, sent = link_times(link), self.share.sent
        found = [
            ranks_plan([RankPart.told(each[n]) for each in told], p, prompt, sent, sequences, times)
            for n, p in enumerate(passes)
        ]
        best = min(found, key=lambda each: each.ttft_s)
        return best if best.ttft_s < WORTH * found[0].ttft_s else found[0]
