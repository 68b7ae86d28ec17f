"""Decoding a model whose layers are all in memory, on several ranks: while a token is computed, each rank builds the
graph of the next one, which it needs no token for.

What ranks send each other comes in the order in which it would without: a rank that cannot look ahead, as its layers
are streamed, shares a text with those that do. Nothing of a token is sent before the one that it follows was handed
out, so nobody waits for a token that is not wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from outcore.decode.model_runner import ModelRunner
from outcore.decode.sampling import Sampler

from .incoming import bytes_of, new_buffer
from .resident_passes import PassAhead

if TYPE_CHECKING:
    from .transport import RankTransport


@dataclass
class _Next:
    """A token that is built ahead.

    Attributes:
        pass_: over the token before it. ``back``: takes that out of the caches.
        token: int32 (1,). ``logprobs``: (1, vocabulary); None: they are made when the pass is computed.
        told: where the token is written to when it is known; None: it is drawn on the device's queue.
    """

    pass_: PassAhead
    back: Callable[[], None]
    token: mx.array
    logprobs: mx.array | None
    told: memoryview | None


def look_ahead_on_ranks(
    first: int, target: ModelRunner, chooser: Sampler, *, tokens: int, reserve: Callable[[int], object], whole: bool
) -> Generator[tuple[int, mx.array, bool], None, int]:
    """Yield ``(token, log-probabilities (vocabulary,), False)`` for what follows the token ``first``, as long as all of
    this rank's layers are in memory; then the caches hold all but the last token.

    Args:
        tokens: to yield at most. ``whole``: as in ``look_ahead``; here caches never hold the last token.
        reserve: called before a token's graph is built, with how many it will be.

    Returns:
        tokens that were yielded: fewer than ``tokens`` where something began to be streamed.
    """
    transport = cast("RankTransport", target.transport)
    queued = transport.chooses and chooser.only_builds

    def build(token: mx.array, number: int) -> _Next | None:
        reserve(number)
        sweeps = transport.sweeps() if target.resident else None
        if sweeps is None:
            return None
        with mx.stream(generation_stream):
            ahead, back = target.attempted(lambda: sweeps.record(lambda: target.forward_pass(token)))
            try:
                if not queued:
                    told = new_buffer(4)
                    return _Next(ahead, back, told.view(mx.int32), None, bytes_of(told))
                logprobs = chooser.logprobs(ahead.out[:, -1, :], None)
                return _Next(ahead, back, chooser.draw(logprobs).astype(mx.int32), logprobs, None)
            except BaseException:
                back()
                raise

    now = build(mx.array([first], dtype=mx.int32), 1)
    made = 0
    while now is not None:
        ahead: _Next | None = None
        failed: Exception | None = None
        try:
            with mx.stream(generation_stream):
                now.pass_.send()
                if transport.trailing:
                    now.pass_.settle()
            try:
                if made + 1 < tokens:
                    ahead = build(now.token, made + 2)
            except Exception as e:
                failed = e  # after the token before it, as it would be without looking ahead
            with mx.stream(generation_stream):
                token, logprobs = _hand_out(now, ahead, target, chooser)
        except BaseException:
            if ahead is not None:
                ahead.back()
            now.back()
            raise
        made += 1
        try:
            yield token, logprobs, False
        except BaseException:
            if ahead is not None:
                ahead.back()
            raise
        if failed is not None:
            raise failed
        now = ahead
    return made


def _hand_out(now: _Next, ahead: _Next | None, target: ModelRunner, chooser: Sampler) -> tuple[int, mx.array]:
    """The token, which all ranks know then, and its log-probabilities (vocabulary,)."""
    if now.told is not None:
        now.pass_.settle()
        token, logprobs, _ = chooser.choose(now.pass_.out[:, -1, :])
        now.told[:] = np.array([token], dtype=np.int32).tobytes()
        if ahead is not None:
            ahead.pass_.start()
        return token, logprobs
    assert now.logprobs is not None
    now.pass_.settle()
    with _told_where_it_fails(chooser):
        mx.async_eval(now.token, now.logprobs)
        if ahead is not None:
            ahead.pass_.start()
    with _told_where_it_fails(chooser), target.transport.working():
        token = cast(int, now.token.item())
    chooser.transport.numbers(lambda: [token])
    chooser.text.append(token)
    return token, now.logprobs[0]


@contextmanager
def _told_where_it_fails(chooser: Sampler) -> Iterator[None]:
    """Other ranks wait for a token: they are told where there will be none."""
    try:
        yield
    except Exception as e:
        chooser.transport.give_up(e)
        raise
