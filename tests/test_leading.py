"""Sequences that come and go on ranks that are processes: the first one decides, and each text is one rank's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

import rank_work
import zoo
from memory_link import memory_links
from outcore.decode.sequence_room import SequenceRoom
from outcore.errors import BudgetError
from outcore_cluster.foreign import hold_alike
from outcore_cluster.transport import RankRoom
from rank_processes import RankProcesses

TYPES = [
    "dbrx",  # evaluates on the way: one sequence at a time where it is streamed
    "gpt_oss",  # sliding windows
    "llama",
    "qwen3_next",  # recurrent layers
]

REPEAT = {"dbrx", "llama"}
"""Whose random weights repeat something, so that there is something to draft."""

WAYS: dict[str, list[dict[str, Any]]] = {
    "dbrx": [{"draft": "ngram", "alone": 1}],
    "gpt_oss": [{"resident": 0}],
    "llama": [{"resident": 1, "draft": "ngram"}, {"draft": "ngram", "alone": 0}],
    "qwen3_next": [{"draft": "ngram", "alone": 1}, {"resident": 0, "draft": "self:4"}],
}
"""How ranks hold their layers, and what drafts."""

AGAIN = [7, 8, 9, 10, 11, 12] * 4
"""Repeats itself, so that drafts are made and kept."""

JOINING: dict[int, list[tuple[int, list[int], int, int | None]]] = {
    0: [(0, rank_work.PROMPT[:20], 6, None)],
    2: [(1, [3, 4, 5], 4, 5), (2, AGAIN, 7, None)],
    3: [(3, [9] * 20, 30, None)],
    # The first ones have ended by then, or are about to.
    8: [(4, [1, 2], 4, 11)],
    # By then all have, and nobody asks for a while; the next one has drafts, which another ends in the middle.
    20: [(5, AGAIN, 16, None)],
    24: [(6, [5, 6], 3, None)],
}
LEAVING = {6: [3]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("model_type", TYPES)
def test_texts_are_those_of_one_rank_whoever_comes_and_goes(
    model_type: str, two: RankProcesses, tmp_path: Path
) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path)
    expected = rank_work.sequences(None, folder, JOINING, LEAVING, resident=0)["tokens"]
    expected.pop(3, None)
    assert {uid: len(tokens) for uid, tokens in expected.items()} == {0: 6, 1: 4, 2: 7, 4: 4, 5: 16, 6: 3}
    for options in WAYS[model_type]:
        first, other = two.run(rank_work.sequences_with_options, folder, JOINING, LEAVING, options)
        left = first["tokens"].pop(3, [])
        assert first["tokens"] == expected, options
        assert not first["failed"] and not other["running"]
        if "alone" in options:
            assert [first["streams"], other["streams"]] == [options["alone"] == 0, options["alone"] == 1]
        assert model_type == "dbrx" or (first["most"] == 4 and len(left) == 4)
        if model_type in REPEAT:
            # What evaluates on the way is not verified on ranks, whatever each of them streams.
            assert (first["drafted"] > 0) == ("draft" in options and model_type != "dbrx"), options
        assert first["by"] == options.get("draft")


def test_what_a_requests_own_code_raises_ends_it_alone(two: RankProcesses, llama: Path) -> None:
    joining: dict[int, Any] = {
        0: [(0, rank_work.PROMPT, 12, None), (1, [3, 4, 5], 9, -4)],
        # The next one is alone when its own is called.
        20: [(2, [9] * 20, 9, -3)],
        30: [(3, [1, 2], 6, 11)],
    }
    expected = rank_work.sequences(None, llama, joining, {}, resident=0)
    first, _ = two.run(rank_work.sequences_with_options, llama, joining, {}, {"resident": 0})
    assert first == expected | {"streams": True, "drafted": 0}
    assert set(first["failed"]) == {1, 2} and [len(t) for t in first["tokens"].values()] == [12, 3, 2, 6]


def test_a_sequence_joins_when_all_ranks_have_room(two: RankProcesses, llama: Path) -> None:
    joining = {0: [(n, [n + 3] * (n + 1), 6 + n, None) for n in range(5)]}
    expected = rank_work.sequences(None, llama, joining, {}, resident=0)
    first, other = two.run(rank_work.sequences_with_options, llama, joining, {}, {"resident": 0, "room": 2})
    assert first["tokens"] == expected["tokens"] and not first["failed"] and not other["running"]
    assert expected["most"] == 5 and first["most"] == 2
    # Not even one alone: it fails, and ranks go on.
    first, _ = two.run(rank_work.sequences_with_options, llama, joining, {}, {"resident": 0, "room": 0})
    assert (
        first["failed"] == dict.fromkeys(range(5), "another machine has too little memory: shorten this text")
        and not first["tokens"]
    )


def test_a_text_that_outgrows_memory_waits_or_ends_on_all_ranks_and_changes_no_text(
    two: RankProcesses, llama: Path
) -> None:
    joining: dict[int, Any] = {0: [(0, [3, 4, 5] * 4, 70, None)], 5: [(1, [7] * 9, 50, None), (2, [8] * 9, 20, 5)]}
    expected = rank_work.sequences(None, llama, joining, {}, resident=0)["tokens"]
    options: dict[str, Any] = {"resident": 0, "draft": "ngram", "context": 24, "prompt": 16}
    options["memory"] = max(two.run(rank_work.smallest, llama, options)) + 15_000
    first, other = two.run(rank_work.sequences_with_options, llama, joining, {}, options)
    assert first["most"] == 3 and first["full"] and not first["failed"] and not other["running"]
    for uid, tokens in first["tokens"].items():
        assert tokens == expected[uid][: len(tokens)] and (len(tokens) < len(expected[uid])) == (uid in first["full"])


def test_a_copy_that_drafts_is_given_up_for_company(two: RankProcesses, llama: Path) -> None:
    """Whose caches of others' layers it filled go on with theirs, which nothing fills."""
    folder = llama
    joining: dict[int, Any] = {0: [(0, [3, 4, 5] * 3, 30, None)], 8: [(1, [7] * 9, 20, None), (2, [8] * 9, 14, 5)]}
    joining[14] = [(3, AGAIN, 10, None)]
    expected = rank_work.sequences(None, folder, joining, {}, resident=0)["tokens"]
    options: dict[str, Any] = {"resident": 0, "draft": "self:4", "context": 40, "prompt": 24}
    options["memory"] = max(two.run(rank_work.smallest, folder, options))
    first, _ = two.run(rank_work.sequences_with_options, folder, joining, {}, options)
    assert first["tokens"] == expected and not first["failed"]
    assert (first["by"], first["most"]) == ("ngram", 4) and first["drafted"] > 0


def _cache(width: int, tokens: int = 3) -> CacheList:
    """Keys and values, and a recurrent layer's states, of this width; 0: as of another rank's layer."""
    kv, states = KVCache(), ArraysCache(1)
    held = mx.ones((1, 2 if width else 1, tokens, width))
    kv.update_and_fetch(held, held)
    states[0] = mx.ones((1, 4, width)) if width else mx.zeros((1, 0))
    return CacheList(kv, states)


@pytest.mark.parametrize("widths", [(8, 0), (0, 8), (8, 8), (0, 0)])
def test_what_is_put_together_holds_nothing_where_one_of_them_does(widths: tuple[int, int]) -> None:
    caches = [_cache(width, tokens) for width, tokens in zip(widths, (3, 5), strict=True)]
    hold_alike(*caches)
    merged = CacheList.merge(caches)
    kv, states = merged[0], merged[1]
    assert kv.keys.shape == ((2, 2, 5, 8) if all(widths) else (2, 1, 5, 0)) and list(kv.offset) == [3, 5]
    assert states[0].shape == ((2, 4, 8) if all(widths) else (2, 0))


class Running(SimpleNamespace):
    """A model that runs, as far as it is looked at here."""


ROUNDED = SimpleNamespace(rounding=SimpleNamespace(exact_batch=False))


class Room(SequenceRoom):
    """One that has room for some tokens, and cuts prompts into chunks of its own."""

    def __init__(self, link: Any, tokens: int, step: int) -> None:
        no_draft = SimpleNamespace(layers=SimpleNamespace(draft=None))
        state: Any = Running(size=None, residency=no_draft, profile=ROUNDED, plan=SimpleNamespace(prefill_step=step))
        state.transport = RankRoom(link, state)
        super().__init__(state)
        self.tokens, self.asked = tokens, 0

    def _fit_here(self, lengths: Sequence[int], *prompts: Sequence[int]) -> int:
        self.asked += 1
        if max(lengths) + 1 > self.tokens:
            raise BudgetError(f"no more than {self.tokens}")
        return self.tokens


def test_room_and_chunks_are_the_least_of_all_and_asked_for_when_that_is_outgrown() -> None:
    links = memory_links(2, patience_s=5.0)
    rooms = [Room(links[0], 64, 16), Room(links[1], 96, 8)]

    def fit(lengths: Sequence[int], joining: Sequence[int] = ()) -> list[str]:
        found = ["", ""]

        def ask(rank: int) -> None:
            try:
                rooms[rank].fit(lengths, joining)
            except BudgetError as e:
                found[rank] = str(e)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert fit([30, 20], [30, 20]) == ["", ""] and [room.step for room in rooms] == [8, 8]
    for longest in (31, 40, 63):
        assert fit([longest, 21]) == ["", ""]
    assert [room.asked for room in rooms] == [1, 1], "what was agreed on is not asked for again"
    assert fit([64, 21]) == ["no more than 64", "another machine has too little memory: shorten this text"]
    # Whoever had room took it, so it is seen to anew; and for fewer sequences too.
    assert fit([40, 21]) == fit([40]) == ["", ""] and [room.asked for room in rooms] == [4, 4]
