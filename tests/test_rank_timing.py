"""Passes over several ranks, in numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outcore_cluster.sharing import RankMeans, share_layers, shared_pass_s
from outcore_cluster.timing import LinkTimes, RankStage, pass_ends, steady_s

LAYERS, READ_S, COMPUTE_S = 16, 0.1, 0.001


def timing(owners: list[int], ranks: int, hop_s: float = 0.0, rate: float = 1e12, **times: float) -> Any:
    """What ``steady_s`` and ``pass_ends`` take."""
    passes, sent = int(times.get("passes", 1)), int(times.get("sent", 0))
    compute, sizes = (times.get("compute_s", COMPUTE_S),) * passes, (sent,) * passes
    stages = [RankStage(o, compute, times.get("read_s", READ_S), sizes) for o in owners]
    return stages, [3] * ranks, LinkTimes(hop_s, rate)


def sweep(owners: list[int], ranks: int, hop_s: float = 0.0, **times: float) -> float:
    return steady_s(*timing(owners, ranks, hop_s, **times))


def test_one_rank_reads_all_of_it() -> None:
    assert sweep([0] * 16, 1) == pytest.approx(1.6, rel=0.01)


def test_ranks_that_alternate_read_side_by_side() -> None:
    """Half and a quarter of the time; in blocks more, since a rank reads no further ahead than it has slots."""
    assert sweep([0, 1] * 8, 2) / sweep([0] * 16, 1) == pytest.approx(0.50, abs=0.01)
    assert sweep([0, 1, 2, 3] * 4, 4) / sweep([0] * 16, 1) == pytest.approx(0.25, abs=0.01)
    assert sweep([0] * 8 + [1] * 8, 2) / sweep([0] * 16, 1) == pytest.approx(0.63, abs=0.02)
    assert sweep([n // 8 for n in range(32)], 4) / sweep([0] * 32, 1) > 0.4


def test_what_is_in_memory_takes_its_computing_and_hops() -> None:
    assert sweep([0] * 16, 1, read_s=0, compute_s=0.01) == pytest.approx(0.16)
    # From rank to rank and back; the first knows the token without being told.
    assert sweep([0] * 8 + [1] * 8, 2, 0.005, read_s=0, compute_s=0.01) == pytest.approx(0.16 + 2 * 0.005)
    assert sweep([1] * 16, 2, 0.005, read_s=0, compute_s=0.01) == pytest.approx(0.16 + 2 * 0.005)


def test_the_first_pass_reads_everything() -> None:
    """Of the next a part is in the slots already."""
    assert pass_ends(*timing([0] * 16, 1)) == pytest.approx([1.6], rel=0.01)
    in_blocks = timing([0] * 8 + [1] * 8, 2)
    # While the first rank reads its eight, the other fills its three slots.
    assert pass_ends(*in_blocks) == pytest.approx([1.3], rel=0.01) != [steady_s(*in_blocks)]


def test_bytes_take_the_time_of_the_link() -> None:
    """The passes behind the first wait until it is sent, so the slowest of computing and sending is what counts."""
    how = {"read_s": 0, "compute_s": 0.01, "passes": 8, "sent": 10**6}
    slow, fast = (steady_s(*timing([0] * 8 + [1] * 8, 2, rate=rate, **how)) for rate in (5e6, 1e9))
    assert fast == pytest.approx(9 * 0.08 + 0.001 * 2, abs=0.01)
    assert slow == pytest.approx(0.08 * 2 + 8 * 0.2 + 0.2, abs=0.01)


def test_passes_follow_each_other_over_the_ranks() -> None:
    whole = sweep([0] * 16, 1, read_s=0, compute_s=0.01, passes=8)
    assert whole == pytest.approx(8 * 0.16)
    assert sweep([0] * 8 + [1] * 8, 2, read_s=0, compute_s=0.01, passes=8) < 0.6 * whole


def test_windows_are_larger_where_hops_cost_more() -> None:
    def hops(hop_s: float) -> int:
        owners = share_layers([10**8] * 16, [(i,) for i in range(16)], [RankMeans(0, 1e9)] * 2, hop_s)
        return sum(a != b for a, b in itertools.pairwise(owners))

    assert hops(0.0001) == 15 > hops(0.1) >= hops(0.4) >= 1


def test_what_was_chosen_is_the_shortest() -> None:
    nbytes, ranks = [10**8] * 16, [RankMeans(2 * 10**8, 1e9), RankMeans(4 * 10**8, 5e8)]
    chosen = share_layers(nbytes, [(i,) for i in range(16)], ranks)
    for other in ([0, 1] * 8, [0] * 8 + [1] * 8, [0, 0, 1, 1] * 4):
        assert shared_pass_s(nbytes, chosen, ranks, 0.0005) <= shared_pass_s(nbytes, other, ranks, 0.0005) * 1.01
