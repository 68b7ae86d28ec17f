"""Shares a model out over ranks, with what drafts for it.

Rank 0 drafts for all and sends the others its drafts. A copy of the model as a draft model continues from the model's
own caches, of which each rank has those of its layers. So rank 0's copy of other ranks' layers fills their caches there
(``PipelineStage.fill``), from those layers' inputs. Another draft model has caches of its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outcore.decode.opening import Opening
from outcore.decode.preparation import draft_kind
from outcore.decode.speculative.sources import with_draft
from outcore.engine.model_profile import ModelProfile
from outcore.errors import OutcoreError, UsageError, called
from outcore.options import LoadOptions
from outcore.plan.joint_plan import NGRAM, Draft
from outcore.plan.machine_profile import Calibration
from outcore.plan.planner import ASSUMED, ENOUGH_STEP, SLOTS

from .cuts import Cuts
from .layer_shares import RankMeans, share_layers
from .link_protocol import Link
from .rank_share import cuts_of, share_out
from .stage import fillable
from .weight_prints import check_same_model

if TYPE_CHECKING:
    from .group import RankGroup


class SharedModel(NamedTuple):
    """This rank's part of a model, and its draft; ranks other than 0 have no weights of the draft."""

    profile: ModelProfile
    draft: Draft | None


def shared_out(
    profile: ModelProfile, ranks: RankGroup, o: LoadOptions, folder: Path, known: Calibration | None, budget: int
) -> SharedModel:
    """Returns this rank's part of the model, and its draft (n-grams for ``auto``). All ranks call it at the same
    time.

    Raises:
        UsageError: the model cannot be cut, or the requested draft does not work over several machines.
    """
    cuts, link = cuts_of(profile), ranks.link
    if cuts.refusal is not None:
        kind = profile.lazy.config.get("model_type", "this type")
        raise UsageError(f"a model of type {kind} cannot be shared out over several machines: {cuts.refusal}")
    check_same_model(profile.lazy, link, ranks.host)
    calibration, times = known or ASSUMED, ranks.times
    gathered = link.gather(json.dumps(asdict(_means(profile, link, budget, calibration, o.resident))).encode())
    others = [RankMeans(**json.loads(each)) for each in gathered[1:]]

    def owners(draft: Draft | None) -> tuple[int, ...]:
        # The draft takes memory of rank 0.
        left = budget - (draft.weights + draft.cache if draft is not None else 0)
        if is_filled(draft):
            left -= profile.size.cache - profile.size.cache // link.size
        means = [_means(profile, link, left, calibration, o.resident), *others]
        at = {i: n for n, i in enumerate(cuts.order)}
        groups = [[at[i] for i in group] for group in cuts.groups]
        nbytes = [profile.size.layers[i].resident for i in cuts.order]
        # At most one token's hidden state goes between two layers.
        return tuple(share_layers(nbytes, groups, means, times.hop_s(max(_hidden(cuts), default=0))))

    if link.rank:
        found = json.loads(link.agree(b""))
        if "refused" in found:
            raise UsageError(found["refused"])
        draft = None if found["draft"] is None else Draft(NGRAM, found["draft"])
    else:
        try:
            _, draft = with_draft(*draft_kind(o), profile, Opening(folder, o, known))
            mine = owners(draft)
            name = None if draft is None else draft.name
            by_layer = dict(zip(cuts.order, mine, strict=True))
            if is_filled(draft) and (profile.trace.evaluates or not fillable(cuts, by_layer)):
                raise UsageError(
                    f"{called('draft')} {name}: a copy of this model cannot draft over several machines; ngram or "
                    "another model can"
                )
            found = {"owners": mine, "filled": is_filled(draft), "draft": name}
        except OutcoreError as e:
            # The message names rank 0, so that a launcher does not repeat it for each rank.
            who = f"rank 0 ({ranks.host})" if ranks.host else "rank 0"
            link.agree(json.dumps({"refused": f"{who}: {e}"}).encode())
            raise
        link.agree(json.dumps(found).encode())
    return SharedModel(share_out(profile, cuts, link, tuple(found["owners"]), filled=found["filled"]), draft)


def is_filled(draft: Draft | None) -> bool:
    """Whether rank 0's caches of other ranks' layers are filled for the draft."""
    return draft is not None and draft.copies_model


def _means(profile: ModelProfile, link: Link, budget: int, calibration: Calibration, resident: int | None) -> RankMeans:
    size = profile.size
    outside = size.non_layer - (size.head.resident if link.rank and size.head is not None else 0)
    fixed = outside + size.cache // link.size + size.activations(min(ENOUGH_STEP, size.prompt))
    ring = SLOTS[0] * max((layer.slot for layer in size.layers), default=0)
    memory = max(0, budget - fixed)
    if resident is not None:
        # ``share_layers`` subtracts the ring.
        memory = min(memory, ring + resident * max((layer.resident for layer in size.layers), default=0))
    return RankMeans(memory, calibration.read_gbps * 1e9, ring, calibration.weight_gbps * 1e9)


def _hidden(cuts: Cuts) -> list[int]:
    """Bytes per token that each layer puts out."""
    leaves = [[s for s in call.leaves if s is not None] for call in cuts.calls.values()]
    return [sum(math.prod(s.of(1, 1)) * s.dtype.size for s in shapes) for shapes in leaves]
