"""Layers shared out by memory and disks, in numbers."""

from __future__ import annotations

import itertools

import pytest

from outcore_cluster.sharing import RankMeans, fair_shares, share_layers

LAYERS = [100] * 40
GROUPS = [(i,) for i in range(40)]


def held(owners: list[int], rank: int) -> int:
    return sum(n for n, o in zip(LAYERS, owners, strict=True) if o == rank)


def test_what_fits_together_lies_in_blocks() -> None:
    owners = share_layers(LAYERS, GROUPS, [RankMeans(2500, 1.0), RankMeans(1700, 1.0)])
    assert owners == sorted(owners) and held(owners, 0) <= 2500 and held(owners, 1) <= 1700


def test_what_fits_is_computed_in_equal_times() -> None:
    layers, groups = [100] * 16, [(i,) for i in range(16)]
    for memory in (1000, 1500):
        assert share_layers(layers, groups, [RankMeans(1500, 1.0), RankMeans(memory, 1.0)]).count(0) == 8
    faster = [RankMeans(1500, 1.0, compute_rate=3e10), RankMeans(1500, 1.0, compute_rate=1e10)]
    assert share_layers(layers, groups, faster).count(0) == 12
    assert share_layers(layers, groups, [RankMeans(1200, 1.0), RankMeans(600, 1.0)]).count(0) > 8  # memory decides


def test_what_does_not_fit_is_interleaved() -> None:
    owners = share_layers(LAYERS, GROUPS, [RankMeans(500, 1.0), RankMeans(500, 1.0)])
    assert owners == [0, 1] * 20


def test_disks_end_together() -> None:
    """T of sum(memory + rate T) = bytes, whatever each has."""
    ranks = [RankMeans(400, 20.0), RankMeans(800, 60.0), RankMeans(0, 20.0)]
    shares = fair_shares(4000, ranks)
    seconds = [(4000 * s - r.memory) / r.rate for s, r in zip(shares, ranks, strict=True)]
    assert sum(shares) == pytest.approx(1) and seconds == pytest.approx([28.0] * 3)
    owners = share_layers(LAYERS, GROUPS, ranks)
    assert [held(owners, r) for r in range(3)] == pytest.approx([4000 * s for s in shares], abs=100)
    # Nobody has several layers in a row while another rank waits for its next.
    at = [n for n, o in enumerate(owners) if o == 0]
    assert max(b - a for a, b in itertools.pairwise(at)) <= 5


def test_groups_stay_together() -> None:
    owners = share_layers([100] * 6, [(0,), (1,), (2, 4), (3, 5)], [RankMeans(0, 1.0)] * 2)
    assert owners[2] == owners[4] and owners[3] == owners[5] and set(owners) == {0, 1}


def test_a_block_that_does_not_fit_is_streamed() -> None:
    """Together there is memory for all, but not in whole layers."""
    owners = share_layers([100] * 3, [(0,), (1,), (2,)], [RankMeans(150, 1.0), RankMeans(150, 1.0)])
    assert sorted(owners) == [0, 0, 1] and owners != sorted(owners)


def test_disks_of_which_nothing_is_known_share_equally() -> None:
    assert fair_shares(100, [RankMeans(0, 0.0)] * 4) == [0.25] * 4
