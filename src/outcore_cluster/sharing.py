"""A model shared out over ranks: what this one holds of it, and what is not done there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from outcore.engine.model_profile import ModelProfile
from outcore.errors import OutcoreError, UsageError
from outcore.plan.draft_cost import NGRAM, Draft
from outcore.plan.machine_profile import Calibration
from outcore.plan.planner import ASSUMED, ENOUGH_STEP, SLOTS

from .cuts import Cuts
from .drafts import SharedModel, Sharing, is_filled
from .layer_shares import RankMeans, share_layers
from .link.link import Link
from .link_times import link_times
from .rank_share import cuts_of, share_out
from .weight_prints import check_same_model

if TYPE_CHECKING:
    from .group import RankGroup


def shared_out(
    profile: ModelProfile,
    ranks: RankGroup,
    budget: int,
    known: Calibration | None,
    resident: int | None,
    choose: Callable[[Sharing], SharedModel],
) -> SharedModel:
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
    check_same_model(profile.lazy, link, ranks.host)
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
        if ranks.owners is not None:
            return ranks.owners
        at = {i: n for n, i in enumerate(cuts.order)}
        nbytes = [profile.size.layers[i].resident for i in cuts.order]
        groups = [[at[i] for i in group] for group in cuts.groups]
        return tuple(share_layers(nbytes, groups, means(draft), hop_s))

    found = _agreed(ranks, lambda: choose(Sharing(profile, cuts, link, means, owners, hop_s)))
    return replace(found, profile=share_out(profile, cuts, link, found.owners, filled=found.filled))


def _agreed(ranks: RankGroup, choose: Callable[[], SharedModel]) -> SharedModel:
    """What the first rank chooses, as it is for this one: others hear what drafts, and have nothing of it."""
    link = ranks.link
    if link.rank == 0:
        try:
            found = choose()
        except OutcoreError as e:
            # Who says it is named, so that a launcher does not tell it once for each rank.
            who = f"rank 0 ({ranks.host})" if ranks.host else "rank 0"
            link.agree(json.dumps({"refused": f"{who}: {e}"}).encode())
            raise
        draft = None if found.draft is None else found.draft.name
        link.agree(json.dumps({"owners": found.owners, "draft": draft, "filled": found.filled}).encode())
        return found
    told = json.loads(link.agree(b""))
    if "refused" in told:
        raise UsageError(told["refused"])
    name = told["draft"]
    return SharedModel(tuple(told["owners"]), None if name is None else Draft(NGRAM, name), filled=told["filled"])


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
