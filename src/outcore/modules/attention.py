"""Observes a model's attention at ``mx.fast.scaled_dot_product_attention``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

# Arrays of attention scores (heads, tokens of a chunk, tokens of context) in memory at once.
#
# On the CPU device ``mx.fast.scaled_dot_product_attention`` takes 1.03 times its scores, and 3.03 with sinks (MLX
# 0.32.4; float32 and bfloat16, all masks, 1 to 128 tokens by 4,096 and 8,192). A GPU's kernels keep none for the head
# sizes that they support. Other attention holds scores, or a mask as large, and their softmax.
FUSED, WITH_SINKS, OTHERWISE = 1, 3, 2

_one_at_a_time = threading.RLock()


class Attention:
    """Observed calls of fused attention.

    Attributes:
        sinks, masks: whether any call had sinks, or a mask of numbers for each head.
        each: the most bytes per token of keys and values of a call for exactly ``tokens`` tokens.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.calls, self.sinks, self.masks, self.each = 0, False, False, 0

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask, heads = kwargs.get("mask"), args[0].shape[1] if args else 0
        keys, values = args[1:3] if len(args) > 2 else (kwargs.get("k"), kwargs.get("v"))
        if isinstance(keys, mx.array) and isinstance(values, mx.array) and keys.shape[-2] == self._tokens:
            self.each = max(self.each, (keys.nbytes + values.nbytes) // self._tokens)
        self.calls += 1
        self.sinks |= kwargs.get("sinks") is not None
        self.masks |= isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == heads > 1

    def scores(self, expected: int) -> int:
        """Return the arrays of scores in memory at once, for a model with ``expected`` attention layers."""
        if self.sinks:
            return WITH_SINKS
        return FUSED if self.calls >= expected and not self.masks else OTHERWISE


@contextmanager
def seen(tokens: int) -> Iterator[Attention]:
    """Observe this thread's attention calls while the block runs a text of ``tokens`` tokens."""
    found, here = Attention(tokens), threading.get_ident()
    with _one_at_a_time:
        original: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> mx.array:
            if threading.get_ident() == here:
                found.note(args, kwargs)
            return original(*args, **kwargs)

        mx.fast.scaled_dot_product_attention = noted
        try:
            yield found
        finally:
            mx.fast.scaled_dot_product_attention = original
