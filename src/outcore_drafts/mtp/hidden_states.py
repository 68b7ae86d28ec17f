"""The last hidden states of a text's tokens, kept for what drafts from them: those of the latest tokens only.

Who takes them need not come after each sweep, and need not get all: of a prompt, or of tokens that were found in a
cache, there may be fewer than tokens. So what they take of memory does not depend on how long a text is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.modules.call_values import copy_of
from outcore.modules.hooks import swap

WINDOW = 256
"""Tokens whose states are held at most."""


class HiddenTap:
    """Listens to a model's final norm, which puts out the states that its head is given; nothing of a pass changes.

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
        """What passes that this thread builds inside put out: arrays (1, tokens, hidden), not evaluated."""
        heard: list[mx.array] = []
        self._heard.now = heard
        try:
            yield heard
        finally:
            self._heard.now = None


class HiddenStates:
    """States by their token's place in a text.

    Args:
        tap: on the model's final norm.
        window: tokens whose states are held at most.

    Attributes:
        end: the token behind the last one whose state was seen.
    """

    def __init__(self, tap: HiddenTap, window: int = WINDOW) -> None:
        self._tap = tap
        self.window = window
        self._first = 0  # token of a prompt from which on states are wanted
        self._parts: list[tuple[int, mx.array]] = []  # first token, and states (1, tokens, hidden); without gaps
        self.end = 0

    @property
    def arrays(self) -> list[mx.array]:
        """What is held. To be evaluated with the pass that made it: a state that is not keeps what it is made from."""
        return [a for _, a in self._parts]

    def expect(self, tokens: int) -> None:
        """A prompt is computed that ends before this token."""
        self._first = tokens - self.window

    @contextmanager
    def watch(self, first: int, tokens: int) -> Iterator[None]:
        """Keep the states of a pass over so many tokens from ``first`` on, which is built inside."""
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
        # Tokens that a snapshot gave up are computed again; their states are here.
        known = max(0, self.end - first)
        if known < states.shape[1]:
            self._parts.append((first + known, states[:, known:] if known else states))
            self.end = first + states.shape[1]
        while self._parts and self.end - self._parts[0][0] - self._parts[0][1].shape[1] >= self.window:
            del self._parts[0]

    def settle(self) -> None:
        """What is held was evaluated. A long part's older tokens go, and with them its memory."""
        if self._parts and (old := self.end - self.window - self._parts[0][0]) > 0:
            first, states = self._parts[0]
            own = copy_of(states[:, old:])
            mx.eval(own)
            self._parts[0] = first + old, own

    def cut(self, end: int) -> None:
        """Forget the states of tokens from this one on: they are not part of the text."""
        self._parts = [(first, a[:, : end - first]) for first, a in self._parts if first < end]
        self.end = min(self.end, end)

    def take(self, known: int) -> tuple[int, mx.array] | None:
        """States (1, tokens, hidden) from the token ``known`` on, or a later one where that is gone, and which; they
        are not held any longer. None if there are none."""
        parts, self._parts = self._parts, []
        wanted = [
            (max(first, known), a[:, max(0, known - first) :]) for first, a in parts if first + a.shape[1] > known
        ]
        if not wanted:
            return None
        states = [a for _, a in wanted]
        return wanted[0][0], states[0] if len(states) == 1 else mx.concatenate(states, axis=1)
