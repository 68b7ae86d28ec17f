"""Folders that hold what one rank of several needs: written for all ranks, and found to fit together when they meet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.checkpoint.checkpoint import ADAPTER_CONFIG, open_checkpoint
from outcore.checkpoint.lazy_model import open_lazily
from outcore.checkpoint.manifest import RankLayers, is_packed
from outcore.checkpoint.pack import pack_model
from outcore.checkpoint.pack_writer import Progress
from outcore.checkpoint.packed_store import PackedStore, coding_of
from outcore.engine.model_profile import ModelProfile, profile_of
from outcore.errors import UsageError
from outcore.text import counted

from .cuts import Cuts
from .layer_shares import in_blocks, in_turn
from .partial_checkpoint import name_in_hub
from .rank_pack import RankPack
from .rank_share import cuts_of, head_paths
from .weight_prints import OWN_CODE, first_other, weight_prints

if TYPE_CHECKING:
    from .group import RankGroup

MOST_RANKS = 1000


@dataclass(frozen=True)
class RankShares:
    """How layers are shared out: ``shares`` are relative, one for each rank; ``blocks``: each has layers that follow
    each other."""

    shares: tuple[float, ...]
    blocks: bool = False

    @classmethod
    def parsed(cls, text: str, *, blocks: bool = False) -> RankShares:
        """Of what was typed: `2`, or `2:1,3`.

        Raises:
            UsageError: it cannot be meant.
        """
        number, _, shares = text.partition(":")
        try:
            ranks = int(number)
            found = tuple(float(share) for share in shares.split(",")) if shares else (1.0,) * min(ranks, MOST_RANKS)
        except ValueError:
            raise UsageError(f"--ranks {text}: give a number, such as 2, or with shares 2:1,3") from None
        if not 2 <= ranks <= MOST_RANKS or len(found) != ranks or not all(0 < share < 1e9 for share in found):
            raise UsageError(f"--ranks {text}: give 2 to {MOST_RANKS} ranks, and a share above 0 for each, or none")
        return cls(found, blocks)


def pack_ranks(
    folder: Path,
    output: Path,
    how: RankShares,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Iterator[PackedStore]:
    """Pack a model for several ranks: a folder `rank-0`, `rank-1` ... in ``output`` for each, one after the other.

    Raises:
        UsageError: the model cannot be shared out. StoreError, CheckpointError: as ``pack_model``.
    """
    if is_packed(folder):
        raise UsageError(f"{folder}: is a packed copy already; give the folder of the original model")
    lazy = open_lazily(open_checkpoint(folder), trust_remote_code=trust_remote_code)
    profile = profile_of(lazy, context=None, prompt=None, dtype=None)
    cuts = cuts_of(profile)
    if cuts.refusal is not None:
        raise UsageError(f"{folder}: cannot be shared out over several machines: {cuts.refusal}")
    owners, heads = _owners(profile, cuts, how), head_paths(profile)
    del lazy, profile
    ranks = len(how.shares)
    for rank in range(ranks):
        yield pack_model(
            folder,
            output / f"rank-{rank}",
            force=force,
            trust_remote_code=trust_remote_code,
            progress=progress,
            part=RankPack(rank, ranks, owners, heads if rank else frozenset()),
        )


def _owners(profile: ModelProfile, cuts: Cuts, how: RankShares) -> tuple[int, ...]:
    """The rank of each layer, by its number.

    Raises:
        UsageError: a rank would have none.
    """
    nbytes = [profile.size.layers[i].resident for i in cuts.order]
    at = {i: n for n, i in enumerate(cuts.order)}
    groups = [[at[i] for i in group] for group in cuts.groups]
    shares = [share / sum(how.shares) for share in how.shares]
    by_call = (in_blocks if how.blocks else in_turn)(nbytes, groups, shares)
    if len(idle := set(range(len(shares))) - set(by_call)):
        parts = counted(len(groups), "part")
        raise UsageError(f"--ranks: rank {min(idle)} would have no layer: this model can be cut into {parts} at most")
    return tuple(by_call[at[i]] for i in range(len(profile.layers)))


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
        "coding": coding_of(lazy),
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
        what = {OWN_CODE: "other code of the model's own", ADAPTER_CONFIG: f"another {ADAPTER_CONFIG}"}
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
    again = f"pack all of them together (outcore pack --ranks {len(shares)})"
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
