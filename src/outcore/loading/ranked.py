"""A model shared out over ranks: what this one holds of it, and what is not done there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace

from ..calibration.link_times import link_times
from ..errors import OutcoreError, UsageError
from ..generation.agreement import Agreement
from ..generation.speculative.drafting import parse_draft
from ..link.link import Link
from ..link.ranks import Ranks
from ..model.cuts import Cuts
from ..model.pack_writer import Progress
from ..options import LoadOptions
from ..planning.draft_cost import MTP, NGRAM, Draft
from ..planning.machine_profile import Calibration
from ..planning.plan import Plan
from ..planning.planner import ASSUMED, ENOUGH_STEP, SLOTS
from ..planning.ranks_plan import PromptPasses, RankPart, RanksPlan, rank_part, ranks_plan
from ..planning.shares import RankMeans, share_layers
from ..streaming.model_profile import ModelProfile
from ..streaming.rank_profile import cuts_of, share_out
from .rank_folders import owners_of_folders
from .ranked_drafts import Shared, Sharing, is_filled


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
    if parse_draft(o.draft)[0] == MTP:
        raise UsageError(f"{o.name('draft')} {o.draft}: not over several machines; ngram, self:BITS or a model drafts")
    if o.kv_disk == "on":
        raise UsageError(f"{o.name('kv_disk')} on: not over several machines; leave it out")
    if o.prefix_cache != "off":
        raise UsageError(f"{o.name('prefix_cache')}: not over several machines; leave it out")
    return replace(o, kv_disk="off", lazy=False)


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
    resident: int | None,
    choose: Callable[[Sharing], Shared],
    *,
    fresh: bool = False,
) -> tuple[ModelProfile, Shared]:
    """What this rank holds of the model, and what drafts for it; all ranks ask at the same time.

    Args:
        resident: layers of which no more are to stay in memory.
        choose: what drafts; the first rank is asked.
        fresh: nobody has folders yet that decide on it.

    Raises:
        UsageError: the model cannot be cut, or not so; or what was asked for cannot draft.
    """
    cuts, link = cuts_of(profile), ranks.link
    if cuts.refusal is not None:
        name = profile.lazy.config.get("model_type", "this type")
        raise UsageError(f"a model of type {name} cannot be shared out over several machines: {cuts.refusal}")
    decided = (None if fresh else owners_of_folders(profile, cuts, ranks)) or ranks.owners
    calibration, times = known or ASSUMED, link_times(link)
    told = link.gather(json.dumps(asdict(_means(profile, link, budget, calibration, resident))).encode())
    others = [RankMeans(**json.loads(each)) for each in told[1:]]
    # Between all layers one token's hidden state goes, at most.
    hop_s = times.hop_s(max(_hidden(cuts), default=0))

    def means(draft: Draft | None) -> list[RankMeans]:
        # The first rank's draft is in its memory.
        left = budget - (draft.weights + draft.cache if draft is not None else 0)
        if is_filled(draft):
            left -= profile.size.cache - profile.size.cache // link.size
        return [_means(profile, link, left, calibration, resident), *others]

    def owners(draft: Draft | None) -> tuple[int, ...]:
        if decided is not None:
            return decided
        at = {i: n for n, i in enumerate(cuts.order)}
        nbytes = [profile.size.layers[i].resident for i in cuts.order]
        groups = [[at[i] for i in group] for group in cuts.groups]
        return tuple(share_layers(nbytes, groups, means(draft), hop_s))

    found = _agreed(link, lambda: choose(Sharing(profile, cuts, link, means, owners, hop_s)))
    mine, _ = share_out(profile, cuts, link, found.owners, filled=found.filled)
    return mine, found


def _agreed(link: Link, choose: Callable[[], Shared]) -> Shared:
    """What the first rank chooses, as it is for this one: others hear what drafts, and have nothing of it."""
    if link.rank == 0:
        try:
            found = choose()
        except OutcoreError as e:
            link.agree(json.dumps({"refused": str(e)}).encode())
            raise
        draft = None if found.draft is None else found.draft.name
        link.agree(json.dumps({"owners": found.owners, "draft": draft, "filled": found.filled}).encode())
        return found
    told = json.loads(link.agree(b""))
    if "refused" in told:
        raise UsageError(told["refused"])
    name = told["draft"]
    return Shared(tuple(told["owners"]), None if name is None else Draft(NGRAM, name), filled=told["filled"])


def _means(profile: ModelProfile, link: Link, budget: int, calibration: Calibration, resident: int | None) -> RankMeans:
    """What this rank has for layers."""
    size = profile.size
    outside = size.non_layer - (size.head.resident if link.rank and size.head is not None else 0)
    fixed = outside + size.cache // link.size + size.activations(min(ENOUGH_STEP, size.prompt))
    ring = SLOTS[0] * max((layer.slot for layer in size.layers), default=0)
    memory = max(0, budget - fixed)
    if resident is not None:
        # The ring is beside them, and taken off where layers are shared out.
        memory = min(memory, ring + resident * max((layer.resident for layer in size.layers), default=0))
    return RankMeans(memory, calibration.read_gbps * 1e9, ring, calibration.weight_gbps * 1e9)


def _hidden(cuts: Cuts) -> list[int]:
    """Bytes that each layer puts out for one token."""
    leaves = [[s for s in call.leaves if s is not None] for call in cuts.calls.values()]
    return [sum(math.prod(s.of(1, 1)) * s.dtype.size for s in shapes) for shapes in leaves]


STEPS = 32, 64, 128, 256, 512
"""Tokens of a prompt's chunks that are tried where they follow each other over ranks. Shorter ones cost more computing
than they save waiting."""

WORTH = 0.9
"""Part of the time to the first token from which on shorter chunks than planned are worth it."""


def about_ranks(shared: RanksPlan | None, ranks: Ranks | None) -> tuple[str, ...]:
    """What is to be noted of ranks: of itself by each, and by the first, which speaks, of all others."""
    if shared is None or ranks is None:
        return ()
    if rank := ranks.link.rank:
        of = sum(part.layers for part in shared.parts)
        return (f"{shared.parts[rank].layers} of {of} layers are this machine's, rank {rank} of {len(shared.parts)}",)
    notes = [
        f"ranks {' and '.join(map(str, those))} are on {host}: they share its disk and its cores, and are predicted as "
        "if each had its own"
        for host, those in shared.hosts_shared.items()
    ]
    known = shared.parts[0].notes
    for rank, part in enumerate(shared.parts):
        notes += [f"rank {rank} ({part.host}): {note}" for note in part.notes if note not in known]
    return tuple(notes)


def foreseen(
    profile: ModelProfile,
    plan: Plan,
    calibration: Calibration,
    ranks: Ranks | None,
    asked: int | None,
    notes: tuple[str, ...] = (),
) -> tuple[Plan, RanksPlan | None]:
    """What all ranks together take; each has made its plan, and asks at the same time. None: there are none.

    A prompt in one chunk would be computed by one rank after the other: it is cut into chunks of the length by which
    the first token is there soonest, which all ranks foresee alike.

    Args:
        asked: tokens of a chunk, if they were asked for. ``notes``: of this rank.

    Returns:
        the plan too, with chunks of that length.
    """
    if ranks is None or profile.share is None:
        return plan, None
    link, size, share = ranks.link, profile.size, profile.share
    # What they all see is what rank 0 was told.
    prompt, sequences = json.loads(link.agree(json.dumps([size.prompt, size.sequences]).encode()))
    longest = Agreement(link).least(plan.prefill_step)
    steps = [longest, *(n for n in STEPS if asked is None and n < min(longest, prompt))]
    host = ranks.host or f"rank {link.rank}"
    passes = [PromptPasses.of(prompt, step) for step in steps]
    first = link.rank == 0
    mine = [rank_part(size, plan, calibration, share.places, p, host, first=first, notes=notes) for p in passes]
    told = [json.loads(each) for each in link.gather(json.dumps([asdict(part) for part in mine]).encode())]
    times = link_times(link)
    found = [
        ranks_plan([RankPart.told(each[n]) for each in told], p, prompt, share.sent, sequences, times)
        for n, p in enumerate(passes)
    ]
    best = min(range(len(steps)), key=lambda n: found[n].ttft_s)
    best = best if found[best].ttft_s < WORTH * found[0].ttft_s else 0
    return replace(plan, prefill_step=min(plan.prefill_step, steps[best])) if best else plan, found[best]
