"""What a run has shown of one rank of several, beside what its calibration foresaw of its own part of a sweep.

Each rank corrects what it foresees of itself, and tells others what comes of it: none needs to know their runs, nor
where layers were.
"""

from __future__ import annotations

from outcore_cluster.ranks_plan import token_turns

from .correction import STALLED, WORKED, Swept, believed
from .machine_profile import Calibration
from .model_size import ModelSize
from .plan import Plan


def foreseen_of_rank(size: ModelSize, plan: Plan, calibration: Calibration, *, first: bool) -> tuple[float, float]:
    """Seconds of computing and of reading in a sweep for a token until its last streamed part is done, which is how far
    sweeps are measured, as the calibration alone has them.

    Args:
        size, plan: of what the rank holds. first: it has the head.
    """
    turns = [t for t in token_turns(size, plan, calibration) if first or t.layer is not None]
    turns = turns[: max((n for n, t in enumerate(turns, 1) if t.read_s), default=0)]
    return sum(t.compute_s for t in turns), sum(t.read_s for t in turns)


def attributed_to_rank(seen: Swept, compute_s: float, read_s: float) -> tuple[float | None, float | None]:
    """Times that its computing and reading took as long as was foreseen; None: the run says nothing of it.

    Args:
        seen: a sweep without what it waited for others, but with what was read meanwhile.
    """
    worked = seen.seconds - seen.stall_s
    compute = worked / compute_s if worked >= WORKED * seen.seconds and compute_s > 0 else None
    read = seen.reading_s / read_s if seen.stall_s >= STALLED * seen.seconds and read_s > 0 else None
    return believed(compute), believed(read)
