"""Decoding a model that is all in memory: a token's successor is under way before the token is looked at, as in mlx-lm.

So the device is not idle while Python builds a graph. Unlike in mlx-lm's own loop, whatever fails or is broken off, the
caches hold tokens that were handed out and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..machine.allocator import clear_cache
from .model_runner import ModelRunner
from .sampling import Sampler

CLEAR_TOKENS = 256
"""Tokens after which freed memory is given back, beginning with the first, as in ``mlx_lm.generate.generate_step``: the
first cuts windows to their size, and what the prompt had of them is free then."""


@dataclass
class _Drawn:
    """A token (1,) on the device's queue, its log-probabilities, and what takes the one before it out of the caches."""

    token: mx.array
    logprobs: mx.array
    back: Callable[[], None]


def look_ahead(
    first: int, target: ModelRunner, chooser: Sampler, *, tokens: int, reserve: Callable[[int], object], whole: bool
) -> Generator[tuple[int, mx.array, bool], None, int]:
    """Yield ``(token, log-probabilities (vocabulary,), False)`` for what follows the token ``first``, as long as
    everything is resident; then the caches hold all but the last token.

    Args:
        tokens: to yield at most.
        reserve: called before a token is computed, with how many it will be.
        whole: the caches are to hold each token that was yielded; else all but the last.

    Returns:
        tokens that were yielded: fewer than ``tokens`` where something began to be streamed.
    """
    text = mx.array(chooser.text, dtype=mx.int32) if chooser.processors else None

    def draw(token: mx.array, number: int) -> _Drawn:
        nonlocal text
        reserve(number)
        with mx.stream(generation_stream):
            logits, back = target.attempt(token)
            try:
                logprobs = chooser.logprobs(logits, text)
                drawn = chooser.draw(logprobs).astype(mx.int32)
                mx.async_eval(drawn, logprobs)
                text = None if text is None else mx.concatenate([text, drawn])
            except BaseException:
                back()
                raise
        return _Drawn(drawn, logprobs[0], back)

    now = draw(mx.array([first], dtype=mx.int32), 1)
    made = 0
    while True:
        ahead: _Drawn | None = None
        failed: Exception | None = None
        try:
            if target.resident and (whole or made + 1 < tokens):
                ahead = draw(now.token, made + 2)
            token = cast(int, now.token.item())
        except Exception as e:
            # The token before it is computed and will be handed out first, as it would be without looking ahead.
            failed = e
            token = cast(int, now.token.item())
        chooser.text.append(token)
        if made % CLEAR_TOKENS == 0:
            clear_cache()
        made += 1
        try:
            yield token, now.logprobs, False
        except BaseException as e:
            if ahead is not None and not (whole and isinstance(e, GeneratorExit)):
                ahead.back()
            raise
        if failed is not None:
            raise failed
        if ahead is None or made >= tokens:
            return made
        now = ahead
