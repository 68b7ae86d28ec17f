"""Ranks that tests use one after the other are not those that another test has spoilt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rank_processes
from outcore_cluster.link_protocol import Link
from rank_processes import WaitingRanks


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitingRanks]:
    """Of one rank each, as starting takes its time."""
    monkeypatch.setattr(rank_processes, "RankProcesses", lambda _, env, made=rank_processes.RankProcesses: made(1, env))
    ranks = WaitingRanks(tmp_path)
    yield ranks
    ranks.close()


def who(link: Link) -> tuple[int, str]:
    return os.getpid(), os.environ["OUTCORE_CACHE"]


def raises(link: Link) -> None:
    raise ValueError("spoilt")


def test_they_wait_for_the_next_and_are_made_anew_after_a_failure(waiting: WaitingRanks, tmp_path: Path) -> None:
    ((first, cache),) = waiting.two().run(who)
    assert cache == str(tmp_path), "what is known of this machine changes no test"
    assert waiting.two().run(who) == [(first, cache)]
    with pytest.raises(RuntimeError, match="spoilt"):
        waiting.two().run(raises)
    ((other, _),) = waiting.two().run(who)
    assert other != first
