"""Ranks of which one gives up what it has in memory: before the next text all foresee what they take anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import rank_work
import zoo
from rank_processes import RankProcesses


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("how", ["text", "batch"])
def test_what_a_rank_sheds_is_known_to_all_with_the_next_text(how: str, two: RankProcesses, llama: Path) -> None:
    expected = [token for token, _ in rank_work.text(None, llama, 8)[0]]
    first, second = two.run(rank_work.shed_between, llama, how, {"resident": 1})
    for told in (first, second):
        assert told["texts"] == [expected] * 3
        assert told["calls"] == [0, 1, 0], "foreseen anew where something has changed, and only then"
        before, after, then = told["shared"]
        assert before == told["loaded"] and then == after
        assert [part["resident"] for part in before["ranks"]] == [1, 1]
        assert [part["resident"] for part in after["ranks"]] == [1, 0]
        assert after["ranks"][1]["bytes_per_token"] > before["ranks"][1]["bytes_per_token"]
        assert after["predicted_token_s"] > before["predicted_token_s"]
    assert first["shared"] == second["shared"]
    assert (first["resident"], second["resident"]) == (1, 0)
    told = [note for note in first["notes"] if "before" in note]
    assert len(told) == 1 and told[0].startswith("other memory: rank 1 keeps 0 of 2 layers, 1 before; ")
    assert not [note for note in second["notes"] if note.startswith("other memory")]


def test_chunks_follow_what_ranks_hold_in_a_server_too(two: RankProcesses, llama: Path) -> None:
    """One prompt is cut so that ranks compute at the same time, as it is for a text alone."""
    options = {"in_turn": False, "context": 600, "prompt": 500, "resident": 1}
    first, second = two.run(rank_work.shed_between, llama, "room", options)
    assert first["texts"] == second["texts"] == [shared["prefill_step"] for shared in first["shared"]]
    assert first["texts"][0] in (32, 64, 128) and first["calls"] == [0, 1, 0]


@pytest.mark.parametrize("late", [0, 1])
def test_others_that_are_late_are_no_part_of_a_sweep(late: int, two: RankProcesses, llama: Path) -> None:
    """Whether they are waited for before the last streamed layer or behind it."""
    found = two.run(rank_work.while_others_are_late, llama, late)
    seconds = found[1 - late]
    assert len(seconds) >= 6 and min(seconds) > 0 and sorted(seconds)[3] < rank_work.LATE_S
