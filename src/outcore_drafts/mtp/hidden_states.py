"""Hidden states of a text's latest tokens, kept for the head that drafts from them.

At most ``WINDOW`` states are kept, so their memory does not depend on the text's length. States may be missing: of a
prompt's first tokens, and of tokens that were found in a cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from outcore.modules.hooks import copy_of, swap

# The most tokens whose states are kept.
WINDOW = 256


class Tap(Protocol):
    """Records states that a model's passes compute."""

    def listening(self, skip: int = 0) -> AbstractContextManager[list[mx.array]]:
        """Returns a context in which states of passes that this thread builds are recorded, (1, tokens, hidden), but
        those of the first ``skip`` tokens, whose memory is not kept."""


class HiddenTap:
    """Records the output of a model's final norm, which is the input of the model's head. Does not change it.

    Args:
        norm: the final norm. It belongs to no layer, so its weights are always in memory.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._heard = threading.local()
        swap(norm, "Tapped", self._call)

    def _call(self, original: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        states = original(*args, **kwargs)
        now: tuple[list[mx.array], int] | None = getattr(self._heard, "now", None)
        if now is not None:
            heard, skip = now
            heard.append(copy_of(states[:, skip:]) if skip else states)
        return states

    @contextmanager
    def listening(self, skip: int = 0) -> Iterator[list[mx.array]]:
        """Records the outputs of passes that this thread builds meanwhile: arrays (1, tokens, hidden), unevaluated."""
        heard: list[mx.array] = []
        self._heard.now = heard, skip
        try:
            yield heard
        finally:
            self._heard.now = None


class HiddenStates:
    """Hidden states by the position of their tokens in a text; a ``HiddenKeeper``.

    Args:
        tap: records the states.
        window: the most tokens whose states are kept.
    """

    def __init__(self, tap: Tap, window: int = WINDOW) -> None:
        self._tap = tap
        self.window = window
        self._first = 0  # position of the first token of a prompt whose state is needed
        self._parts: list[tuple[int, mx.array]] = []  # position of the first token, states (1, tokens, hidden); no gaps
        self.end = 0

    @property
    def arrays(self) -> list[mx.array]:
        """The states. Evaluate them with the pass that made them: an unevaluated array keeps its inputs alive."""
        return [a for _, a in self._parts]

    def expect(self, tokens: int) -> None:
        self._first = tokens - self.window

    @contextmanager
    def watch(self, first: int, tokens: int) -> Iterator[None]:
        if first + tokens <= self._first:
            yield
            return
        skip = max(0, self._first - first)
        with self._tap.listening(skip) as heard:
            yield
        if len(heard) == 1 and heard[0].shape[:2] == (1, tokens - skip):
            self._add(first + skip, heard[0])

    def _add(self, first: int, states: mx.array) -> None:
        if first > self.end:
            self._parts = []
        # Tokens after a restored snapshot are computed again; their states are here already.
        known = max(0, self.end - first)
        if known < states.shape[1]:
            self._parts.append((first + known, states[:, known:] if known else states))
            self.end = first + states.shape[1]
        while self._parts and self.end - self._parts[0][0] - self._parts[0][1].shape[1] >= self.window:
            del self._parts[0]

    def settle(self) -> None:
        """Drops the states of the oldest part's tokens that are outside of the window, and frees their memory."""
        if self._parts and (old := self.end - self.window - self._parts[0][0]) > 0:
            first, states = self._parts[0]
            own = copy_of(states[:, old:])
            mx.eval(own)
            self._parts[0] = first + old, own

    def cut(self, end: int) -> None:
        self._parts = [(first, a[:, : end - first]) for first, a in self._parts if first < end]
        self.end = min(self.end, end)

    def take(self, known: int) -> tuple[int, mx.array] | None:
        """Removes all states. Returns the position of the first and the states (1, tokens, hidden), from token
        ``known`` on or, if older ones are missing, later; None if there are none."""
        found = self.take_pieces(known, max(1, self.end))
        return None if found is None else (found[0], next(found[2]))

    def take_pieces(self, known: int, step: int) -> tuple[int, int, Iterator[mx.array]] | None:
        """As ``take``, but returns the position, how many tokens there are, and an iterator of the states of ``step``
        tokens at a time. Each is forgotten once it was passed on, so that states are never in memory twice."""
        parts, self._parts = self._parts, []
        wanted = [
            (max(first, known), a[:, max(0, known - first) :]) for first, a in parts if first + a.shape[1] > known
        ]
        if not wanted:
            return None
        return wanted[0][0], sum(a.shape[1] for _, a in wanted), _pieces([a for _, a in reversed(wanted)], step)


def _pieces(parts: list[mx.array], step: int) -> Iterator[mx.array]:
    """Yields the states of ``parts``, the last one first, ``step`` tokens at a time; empties the list."""
    while parts:
        piece, left = list[mx.array](), step
        while parts and left:
            part = parts.pop()
            piece.append(part[:, :left])
            if part.shape[1] > left:
                parts.append(part[:, left:])
            left -= piece[-1].shape[1]
        yield piece[0] if len(piece) == 1 else mx.concatenate(piece, axis=1)
