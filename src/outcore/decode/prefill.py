"""A prompt that is computed a few chunks at a time, into caches of its own, before its sequence joins the others.

So between two of its chunks others have their tokens, and whoever does not want it any more can leave.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..engine.session import Session
from .model_runner import ModelRunner
from .passes import Pass
from .request import Request, grow_by, own_cache


class Prefill:
    """One prompt.

    Args:
        request: of its sequence; its cache is taken over with the first chunk.
        step: tokens of a chunk.

    Attributes:
        held: tokens of the prompt that are computed.
        passes: over the chunks that are computed next; ``run`` runs them, or ``computed`` is told that others did.
    """

    def __init__(self, model: nn.Module, session: Session, request: Request, step: int) -> None:
        self._model, self._session, self._request, self._step = model, session, request, step
        # Drafts that are made from the model's last hidden states need those of the end of the prompt.
        hidden = None if session.drafting is None else session.drafting.hidden()
        self._end = len(request.tokens) - 1 - (0 if hidden is None else hidden.window)
        self._target: ModelRunner | None = None
        self.held = request.known.held
        self.passes: list[Pass] = []

    @property
    def uid(self) -> int:
        """Its sequence's."""
        return self._request.uid

    @property
    def ahead(self) -> int:
        """Tokens that are to be computed before its sequence joins: the last one gives the answer's first token."""
        return max(0, self._end - self.held)

    def take(self, count: int, step: int) -> int:
        """Have so many of the chunks that are ``ahead`` be computed next; tokens of them."""
        request, held = self._cut(step), self.held
        if self._target is None:
            cache = own_cache(self._model, request)
            grow_by(cache, self._session.size.step)
            self._target = ModelRunner(self._model, self._session, cache, in_cache=held)
        passed = functools.partial(replace(request.known, held=held).passed, self._target.cache)
        ids = mx.array(list(request.tokens[held : held + count * step + 1]), dtype=mx.int32)
        # The last token of what is cut is by itself, and not one of them.
        self.passes = self._target.prompting(ids, step, passed=passed)[:count]
        return sum(each.tokens for each in self.passes)

    def computed(self) -> None:
        """The passes were run."""
        assert self._target is not None
        with mx.stream(generation_stream):
            self._target.evaluate()
        self.held += sum(each.tokens for each in self.passes)
        self._target.in_cache, self.passes = self.held, []

    def run(self) -> None:
        """Run the passes one after the other."""
        assert self._target is not None
        self._session.before_pass()
        with mx.stream(generation_stream):
            for each in self.passes:
                each.run()
                self._target.evaluate()
        self.computed()

    def joining(self, step: int) -> Request:
        """The request of the sequence that joins, with what was computed of its prompt."""
        request = self._cut(step)
        if self._target is None:
            return request
        known = replace(request.known, held=self.held)
        return replace(request, cache=self._target.cache, given=True, known=known, begun=False)

    def caches(self) -> tuple[list[Any], int]:
        """What there is of it, and the tokens of its text that this holds."""
        cache = self._target.cache if self._target is not None else list(self._request.cache or ())
        return cache, len(self._request.earlier) + self.held

    def _cut(self, step: int) -> Request:
        """The request; its chunks have so many tokens from now on. What was computed in others' chunks is not kept."""
        if step != self._step:
            self._step = step
            self._request = replace(self._request, known=replace(self._request.known, recording=None))
        return self._request


class Prefills(dict[int, Prefill]):
    """Prompts that are not all computed, by their sequences.

    Attributes:
        chunks: that a pass of others has time for while weights are read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chunks = 1
        self._shortest_first = True

    def next(self, chunk: int, room: float) -> tuple[list[int], Prefill | None]:
        """Those that are computed to their ends within so many tokens; and one of which some chunks are."""
        joining: list[int] = []
        part: Prefill | None = None
        order = list(self.values())
        # By turns the oldest and the shortest is first: neither waits for the others' ends.
        self._shortest_first = not self._shortest_first
        if self._shortest_first:
            order.sort(key=lambda prefill: prefill.ahead)
        for prefill in order:
            if prefill.ahead <= room:
                joining.append(prefill.uid)
                room -= prefill.ahead
            elif part is None and room >= chunk:
                part = prefill
                room -= part.take(int(room) // chunk, chunk)
        return joining, part
