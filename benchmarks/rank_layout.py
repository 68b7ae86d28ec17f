"""``outcore`` with layers shared out in a given way, whatever would be chosen: what `rank_hosts.py --layout` runs.

python benchmarks/rank_layout.py alternate|blocks COMMAND [FLAGS]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import outcore_cluster.sharing
from outcore.cli.main import main
from outcore_cluster import sharing as shares
from outcore_cluster.sharing import RankMeans


def _alternate(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], ranks: Sequence[RankMeans], hop_s: float = 0.0
) -> list[int]:
    return shares.in_turn(nbytes, groups, shares.fair_shares(sum(nbytes), ranks))


def _blocks(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], ranks: Sequence[RankMeans], hop_s: float = 0.0
) -> list[int]:
    return shares.in_blocks(nbytes, groups, shares.fair_shares(sum(nbytes), ranks))


if __name__ == "__main__":
    outcore_cluster.sharing.share_layers = {"alternate": _alternate, "blocks": _blocks}[sys.argv[1]]
    sys.exit(main(sys.argv[2:]))
