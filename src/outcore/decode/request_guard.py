"""A request's own sampler and processors, kept from harming those that share its sweeps.

Whatever draws tokens for several sequences calls them in the middle of a step, when caches have gone on and tokens have
not. So nothing may raise there: what they raise is kept, the most likely token stands in, and the sequence ends where
the token that failed would be given out. mlx-lm's loops look one token ahead; a token that nobody gets has not failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from .batch_engine import Request
from .sampling import Draw, OwnSampler, Processor


class RequestGuard:
    """Calls a request's sampler and processors until one of them raises.

    Attributes:
        error: what was raised; None: nothing so far. ``at``: for which token of the answer, from 0.
    """

    def __init__(self, request: Request) -> None:
        self.error: Exception | None = None
        self.at = -1
        self._sampler = request.sampler or greedy_sampler
        self._processors = request.processors

    def request(self, request: Request) -> Request:
        """The request, with calls that do not raise."""
        calls: list[Processor] = [partial(self._process, n, call) for n, call in enumerate(self._processors)]
        # What counts tokens is called once for each: the first processor, or else the sampler.
        return replace(request, sampler=self._sample, processors=tuple(calls))

    def rewind(self, drawn: int) -> None:
        """Be as after so many tokens: what was computed ahead and given to nobody has not happened."""
        if self.error is not None and self.at >= drawn:
            self.error = None
        self.at = min(self.at, drawn - 1) if self.error is None else self.at
        if isinstance(self._sampler, OwnSampler):
            self._sampler.rewind(drawn)

    def _process(self, n: int, call: Processor, tokens: mx.array, logits: mx.array) -> mx.array:
        if n == 0 and self.error is None:
            self.at += 1
        return self._call(lambda: _checked(call(tokens, logits), logits.shape), logits)

    def _sample(self, logprobs: mx.array) -> mx.array:
        if not self._processors and self.error is None:
            self.at += 1
        likeliest = greedy_sampler(logprobs)
        if self._sampler is greedy_sampler:
            return likeliest
        return self._call(lambda: _checked(self._sampler(logprobs), likeliest.shape), likeliest)

    def _call(self, call: Callable[[], mx.array], instead: mx.array) -> mx.array:
        if self.error is not None:
            return instead
        try:
            return call()
        except Exception as e:
            self.error = e
            return instead


def guarded(request: Request) -> Request:
    """The request as it can share sweeps with others. What ``error_of`` tells of it is no harm to them."""
    if request.sampler is None and not request.processors:
        return request
    return RequestGuard(request).request(request)


def rewound(request: Request, tokens: int) -> None:
    """Have a guarded request's own code be as after so many tokens of its answer."""
    if isinstance(guard := getattr(request.sampler, "__self__", None), RequestGuard):
        guard.rewind(tokens)


def error_of(request: Request, token: int) -> Exception | None:
    """What a guarded request's own code raised for a token of its answer, counted from 0; None: nothing."""
    sampler: Draw | None = request.sampler
    guard = getattr(sampler, "__self__", None)
    return guard.error if isinstance(guard, RequestGuard) and guard.error is not None and token >= guard.at else None


def _checked(found: mx.array, shape: tuple[int, ...]) -> mx.array:
    if not isinstance(found, mx.array) or found.shape != shape:
        raise ValueError(f"shape {shape} is needed, not {getattr(found, 'shape', type(found).__name__)}")
    return found
