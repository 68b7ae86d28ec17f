"""Computes a prompt a few chunks at a time, in caches of its own, before its sequence joins the others. Meanwhile the
others get tokens, and the prompt can be given up."""

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
    """One prompt, computed ``step`` tokens at a time, in the request's cache if it has one.

    Attributes:
        held: computed tokens of the prompt.
        passes: the passes over the next chunks. The caller runs them and calls ``computed``, or calls ``run``.
    """

    def __init__(self, model: nn.Module, session: Session, request: Request, step: int) -> None:
        self._model, self._session, self._request, self._step = model, session, request, step
        self.uid = request.uid
        # Drafters that use hidden states need those of the prompt's end, so the joining pass computes it.
        hidden = None if session.drafting is None else session.drafting.hidden()
        self._end = len(request.tokens) - 1 - (0 if hidden is None else hidden.window)
        self._runner: ModelRunner | None = None
        self.held = request.cached.tokens
        self.passes: list[Pass] = []

    @property
    def ahead(self) -> int:
        """Tokens to compute before the sequence joins; the pass with which it joins computes the last ones."""
        return max(0, self._end - self.held)

    def take(self, count: int, step: int) -> int:
        """Prepares the passes over the next ``count`` chunks; returns how many tokens they have."""
        request, held = self._cut(step), self.held
        if self._runner is None:
            cache = own_cache(self._model, request)
            grow_by(cache, self._session.size.step)
            media, before = request.media, len(request.earlier)
            arguments = None if media is None else lambda at, ids: media.arguments(before + at, ids)
            self._runner = ModelRunner(self._model, self._session, cache, in_cache=held, arguments=arguments)
        passed = functools.partial(replace(request.cached, tokens=held).passed, self._runner.cache)
        ids = mx.array(list(request.tokens[held : held + count * step + 1]), dtype=mx.int32)
        # ``prompting`` makes a pass of its own for the last token; drop it, as a later pass computes that token.
        self.passes = self._runner.prompting(ids, step, passed=passed)[:count]
        return sum(each.tokens for each in self.passes)

    def computed(self) -> None:
        assert self._runner is not None
        with mx.stream(generation_stream):
            self._runner.evaluate()
        self.held += sum(each.tokens for each in self.passes)
        self._runner.in_cache, self.passes = self.held, []

    def run(self) -> None:
        assert self._runner is not None
        self._session.before_pass()
        with mx.stream(generation_stream):
            for each in self.passes:
                each.run()
                self._runner.evaluate()
        self.computed()

    def joining(self, step: int) -> Request:
        """Returns the request with which the sequence joins; its cache has the computed part of the prompt."""
        request = self._cut(step)
        if self._runner is None:
            return request
        cached = replace(request.cached, tokens=self.held)
        return replace(request, cache=self._runner.cache, cached=cached, begun=False)

    def caches(self) -> tuple[list[Any], int]:
        cache = self._runner.cache if self._runner is not None else list(self._request.cache or ())
        return cache, len(self._request.earlier) + self.held

    def _cut(self, step: int) -> Request:
        """Returns the request. If ``step`` differs from earlier chunks, the prefix cache will not store the prompt."""
        if step != self._step:
            self._step = step
            self._request = replace(self._request, cached=replace(self._request.cached, recording=None))
        return self._request


class Prefills(dict[int, Prefill]):
    """Partly computed prompts by uid; ``chunks``: how many chunks a shared pass can compute while weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = 1
        self._shortest_first = True

    def next(self, chunk: int, room: float) -> tuple[list[int], Prefill | None]:
        """Returns the prompts that can be finished within ``room`` tokens, and one prompt with passes over some chunks;
        None: there is no room for one."""
        joining: list[int] = []
        part: Prefill | None = None
        order = list(self.values())
        # Begin with the oldest and with the shortest prompt by turns, so that neither waits until all others end.
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
