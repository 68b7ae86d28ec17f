"""Ranks that are told other things, or have room for others: no text is made of two, and all go on with the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rank_work
import zoo
from outcore_cluster.transport import RankRoom
from rank_processes import RankProcesses

A, B = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("options", [{}, {"resident": 0}], ids=["in memory", "streamed"])
def test_what_one_rank_refuses_all_refuse(options: dict[str, Any], two: RankProcesses, llama: Path) -> None:
    """Otherwise the one would begin the next text, and the others take that for theirs."""
    texts = [((A, A), (9, 9), None), ((A, A), (9, 9), (160, 3)), ((B, B), (9, 9), None)]
    alone = rank_work.Alone()
    one = [rank_work.told_apart(alone, llama, [text], options)[0] for text in (texts[0], texts[2])]  # type: ignore[arg-type]
    first, second = two.run(rank_work.told_apart, llama, texts, options)
    assert first == [one[0], "BudgetError: another machine has too little memory: shorten this text", one[1]]
    assert second == [one[0], "BudgetError: no room for 6", one[1]]


def test_ranks_that_are_asked_other_things_say_so(two: RankProcesses, llama: Path) -> None:
    texts = [((A, B), (9, 9), None), ((B, B), (9, 9), None)]
    found = two.run(rank_work.told_apart, llama, texts, {})
    for refused, text in found:
        assert refused.startswith("UsageError: another machine was given another prompt")
        assert len(text) == 9
    assert found[0] == found[1]


def test_an_answer_is_as_long_as_the_shortest_that_is_asked_for(two: RankProcesses, llama: Path) -> None:
    """Of which one rank knows no end, as nothing is streamed there."""
    texts = [((A, A), (-1, 4), None), ((A, A), (-1, -1), None), ((A, A), (7, 9), None)]
    found = two.run(rank_work.told_apart, llama, texts, {})
    assert [len(text) for text in found[0]] == [4, 9, 7] and found[0] == found[1]


def test_no_token_at_all_is_nothing_that_a_rank_has_no_room_for() -> None:
    """As a model without a limit of positions is asked, in memory."""
    link: Any = type("Link", (), {"rank": 0, "gather": lambda self, value: [value]})()
    assert RankRoom(link, link).text_room(lambda: A, lambda: (0, 16), asked=True) == (0, 16)
