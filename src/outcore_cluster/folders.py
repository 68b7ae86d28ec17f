"""Folders of a model on several machines, whole or with what one rank needs: found to fit together when ranks meet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outcore.checkpoint.checkpoint import ADAPTER_CONFIG
from outcore.engine.model_profile import ModelProfile
from outcore.errors import UsageError

from .cuts import Cuts
from .partial_checkpoint import RankLayers, name_in_hub
from .weight_prints import BESIDE, CONFIG, OWN_CODE, first_other, weight_prints

if TYPE_CHECKING:
    from .group import RankGroup


def owners_of_folders(profile: ModelProfile, cuts: Cuts, ranks: RankGroup) -> tuple[int, ...] | None:
    """The rank of each layer, in the order of calls, where ranks' folders decide on it; all ranks ask at once. None:
    everybody has the whole model.

    Raises:
        UsageError: they do not fit together; names whose it is.
    """
    link, lazy = ranks.link, profile.lazy
    mine = {
        "host": ranks.host,
        "identity": name_in_hub(lazy.checkpoint.folder) or lazy.checkpoint.identity(),
        "share": None if lazy.share is None else lazy.share.model_dump(exclude={"absent"}),
        "coding": lazy.coding,
        "prints": weight_prints(lazy),
    }
    told = [json.loads(each) for each in link.gather(json.dumps(mine).encode())]
    shares = [None if each["share"] is None else RankLayers.model_validate(each["share"]) for each in told]
    first = next((rank for rank, found in enumerate(shares) if found is not None), None)
    who = [f"rank {rank} ({each['host']})" if each["host"] else f"rank {rank}" for rank, each in enumerate(told)]
    if first is not None:
        _check(shares, [each["identity"] for each in told], first, who)
    _check_weights(told, who)
    if first is None:
        return None
    found = shares[first]
    assert found is not None  # the first that is not
    if len(found.owners) != len(cuts.order):
        raise UsageError(f"{who[first]}: its folder is for {len(found.owners)} layers, the model has {len(cuts.order)}")
    owners = tuple(found.owners[i] for i in cuts.order)
    if ranks.owners not in (None, owners):
        raise UsageError(f"layers are to be shared out as {ranks.owners}, and ranks' folders are for {owners}")
    return owners


def _check_weights(told: Sequence[Mapping[str, Any]], who: Sequence[str]) -> None:
    """Refuse other weights of the same architecture: their layers would fit together, and say what neither would."""
    if (other := first_other([each["prints"] for each in told])) is not None:
        mine, theirs, name = other
        what = {
            OWN_CODE: "other code of the model's own",
            CONFIG: "another config.json",
            BESIDE: "another tokenizer, or template,",
            ADAPTER_CONFIG: f"another {ADAPTER_CONFIG}",
        }
        whose = "adapter" if name == ADAPTER_CONFIG else "model"
        has = what.get(name, "other weights")
        raise UsageError(f"{who[mine]} has {has} than {who[theirs]}: copy the {whose}'s folder from there")
    for name, each in zip(who, told, strict=True):
        # Of tensors that are stored in other ways there is nothing to compare but what they were made from.
        if each["identity"] != told[0]["identity"] and each["coding"] != told[0]["coding"]:
            raise UsageError(
                f"{name} has a copy with --coding {each['coding']}, {who[0]} one with {told[0]['coding']}, and not of "
                "one folder: copy the model's folder from there"
            )


def _check(shares: Sequence[RankLayers | None], identities: Sequence[str], first: int, who: Sequence[str]) -> None:
    again = "fetch the model anew on all hosts"
    found = shares[first]
    for rank, share in enumerate(shares):
        if share is None or found is None:
            continue  # who has all of it is told apart by its weights
        if identities[rank] != identities[first]:
            raise UsageError(f"{who[rank]} has a folder of another model than {who[first]}: {again}")
        if share.ranks != len(shares):
            raise UsageError(f"{who[rank]} has the folder of {share.who}, and there are {len(shares)}: {again}")
        if share.rank != rank:
            raise UsageError(f"{who[rank]} has the folder of {share.who}: give it that of rank {rank}, or other hosts")
        if share.owners != found.owners:
            raise UsageError(f"{who[rank]} has a folder with other layers than that of {who[first]} is for: {again}")
