"""Hidden states of a text's latest tokens, kept for the head that drafts from them.

They need not be taken after each pass, and of a prompt, or of tokens found in a cache, there may be fewer states than
tokens. So their memory does not depend on the text's length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.modules.hooks import copy_of, swap

# The most tokens whose states are held.
WINDOW = 256


class HiddenTap:
    """Records the output of a model's final norm, which its head receives; passes are not changed.

    Args:
        norm: outside of layers, so that its weights are always in memory.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._heard = threading.local()
        swap(norm, "Tapped", self._call)

    def _call(self, original: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        states = original(*args, **kwargs)
        heard: list[mx.array] | None = getattr(self._heard, "now", None)
        if heard is not None:
            heard.append(states)
        return states

    @contextmanager
    def listening(self) -> Iterator[list[mx.array]]:
        """Records the outputs of passes that this thread builds inside: arrays (1, tokens, hidden), not evaluated."""
        heard: list[mx.array] = []
        self._heard.now = heard
        try:
            yield heard
        finally:
            self._heard.now = None


class HiddenStates:
    """Hidden states by their token's place in a text; a ``HiddenKeeper``.

    Args:
        tap: on the model's final norm.
        window: the most tokens whose states are held.
    """

    def __init__(self, tap: HiddenTap, window: int = WINDOW) -> None:
        self._tap = tap
        self.window = window
        self._first = 0  # first token of a prompt whose state is needed
        self._parts: list[tuple[int, mx.array]] = []  # first token, and states (1, tokens, hidden); without gaps
        self.end = 0

    @property
    def arrays(self) -> list[mx.array]:
        """The states, to be evaluated with the pass that made them: an unevaluated one keeps its inputs alive."""
        return [a for _, a in self._parts]

    def expect(self, tokens: int) -> None:
        self._first = tokens - self.window

    @contextmanager
    def watch(self, first: int, tokens: int) -> Iterator[None]:
        if first + tokens <= self._first:
            yield
            return
        with self._tap.listening() as heard:
            yield
        if len(heard) == 1 and heard[0].shape[:2] == (1, tokens):
            self._add(first, heard[0])

    def _add(self, first: int, states: mx.array) -> None:
        if first > self.end:
            self._parts = []
        # Tokens behind a restored snapshot are computed again; their states are here already.
        known = max(0, self.end - first)
        if known < states.shape[1]:
            self._parts.append((first + known, states[:, known:] if known else states))
            self.end = first + states.shape[1]
        while self._parts and self.end - self._parts[0][0] - self._parts[0][1].shape[1] >= self.window:
            del self._parts[0]

    def settle(self) -> None:
        """Drops a long part's older tokens, and with them their memory."""
        if self._parts and (old := self.end - self.window - self._parts[0][0]) > 0:
            first, states = self._parts[0]
            own = copy_of(states[:, old:])
            mx.eval(own)
            self._parts[0] = first + old, own

    def cut(self, end: int) -> None:
        self._parts = [(first, a[:, : end - first]) for first, a in self._parts if first < end]
        self.end = min(self.end, end)

    def take(self, known: int) -> tuple[int, mx.array] | None:
        """Removes and returns the states (1, tokens, hidden) from the token ``known`` on, and the first token; later
        ones where that is gone, None if there are none."""
        parts, self._parts = self._parts, []
        wanted = [
            (max(first, known), a[:, max(0, known - first) :]) for first, a in parts if first + a.shape[1] > known
        ]
        if not wanted:
            return None
        states = [a for _, a in wanted]
        return wanted[0][0], states[0] if len(states) == 1 else mx.concatenate(states, axis=1)
