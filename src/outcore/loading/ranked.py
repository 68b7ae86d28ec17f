"""A model shared out over ranks: what this one holds of it, and what is not done there."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

from ..calibration.link_times import link_times
from ..errors import UsageError
from ..generation.agreement import Agreement
from ..link.link import Link
from ..link.ranks import Ranks
from ..model.cuts import Cuts
from ..model.pack_writer import Progress
from ..options import LoadOptions
from ..planning.draft_cost import AUTO, NGRAM, NONE
from ..planning.machine_profile import Calibration
from ..planning.plan import Plan
from ..planning.planner import ASSUMED, ENOUGH_STEP, SLOTS
from ..planning.ranks_plan import PromptPasses, RankPart, RanksPlan, rank_part, ranks_plan
from ..planning.shares import RankMeans, share_layers
from ..streaming.model_profile import ModelProfile
from ..streaming.rank_profile import cuts_of, share_out
from .rank_folders import owners_of_folders


def ranks_of(o: LoadOptions) -> Ranks | None:
    """The ranks that share the model; None: one alone has it."""
    return o.ranks if isinstance(o.ranks, Ranks) and o.ranks.link.size > 1 else None


def as_ranked(o: LoadOptions) -> LoadOptions:
    """The options that ranks have: what is not shared out yet is left out, or refused where it was asked for.

    Raises:
        UsageError: it was asked for.
    """
    if ranks_of(o) is None:
        return o
    if o.draft not in (AUTO, NGRAM, NONE):
        raise UsageError(f"{o.name('draft')} {o.draft}: over several machines only ngram drafts")
    if o.kv_disk == "on":
        raise UsageError(f"{o.name('kv_disk')} on: not over several machines; leave it out")
    if o.prefix_cache != "off":
        raise UsageError(f"{o.name('prefix_cache')}: not over several machines; leave it out")
    draft = NGRAM if o.draft == AUTO else o.draft
    return replace(o, draft=draft, kv_disk="off", lazy=False)


def as_work(o: LoadOptions, report: Progress) -> Progress:
    """The same, with each step told to other ranks: what compiles kernels is another process."""
    ranks = ranks_of(o)
    if ranks is None:
        return report

    def told(what: str, done: int, of: int) -> None:
        with ranks.link.working():
            report(what, done, of)

    return told


def shared_out(
    profile: ModelProfile,
    ranks: Ranks,
    budget: int,
    known: Calibration | None,
    resident: int | None = None,
    *,
    fresh: bool = False,
) -> ModelProfile:
    """What this rank holds of the model; all ranks ask at the same time.

    Args:
        resident: layers of which no more are to stay in memory.
        fresh: nobody has folders yet that decide on it.

    Raises:
        UsageError: the model cannot be cut, or not so.
    """
    cuts = cuts_of(profile)
    if cuts.refusal is not None:
        name = profile.lazy.config.get("model_type", "this type")
        raise UsageError(f"a model of type {name} cannot be shared out over several machines: {cuts.refusal}")
    owners = None if fresh else owners_of_folders(profile, cuts, ranks)
    owners = owners or ranks.owners or _chosen(profile, cuts, ranks.link, budget, known or ASSUMED, resident)
    found, _ = share_out(profile, cuts, ranks.link, owners)
    mine, rank, size = len(found.layers), ranks.link.rank, ranks.link.size
    note = f"{mine} of {len(profile.layers)} layers are this machine's, rank {rank} of {size}"
    return replace(found, notes=(*found.notes, note))


def _chosen(
    profile: ModelProfile, cuts: Cuts, link: Link, budget: int, calibration: Calibration, resident: int | None
) -> tuple[int, ...]:
    """The rank of each layer, in the order of calls, by what memory and disk every rank has."""
    size = profile.size
    outside = size.non_layer - (size.head.resident if link.rank and size.head is not None else 0)
    fixed = outside + size.cache // link.size + size.activations(min(ENOUGH_STEP, size.prompt))
    # Between all layers one token's hidden state goes, at most.
    hidden = max(_hidden(cuts), default=0)
    times = link_times(link)
    ring = SLOTS[0] * max((layer.slot for layer in size.layers), default=0)
    memory = max(0, budget - fixed)
    if resident is not None:
        # The ring is beside them, and taken off where layers are shared out.
        memory = min(memory, ring + resident * max((layer.resident for layer in size.layers), default=0))
    mine = RankMeans(memory, calibration.read_gbps * 1e9, ring, calibration.weight_gbps * 1e9)
    means = [RankMeans(**json.loads(told)) for told in link.gather(json.dumps(asdict(mine)).encode())]
    at = {i: n for n, i in enumerate(cuts.order)}
    nbytes = [size.layers[i].resident for i in cuts.order]
    groups = [[at[i] for i in group] for group in cuts.groups]
    # What all ranks share has to be the same on all: rank 0's.
    owners = share_layers(nbytes, groups, means, times.hop_s(hidden))
    return tuple(json.loads(link.agree(json.dumps(owners).encode())))


def _hidden(cuts: Cuts) -> list[int]:
    """Bytes that each layer puts out for one token."""
    leaves = [[s for s in call.leaves if s is not None] for call in cuts.calls.values()]
    return [sum(math.prod(s.of(1, 1)) * s.dtype.size for s in shapes) for shapes in leaves]


def foreseen(profile: ModelProfile, plan: Plan, calibration: Calibration, ranks: Ranks | None) -> RanksPlan | None:
    """What all ranks together take; each has made its plan, and asks at the same time. None: there are none."""
    if ranks is None or profile.share is None:
        return None
    link, size, share = ranks.link, profile.size, profile.share
    passes = PromptPasses.of(size.prompt, Agreement(link).least(plan.prefill_step))
    host = ranks.host or f"rank {link.rank}"
    mine = rank_part(size, plan, calibration, share.places, passes, host, first=link.rank == 0)
    parts = [RankPart.told(json.loads(told)) for told in link.gather(json.dumps(asdict(mine)).encode())]
    # What they all see is what rank 0 was told.
    prompt, sequences = json.loads(link.agree(json.dumps([size.prompt, size.sequences]).encode()))
    return ranks_plan(parts, passes, prompt, share.sent, sequences, link_times(link))
