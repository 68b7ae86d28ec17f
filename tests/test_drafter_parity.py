"""Published drafters give the logits of mlx-vlm's: bit for bit where it is installed, and always those in a file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from drafter_parity import (
    CASES,
    GOLDEN,
    HIDDEN,
    LAYERS,
    SHOWN,
    VOCABULARY,
    Round,
    TargetModel,
    golden_of,
    reference,
    states_of,
    tensors,
    write_checkpoint,
)
from outcore_drafters.config import KINDS
from outcore_drafters.drafter import BlockDrafter, DraftedModel, DraftedText


def drafter_of(name: str) -> BlockDrafter:
    config = CASES[name].config
    kind = next(k for k in KINDS if k.claims(config))
    weights = kind.renamed(tensors(name))
    target = DraftedModel(HIDDEN, VOCABULARY, LAYERS, "qwen3")
    drafter = kind.made(config, {key: tuple(a.shape) for key, a in weights.items()}, target)
    drafter.load_weights(list(weights.items()), strict=False)
    return drafter


def draft(text: DraftedText, round: Round) -> np.ndarray:
    """Takes in a round's tokens in front of the draft, and returns the logits of the draft's rows."""
    text.begin(round.states, mx.array(round.following, mx.int32))
    mx.eval(text.arrays)
    rows = []
    for n in range(len(round.drafted)):
        logits = text.logits(round.drafted[:n])
        assert logits is not None
        rows.append(np.array(logits))
    text.cut()
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_drafters_give_the_logits_that_were_written_down(name: str) -> None:
    text = drafter_of(name).text(TargetModel())
    for number, wanted in enumerate(json.loads(GOLDEN.read_text())[name]):
        states = states_of(name, number, len(wanted["following"]))
        found = draft(text, Round(states, wanted["following"], wanted["drafted"], np.empty(0)))
        shown = np.array(wanted["logits"], np.float32)  # None: nan
        np.testing.assert_allclose(
            np.where(np.isfinite(found[:, SHOWN]), found[:, SHOWN], np.nan), shown, rtol=1e-3, atol=1e-4
        )
        # Another machine may round so that two tokens change places.
        best = found[np.arange(len(found)), wanted["best"]]
        assert (found.max(axis=1) - best < 1e-4).all()


def test_what_was_drafted_in_between_changes_no_later_draft() -> None:
    for name in ("dflash2-windows", "dspark", "eagle3"):
        texts = [drafter_of(name).text(TargetModel()) for _ in range(2)]
        for number, wanted in enumerate(json.loads(GOLDEN.read_text())[name][:3]):
            round = Round(
                states_of(name, number, len(wanted["following"])), wanted["following"], wanted["drafted"], np.empty(0)
            )
            # Others, fewer, and one with tokens that come at once.
            texts[0].begin(round.states, mx.array(round.following, mx.int32))
            assert texts[0].logits([7, 8, 9]) is not None
            texts[0].cut()
            after = np.stack([np.array(texts[0].logits(round.drafted[:n])) for n in range(len(round.drafted))])
            texts[0].cut()
            assert np.array_equal(after, draft(texts[1], round))


def test_blocks_end() -> None:
    for name, wanted in (("dflash", 5), ("dflash2", 4), ("dspark", 6), ("dspark-anchored", 5)):
        text = drafter_of(name).text(TargetModel())
        text.begin(states_of(name, 0, 2), mx.array([1, 2], mx.int32))
        assert text.logits([3] * (wanted - 1)) is not None and text.logits([3] * wanted) is None


@pytest.mark.parametrize("name", CASES)
def test_drafters_give_the_logits_of_mlx_vlm_bit_for_bit(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("mlx_vlm.speculative.drafters", reason="needs the extra parity", exc_type=ImportError)
        rounds = list(reference(name, write_checkpoint(name, tmp_path)))
    # The file is of this version of mlx-vlm, and there is something to compare.
    assert [r["drafted"] for r in golden_of(rounds)] == [r["drafted"] for r in json.loads(GOLDEN.read_text())[name]]
    text = drafter_of(name).text(TargetModel())
    for number, round in enumerate(rounds):
        found = draft(text, round)
        assert np.array_equal(found, round.logits), (number, np.nanmax(np.abs(found - round.logits)))
