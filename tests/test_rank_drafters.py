"""Drafters that read the states of layers which lie on several ranks: they guess what they guess on one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

import drafter_files
import drafter_parity
import mtp_heads
import rank_work
import zoo
from outcore.errors import UsageError
from outcore.plan.joint_plan import Draft
from outcore_cluster.cuts import BATCH, TOKENS, Cuts, LayerCall, Shape
from outcore_cluster.sharing import check_sendable
from rank_processes import RankProcesses

MADE = 8


def dense(folder: Path) -> tuple[Path, str]:
    """A drafter whose head knows a few tokens, which the text says: so some guesses are right."""
    model = zoo.save_checkpoint("llama", folder / "model")
    text = [token for token, _ in rank_work.text(None, model, MADE)[0]]
    return model, str(drafter_files.save_eagle3("llama", folder / "drafter", sorted({*text[3:7]})))


def hybrid(folder: Path) -> tuple[Path, str]:
    """It also has a head in its own folder, which reads what the model's own does: that is the first rank's."""
    model = zoo.save_checkpoint("qwen3_5", folder / "model")
    mtp_heads.save_head("qwen3_5", model)
    return model, str(drafter_files.save_eagle3("qwen3_5", folder / "drafter"))


def of_blocks(folder: Path) -> tuple[Path, str]:
    sizes = {"hidden_size": drafter_parity.HIDDEN, "vocab_size": drafter_parity.VOCABULARY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | sizes | {"num_hidden_layers": drafter_parity.LAYERS})
        model = zoo.save_checkpoint("qwen3", folder / "model")
    return model, str(drafter_parity.write_checkpoint("dspark-certain", folder / "drafter"))


WAYS: dict[Any, list[dict[str, Any]]] = {
    dense: [{"resident": 0, "in_turn": False}, {"draft_bits": 4}],
    hybrid: [{"resident": 1}, {"resident": 0, "draft": "mtp"}],
}


@pytest.mark.parametrize("kind", WAYS)
def test_what_drafts_is_shown_the_states_of_all_ranks(kind: Any, two: RankProcesses, tmp_path: Path) -> None:
    folder, draft = kind(tmp_path)
    for way in WAYS[kind]:
        options = {"draft": draft, **way}
        expected, alone, guesses = rank_work.guessed(None, folder, MADE, options)
        (found, did, mine), (told, other, theirs) = two.run(rank_work.guessed, folder, MADE, options)
        assert found == expected and [t for t, _ in told] == [t for t, _ in expected]
        assert mine == guesses and len(mine) > 8 and theirs == []
        assert did["drafted"] == other["drafted"] == alone["drafted"]
        assert did["accepted"] == other["accepted"] == alone["accepted"] and (kind is not dense or did["accepted"])


def test_three_ranks_and_one_that_is_interrupted(tmp_path: Path) -> None:
    folder, draft = of_blocks(tmp_path)
    three = RankProcesses(3)
    try:
        options = {"draft": draft, "resident": 0}
        expected, _, guesses = rank_work.guessed(None, folder, MADE, options)
        for in_turn in (True, False):
            options["in_turn"] = in_turn
            (found, *did, mine), *others = three.run(rank_work.guessed, folder, MADE, options)
            assert found == expected and mine == guesses
            assert [each["layers"] for each in (*did, *(d for _, d, _ in others))] == [2, 2, 2]
        text = [t for t, _ in expected]
        ended = three.run(rank_work.interrupted, folder, MADE, options, 1)
        assert [error for _, error, _ in ended] == ["LinkError", "KeyboardInterrupt", "LinkError"]
        for told, _, held in ended:
            assert 4 <= len(told) < MADE and told == text[: len(told)]
            assert {*held} <= {len(rank_work.PROMPT) + len(told) - 1}, "caches hold the text, not what was under way"
    finally:
        three.close()


def test_memory_is_counted_on_both_sides(two: RankProcesses, tmp_path: Path) -> None:
    """The drafter and the states of a text on the first rank, and a chunk's on their way."""
    folder, draft = hybrid(tmp_path)
    plain, drafted = (two.run(rank_work.least_memory, folder, {"draft": d, "resident": 0}) for d in ("ngram", draft))
    assert drafted[0] - plain[0] > drafted[1] - plain[1] > 0


def test_states_that_cannot_be_sent_are_refused_by_name() -> None:
    shape, profile = Shape((BATCH, TOKENS, 8), mx.float32), cast(Any, SimpleNamespace(trace=None))
    layers = {n: LayerCall(..., leaves, None, ()) for n, leaves in enumerate([(shape,), (None,), ()])}
    cuts = Cuts(calls=layers)
    for reads, owners in ((0,), [1, 1, 1]), ((1, 2), [1, 0, 0]):
        check_sendable(Draft("drafter", "d", reads=reads), profile, cuts, dict(enumerate(owners)))
    for reads, owners in ((-1,), [0, 0, 0]), ((0, 1), [0, 1, 0]), ((2,), [0, 0, 2]):
        with pytest.raises(UsageError, match=r"draft d: it reads states .* cannot be sent to another machine; give"):
            check_sendable(Draft("drafter", "d", reads=reads), profile, cuts, dict(enumerate(owners)))
