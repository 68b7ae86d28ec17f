"""A model in memory that drafts: any that shares the tokenizer, or a low-bit copy of the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ...modules.cache_rollback import Snapshot
from ...modules.call_values import handles
from ..sampling import DrawForecast, MlxLmSampler
from .proposers import Guess, cut, drawn

PROMPT_STEP = 256
"""Tokens of a prompt that a drafting model computes at a time."""

CATCH_UP = 64
"""Tokens beyond which what is new in a text is a prompt."""

SNAPSHOT_STEP, HELD = 16, 4
"""Guesses after which states are kept to go back to, and how many are held: those of the longest draft."""


class ModelSource:
    """Guesses by a model's own logits.

    Args:
        model: all in memory.
        name: of this source, where chances are counted.
        how: as in ``proposers.drawn``.
        vocabulary: tokens that there are; a model may have logits for more, or fewer.
    """

    cheaper = None

    def __init__(self, model: nn.Module, name: str, how: DrawForecast | MlxLmSampler | None, vocabulary: int) -> None:
        self.name = name
        self._model: nn.Module | None = model
        self._how = how
        self._vocabulary = vocabulary
        self._text: list[int] = []
        self._cache: list[Any] = make_prompt_cache(model)
        self._fed: list[int] = []  # tokens that the caches hold
        self._same = 0  # of them, those known to be the text's
        self._snapshots: list[tuple[int, Snapshot]] = [(0, Snapshot(self._cache))]

    def give_up(self) -> None:
        """Have no more guesses, and let go of the model."""
        self._model, self._cache, self._snapshots = None, [], []

    def begin(self, text: Sequence[int]) -> None:
        """The text is this now: caches go back to where what they hold was still a part of it."""
        if self._model is None:
            return
        self._text = list(text)
        while self._same < min(len(self._fed), len(text)) and self._fed[self._same] == text[self._same]:
            self._same += 1
        # The last token's logits are what the next guess comes from.
        most = min(self._same, len(text) - 1)
        if len(self._fed) > most:
            while self._snapshots[-1][0] > most:
                self._snapshots.pop()
            at, snapshot = self._snapshots[-1]
            snapshot.restore()
            # What was restored cannot be restored again.
            self._snapshots[-1] = at, Snapshot(self._cache)
            del self._fed[at:]
            self._same = min(self._same, at)
        del self._snapshots[:-1]
        if len(text) - len(self._fed) > CATCH_UP:
            # A prompt: not a part of what a guess takes.
            self._follow(list(text[len(self._fed) : -1]))

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        """What the model would say after the text and these tokens."""
        if self._model is None:
            return None
        new = [*self._text[len(self._fed) :], *drafted[max(0, len(self._fed) - len(self._text)) :]]
        if len(new) > 1:
            self._follow(new[:-1])
        with mx.stream(generation_stream):
            logits = self._feed(new[-1:])
            return drawn(cut(logits[0, -1], self._vocabulary), self._how, len(drafted), self.name)

    def _follow(self, ids: list[int]) -> None:
        """Compute tokens whose logits nobody asks for."""
        with mx.stream(generation_stream):
            for at in range(0, len(ids), PROMPT_STEP):
                self._feed(ids[at : at + PROMPT_STEP])
                mx.eval(handles(*self._cache))
                if len(self._fed) <= len(self._text):
                    del self._snapshots[:-1]

    def _feed(self, ids: Sequence[int]) -> mx.array:
        assert self._model is not None
        logits: mx.array = self._model(mx.array(list(ids), dtype=mx.int32)[None], cache=self._cache)
        self._fed += ids
        if len(self._fed) <= len(self._text) or len(self._fed) >= self._snapshots[-1][0] + SNAPSHOT_STEP:
            self._snapshots.append((len(self._fed), Snapshot(self._cache)))
        return logits


State = Callable[[], tuple[list[Any], list[int]]]
"""Gives a model's caches, and what they do not hold yet of the text, but for its last token."""


class CopySource:
    """Guesses by a low-bit copy of the model, which goes on from what the model's own caches hold.

    So it has no prompt to compute and no text to follow, and what it goes on from is exact.

    Args:
        model: the copy, all in memory.
        name, how, vocabulary: as in ``ModelSource``.
        state: of the model.
    """

    cheaper = None

    def __init__(
        self,
        model: nn.Module,
        name: str,
        how: DrawForecast | MlxLmSampler | None,
        vocabulary: int,
        state: State,
    ) -> None:
        self.name = name
        self._model: nn.Module | None = model
        self._how = how
        self._vocabulary = vocabulary
        self._state = state
        self._cache: list[Any] | None = None
        self._last: list[int] = []  # token of the text
        self._new: list[int] = []  # tokens of the text that the model's caches did not hold
        self._fed = 0  # of them and the drafted ones

    def give_up(self) -> None:
        """Have no more guesses, and let go of the model."""
        self._model = self._cache = None

    def begin(self, text: Sequence[int]) -> None:
        self._cache, self._last = None, list(text[-1:])

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        """What the copy would say after the text and these tokens."""
        if self._model is None:
            return None
        if self._cache is None:
            cache, pending = self._state()
            self._new = pending + self._last
            # References to the same arrays: MLX copies what the copy writes to.
            self._cache, self._fed = copy.deepcopy(cache), 0
        new = [*self._new, *drafted][self._fed :]
        self._fed += len(new)
        with mx.stream(generation_stream):
            logits = self._model(mx.array(new, dtype=mx.int32)[None], cache=self._cache)
            return drawn(cut(logits[0, -1], self._vocabulary), self._how, len(drafted), self.name)
