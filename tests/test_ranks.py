"""Models whose layers lie on several ranks, which are processes: they write what one rank writes, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import rank_work
import zoo
from rank_processes import RankProcesses

TYPES = [
    "afm7",  # later layers read what an earlier one keeps
    "dbrx",  # evaluates on the way
    "deepseek_v32",  # two caches a layer
    "gemma4",  # layers put out more than hidden states, and keys that others use
    "llama",  # sliding windows beside full attention
    "llama4",  # caches in chunks
    "qwen3_next",  # recurrent layers
    "rwkv7",  # a layer's values go on to all others
]

HELD: dict[str, dict[str, Any]] = {
    "in memory": {},
    "streamed": {"resident": 0, "head_resident": False},
    "half": {"resident": 1},
}

WAYS = {"dbrx": ["streamed"], "gemma4": ["in memory"], "qwen3_next": ["in memory", "streamed"]}
"""In which ways a rank holds its layers; the others one of them, and stream one."""

HOW = {"in memory": [{False}], "streamed": [{True}], "half": [{True}, {True, False}]}
TOKENS = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@functools.cache
def alone(folder: Path, tokens: int) -> list[tuple[int, str]]:
    """A text of one rank."""
    return rank_work.text(None, folder, tokens)[0]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_text_and_its_logits_are_those_of_one_rank(model_type: str, two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path)
    expected = alone(folder, TOKENS)
    for name in WAYS.get(model_type, ["half"]):
        options = HELD[name]
        (found, did), (told, other) = two.run(rank_work.with_options, folder, TOKENS, options)
        assert found == expected, name
        assert [t for t, _ in told] == [t for t, _ in expected], name
        # A rank may have no more than the one layer that it keeps.
        assert {did["streams"], other["streams"]} in HOW[name]
        assert did["layers"] and other["layers"] and did["misses"] == other["misses"] == 0


def test_what_a_rank_holds_is_its_own(two: RankProcesses, llama: Path) -> None:
    """Neither weights nor keys of others' layers are in memory, and their caches count tokens all the same."""
    weights, caches, tokens = rank_work.held(rank_work.Alone(), llama)  # type: ignore[arg-type]
    mine, theirs = two.run(rank_work.held, llama)
    assert mine[2] == theirs[2] == tokens == 40
    assert mine[1] + theirs[1] == caches
    assert 0.3 * weights < theirs[0] < mine[0] < 0.7 * weights
    assert weights < mine[0] + theirs[0] < 1.1 * weights, "embeddings are on both"


def test_chunks_of_a_prompt_follow_each_other_over_ranks(two: RankProcesses, llama: Path) -> None:
    """So that each computes while the other does: on both the same, unless another length was asked for."""
    (step, ttft_s), (other, _) = two.run(rank_work.cut_into, llama, {})
    (asked, one_s), (same, _) = two.run(rank_work.cut_into, llama, {"prefill_step_size": 512})
    assert step == other in (32, 64, 128) and asked == same == 512
    assert ttft_s < 0.7 * one_s


def test_no_slot_is_held_while_others_are_waited_for(two: RankProcesses, llama: Path) -> None:
    """What was computed gives its slot back first, so that the disk goes on: in blocks that is a read of each sweep.
    The second rank holds what it is about to compute from."""
    first, second = two.run(rank_work.slots_held, llama)
    assert first == (0, 0) and max(second) <= 1  # less where this machine is so busy that nobody had to wait


@pytest.mark.parametrize(("model_type", "resident"), [("llama", None), ("qwen3_next", 0)])
def test_drafts_are_the_first_ranks(model_type: str, resident: int | None, two: RankProcesses, tmp_path: Path) -> None:
    """What it guesses is checked in one sweep by all, and what was wrong is taken back from all caches."""
    folder = zoo.save_checkpoint(model_type, tmp_path)
    expected = alone(folder, 8)
    (found, did), (told, other) = two.run(rank_work.drafted, folder, [t for t, _ in expected], {"resident": resident})
    assert found == expected
    assert [t for t, _ in told] == [t for t, _ in expected]
    assert did["drafted"] == other["drafted"] > did["accepted"] == other["accepted"] > 0


def test_sequences_that_share_passes(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_next", tmp_path)
    prompts, tokens = [rank_work.PROMPT, [3, 4, 5], [9] * 20], [3, 5, 7]
    expected, _ = rank_work.batch(None, folder, prompts, tokens, resident=0)
    found = two.run(rank_work.batch_with_options, folder, prompts, tokens, {})
    assert found[0][0] == found[1][0] == expected
    assert [len(t) for t in expected] == tokens


def test_quantized_keys_and_values(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3", tmp_path)
    how = {"kv_bits": 8, "quantized_kv_start": 20, "kv_group_size": 32}  # of a prompt of 40 tokens
    expected, _ = rank_work.text(None, folder, TOKENS, how=how)
    assert expected != alone(folder, TOKENS)
    (found, _), _ = two.run(rank_work.with_options, folder, TOKENS, {"resident": 1, "how": how})
    assert found == expected


def test_experts_in_pools(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("deepseek_v3", tmp_path)
    expected, did_alone = rank_work.text(None, folder, TOKENS, experts=2)
    # One that has pools drafts nothing, so nobody does.
    (found, did), (_, other) = two.run(rank_work.with_options, folder, TOKENS, {"experts": 2, "draft": "ngram"})
    assert found == expected
    assert did["pools"] + other["pools"] == did_alone["pools"] > 0


def test_experts_in_pools_of_sequences_that_share_passes(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_next", tmp_path)
    prompts, tokens = [rank_work.PROMPT, [3, 4, 5], [9] * 20], [3, 5, 7]
    texts, _ = rank_work.batch(None, folder, prompts, tokens, experts=2)
    found = two.run(rank_work.batch_with_options, folder, prompts, tokens, {"experts": 2, "in_turn": False})
    assert found[0][0] == found[1][0] == texts


def test_texts_are_drawn_by_the_first_rank_and_go_on(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_next", tmp_path)
    expected = rank_work.conversation(None, folder, {"resident": 0})
    assert two.run(rank_work.conversation, folder, {"resident": 1, "in_turn": False}) == [expected] * 2


def test_processors_and_samplers_that_look_at_numbers(two: RankProcesses, llama: Path) -> None:
    """They are called when what they look at has been computed, and not on what other ranks have not sent yet."""
    expected = rank_work.choosing_by_numbers(None, llama, {})
    assert two.run(rank_work.choosing_by_numbers, llama, {})[0] == expected


def test_no_memory_for_a_token(two: RankProcesses, tmp_path: Path) -> None:
    """Caches hold what they hold on one rank."""
    folder = zoo.save_checkpoint("qwen3_next", tmp_path)
    first, _, second = expected = rank_work.failing(None, folder, {})
    assert len(first) == 6 and len(second) == 6
    assert two.run(rank_work.failing, folder, {}) == [expected] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_to_stream_in_the_middle_of_a_text(rank: int, two: RankProcesses, llama: Path) -> None:
    expected = alone(llama, 12)
    both = two.run(rank_work.shedding, llama, 12, rank)
    assert both[0][0] == expected
    read = both[rank][1]
    assert read[3] == 0 < read[5] < read[7] and read[11] - read[10] < read[6] - read[5]
    assert both[1 - rank][1][-1] == 0


def test_layers_in_memory_before_a_head_that_is_streamed(two: RankProcesses, llama: Path) -> None:
    """Of a prompt's chunks but the last no head is computed; what they leave in caches waits for other ranks all the
    same."""
    expected = alone(llama, TOKENS)
    options = {"resident": 2, "head_resident": False, "in_turn": False}
    assert two.run(rank_work.with_options, llama, TOKENS, options)[0][0] == expected


def test_perplexity_is_the_first_ranks(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("gemma4", tmp_path)
    expected = rank_work.perplexity(None, folder, {})
    first, other = two.run(rank_work.perplexity, folder, {"resident": 0})
    assert first == expected != other, "who has no logits has no figure"


def test_a_model_that_cannot_be_cut_is_refused(two: RankProcesses, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("nanbeige", tmp_path)
    for told in two.run(rank_work.with_options, folder, TOKENS, {}):
        assert "cannot be shared out over several machines" in told


@pytest.mark.parametrize("late", [0, 1])
def test_others_that_are_late_are_no_part_of_a_pass(late: int, two: RankProcesses, llama: Path) -> None:
    """Whether they are waited for before the last streamed layer or behind it."""
    found = two.run(rank_work.while_others_are_late, llama, late)
    seconds = found[1 - late]
    assert len(seconds) >= 6 and min(seconds) > 0 and sorted(seconds)[3] < rank_work.LATE_S
