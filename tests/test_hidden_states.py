"""The last hidden states of a text's tokens: which are kept, and which are forgotten."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outcore_drafts.mtp.hidden_states import HiddenStates, HiddenTap


@pytest.fixture
def states() -> tuple[HiddenStates, Any]:
    """A window of eight tokens over a norm that puts out each token's place; computes so many from one on."""
    norm = nn.Identity()
    hidden = HiddenStates(HiddenTap(norm), window=8)

    def compute(first: int, count: int) -> None:
        with hidden.watch(first, count):
            norm(mx.arange(first, first + count).reshape(1, count, 1))
        mx.eval(hidden.arrays)
        hidden.settle()

    return hidden, compute


def test_hidden_states_are_those_of_the_latest_tokens(states: tuple[HiddenStates, Any]) -> None:
    hidden, compute = states
    hidden.expect(30)
    for first in (0, 10, 20):  # the first two end before the window
        compute(first, 10)
    assert hidden.end == 30
    compute(30, 1)
    taken = hidden.take(0)
    assert taken is not None and taken[0] == 23 and taken[1].reshape(-1).tolist() == list(range(23, 31))
    assert hidden.take(0) is None and hidden.end == 31


def test_hidden_states_of_given_up_tokens_are_forgotten(states: tuple[HiddenStates, Any]) -> None:
    hidden, compute = states
    compute(0, 4)
    hidden.cut(2)
    compute(1, 3)  # 1 is computed again, in front of two others
    taken = hidden.take(1)
    assert taken is not None and taken[0] == 1 and taken[1].reshape(-1).tolist() == [1, 2, 3]
    compute(6, 2)  # what was between is not known
    taken = hidden.take(4)
    assert taken is not None and taken[0] == 6 and hidden.end == 8


def test_of_a_prompt_s_pass_only_the_window_is_kept_and_goes_in_pieces(states: tuple[HiddenStates, Any]) -> None:
    hidden, compute = states
    hidden.expect(30)
    compute(0, 29)
    assert [a.shape for a in hidden.arrays] == [(1, 7, 1)] and hidden.end == 29
    compute(29, 1)
    compute(30, 2)
    taken = hidden.take_pieces(0, 3)
    assert taken is not None and taken[:2] == (24, 8)
    assert [piece.reshape(-1).tolist() for piece in taken[2]] == [[24, 25, 26], [27, 28, 29], [30, 31]]
    assert hidden.take_pieces(0, 3) is None
