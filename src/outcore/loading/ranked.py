"""A model shared out over ranks: what this one holds of it, and what is not done there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

from ..errors import OutcoreError, UsageError
from ..generation.speculative.drafting import parse_draft
from ..link.link import Link
from ..link.ranks import Ranks
from ..options import LoadOptions
from ..planning.draft_cost import MTP, NGRAM, Draft
from ..planning.machine_profile import Calibration
from ..planning.planner import ASSUMED, ENOUGH_STEP, SLOTS
from ..planning.shares import RankMeans, share_layers
from ..streaming.model_profile import ModelProfile
from ..streaming.rank_profile import cuts_of, share_out
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


def shared_out(
    profile: ModelProfile,
    ranks: Ranks,
    budget: int,
    known: Calibration | None,
    resident: int | None,
    choose: Callable[[Sharing], Shared],
) -> tuple[ModelProfile, Shared]:
    """What this rank holds of the model, and what drafts for it; all ranks ask at the same time.

    Args:
        resident: layers of which no more are to stay in memory.
        choose: what drafts; the first rank is asked.

    Raises:
        UsageError: the model cannot be cut, or not so; or what was asked for cannot draft.
    """
    cuts, link = cuts_of(profile), ranks.link
    if cuts.refusal is not None:
        name = profile.lazy.config.get("model_type", "this type")
        raise UsageError(f"a model of type {name} cannot be shared out over several machines: {cuts.refusal}")
    calibration = known or ASSUMED
    told = link.gather(json.dumps(asdict(_means(profile, link, budget, calibration, resident))).encode())
    others = [RankMeans(**json.loads(each)) for each in told[1:]]

    def means(draft: Draft | None) -> list[RankMeans]:
        # The first rank's draft is in its memory.
        left = budget - (draft.weights + draft.cache if draft is not None else 0)
        if is_filled(draft):
            left -= profile.size.cache - profile.size.cache // link.size
        return [_means(profile, link, left, calibration, resident), *others]

    def owners(draft: Draft | None) -> tuple[int, ...]:
        if ranks.owners is not None:
            return ranks.owners
        at = {i: n for n, i in enumerate(cuts.order)}
        nbytes = [profile.size.layers[i].resident for i in cuts.order]
        return tuple(share_layers(nbytes, [[at[i] for i in group] for group in cuts.groups], means(draft)))

    found = _agreed(link, lambda: choose(Sharing(profile, cuts, link, means, owners)))
    mine, _ = share_out(profile, cuts, link, found.owners, filled=found.filled)
    layers, rank, size = len(mine.layers), link.rank, link.size
    note = f"{layers} of {len(profile.layers)} layers are this machine's, rank {rank} of {size}"
    return replace(mine, notes=(*mine.notes, note)), found


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
