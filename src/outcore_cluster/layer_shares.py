"""Chooses which rank has which layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .link_times import LinkTimes
from .timing import RankStage, steady_s


@dataclass(frozen=True)
class RankMeans:
    """A rank's resources.

    Attributes:
        memory: bytes for layers and slots. ``ring``: bytes of it that slots take if any layer is streamed.
        rate: bytes per second that its disk reads. ``compute_rate``: bytes of weights per second that it computes with.
    """

    memory: int
    rate: float
    ring: int = 0
    compute_rate: float = 1e10


# If layers alternate between ranks: how many consecutive groups of layers one rank gets at a time.
WINDOWS = (1, 2, 4)

# Slots of each rank's ring.
SLOTS = 3

# Assumed seconds of a message from one rank to another if the link was not measured.
HOP_S = 0.0005


def share_layers(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], ranks: Sequence[RankMeans], hop_s: float = HOP_S
) -> list[int]:
    """Returns the rank of each layer, in the order of calls.

    If all ranks together can hold the layers in memory, each rank gets consecutive layers, so that few outputs are
    sent. Shares are by compute rate, since ranks compute chunks of a prompt at the same time, or by memory if those do
    not fit. Otherwise layers alternate between ranks, so that each rank reads its next layer while others compute; all
    disks finish at the same time T, with sum(memory + rate T) = bytes. A simulation chooses how many consecutive layers
    a rank then gets: with few, ranks wait less for disks; with many, fewer outputs are sent.

    Args:
        nbytes: of each layer. ``groups``: layers that must lie on one rank; each layer is in one group.
        hop_s: seconds of a message from one rank to another.
    """
    total = sum(nbytes)
    if sum(r.memory for r in ranks) >= total:
        for parts in ([r.compute_rate for r in ranks], [r.memory for r in ranks]):
            owners = in_blocks(nbytes, groups, [part / sum(parts) for part in parts])
            held = [sum(n for n, o in zip(nbytes, owners, strict=True) if o == i) for i in range(len(ranks))]
            if all(h <= r.memory for h, r in zip(held, ranks, strict=True)):
                return owners
    left = [replace(r, memory=max(0, r.memory - r.ring)) for r in ranks]
    shares = fair_shares(total, left)
    ways = []
    for size in WINDOWS:
        together = [groups[n : n + size] for n in range(0, len(groups), size)]
        ways.append(in_turn(nbytes, [[i for group in each for i in group] for each in together], shares))
    ways.append(in_blocks(nbytes, groups, shares))
    return min(ways, key=lambda owners: shared_pass_s(nbytes, owners, left, hop_s))


def shared_pass_s(
    nbytes: Sequence[int], owners: Sequence[int], ranks: Sequence[RankMeans], hop_s: float = HOP_S
) -> float:
    """Predicts the seconds of a pass in which each rank holds the same fraction of each of its layers in memory."""
    held = [sum(n for n, o in zip(nbytes, owners, strict=True) if o == i) for i in range(len(ranks))]
    missing = [max(0.0, 1 - r.memory / h) if h else 0.0 for r, h in zip(ranks, held, strict=True)]
    stages = [
        RankStage(
            o,
            (n / ranks[o].compute_rate,),
            n * missing[o] / ranks[o].rate if ranks[o].rate > 0 else 0.0,
        )
        for n, o in zip(nbytes, owners, strict=True)
    ]
    return steady_s(stages, [SLOTS] * len(ranks), LinkTimes(hop_s))


def fair_shares(total: int, ranks: Sequence[RankMeans]) -> list[float]:
    """Returns, for each rank, the fraction of ``total`` bytes with which all disks finish at the same time."""
    rate = sum(r.rate for r in ranks)
    memory = sum(r.memory for r in ranks)
    if rate <= 0 or memory >= total:
        # No disk has anything to read.
        whole = memory or len(ranks)
        return [(r.memory or (0 if memory else 1)) / whole for r in ranks]
    seconds = (total - memory) / rate
    return [(r.memory + r.rate * seconds) / total for r in ranks]


def in_blocks(nbytes: Sequence[int], groups: Sequence[Sequence[int]], shares: Sequence[float]) -> list[int]:
    """Returns the rank of each layer if each rank gets consecutive layers. A group goes to the rank in whose share the
    middle of the group's bytes lies."""
    owners = [0] * len(nbytes)
    total, done = sum(nbytes), 0.0
    ends = [sum(shares[: n + 1]) for n in range(len(shares))]
    for group in groups:
        mine = sum(nbytes[i] for i in group)
        middle = (done + mine / 2) / max(total, 1)
        rank = next((n for n, end in enumerate(ends) if middle <= end), len(shares) - 1)
        for i in group:
            owners[i] = rank
        done += mine
    return owners


def in_turn(nbytes: Sequence[int], groups: Sequence[Sequence[int]], shares: Sequence[float]) -> list[int]:
    """Returns the rank of each layer if layers alternate: each group goes to the rank that is furthest behind its
    share."""
    owners = [0] * len(nbytes)
    held = [0.0] * len(shares)
    done = 0
    for group in groups:
        mine = sum(nbytes[i] for i in group)
        done += mine
        rank = max(range(len(shares)), key=lambda r: (shares[r] * done - held[r], -r))
        held[rank] += mine
        for i in group:
            owners[i] = rank
    return owners
