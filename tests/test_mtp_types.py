"""Heads of further types, from originals' tensors: what they put out, and texts that are those of plain decoding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mtp_heads
import mtp_originals
import mtp_reference
import zoo
from outcore.model.checkpoint import open_checkpoint
from outcore.model.lazy_model import open_lazily
from outcore.model.mtp_head import MtpHead, open_mtp

TOKENS = 11
"""More than windows and indexers of the tiny models let through."""


OTHER_HEADS = re.compile(r"model\.mtp_layers\.[1-9]|model\.mtp\.layers\.[1-9]|mtp\.layers\.[23]")
"""Names of tensors of a second head or a third."""


def opened(model_type: str, tmp_path: Path) -> MtpHead:
    """The head of an original beside a converted model's."""
    lazy = open_lazily(open_checkpoint(zoo.save_checkpoint(model_type, tmp_path / "model")))
    made = open_mtp(lazy, mtp_heads.save_head(model_type, tmp_path / "original"))
    assert made is not None
    return made


def inputs() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    return random.normal(size=(TOKENS, mtp_originals.HIDDEN)), 2 * random.normal(size=(TOKENS, mtp_originals.HIDDEN))


def in_parts(head: MtpHead, embedded: Any, states: Any, cuts: list[int]) -> Any:
    """What a head puts out for tokens that come in parts, each of the first of which is guessed once in vain."""
    cache = head.make_cache()
    out = []
    for first, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        if first:
            wrong = mx.array(np.ones((1, 2, mtp_originals.HIDDEN)), mx.float32)
            mx.eval(head(wrong, -wrong, cache))
            cache.trim(2)
        here = (mx.array(a[None, first:end], mx.float32) for a in (embedded, states))
        out.append(np.array(head(*here, cache)[0]))
    return np.concatenate(out)


@pytest.mark.parametrize("cuts", [[], [7], list(range(1, TOKENS))])
@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_a_head_puts_out_what_its_original_s_tensors_say(model_type: str, cuts: list[int], tmp_path: Path) -> None:
    """At once, in two parts and token by token, with guesses that were taken back between."""
    embedded, states = inputs()
    tensors = mtp_originals.original(model_type)
    want = mtp_reference.states_of(model_type, tensors, embedded, states)
    got = in_parts(opened(model_type, tmp_path), embedded, states, cuts)
    np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("model_type", mtp_originals.TYPES)
def test_the_comparison_sees_a_wrong_order_and_each_norm(model_type: str) -> None:
    """Without which it would be worth nothing: the plain computation with one thing wrong is far off."""
    embedded, states = inputs()
    tensors = mtp_originals.original(model_type)
    want = mtp_reference.states_of(model_type, tensors, embedded, states)
    wrong = [mtp_reference.states_of(model_type, tensors, embedded, states, swapped=True)]
    norms = [name for name in tensors if "norm" in name and not OTHER_HEADS.match(name)]
    assert len(norms) >= 5
    for name in norms:
        without = {**tensors, name: np.full_like(tensors[name], name.endswith(".weight"))}
        wrong.append(mtp_reference.states_of(model_type, without, embedded, states))
    for name, out in zip(["order", *norms], wrong, strict=True):
        assert np.abs(out - want).max() > 0.01, name
