"""Ranks that tests use one after the other are not those that another test has spoilt."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import rank_processes
from outcore.link.link import Link
from rank_processes import WaitingRanks


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitingRanks]:
    """Of one rank each, as starting takes its time."""
    monkeypatch.setattr(rank_processes, "RankProcesses", lambda _, made=rank_processes.RankProcesses: made(1))
    ranks = WaitingRanks()
    yield ranks
    ranks.close()


def who(link: Link) -> int:
    return os.getpid()


def raises(link: Link) -> None:
    raise ValueError("spoilt")


def test_they_wait_for_the_next_and_are_made_anew_after_a_failure(waiting: WaitingRanks) -> None:
    first = waiting.two().run(who)
    assert waiting.two().run(who) == first
    with pytest.raises(RuntimeError, match="spoilt"):
        waiting.two().run(raises)
    assert waiting.two().run(who) != first
