"""Texts longer than their caches may get: what goes when there are ``max_kv_size`` tokens.

``window``: mlx-lm's rotating caches. ``none``: nothing, the text ends. ``halve``: the older half of the tokens, but for
the first few, which attention leans on (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023);
those that stay are computed anew, in one sweep. So what follows is to the bit what the model says after that shorter
text, whatever its caches are: recurrent states forget the older half too, and positions begin again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from ..checks import choice
from ..checks import whole as whole_number
from ..engine.session import Session
from ..errors import PromptError, UsageError
from ..modules.call_values import flat
from ..options import KV_EVICTIONS, LEAST_HALVED

SINKS = 4
"""Tokens of the beginning that stay, as of mlx-lm's rotating caches (``make_prompt_cache``)."""


def eviction_of(kwargs: dict[str, Any]) -> tuple[str, int | None]:
    """How, and from how many tokens on (None: never), taken from ``stream_generate``'s arguments; what is left of them
    is mlx-lm's.

    Raises:
        UsageError: another way than there are, or fewer tokens than there must be.
    """
    how = kwargs.pop("kv_eviction", None)
    most = kwargs.get("max_kv_size")
    if how is None:
        return KV_EVICTIONS[0], most
    choice("kv_eviction", how, KV_EVICTIONS)
    if how == "window" or most is None:
        return how, most
    del kwargs["max_kv_size"]
    return how, whole_number("max_kv_size", most, LEAST_HALVED if how == "halve" else 1)


def kept_at_most(model: nn.Module, cache: Sequence[Any] | None, max_kv_size: int | None, step: int) -> int | None:
    """Tokens that caches hold at most while a text is computed, ``step`` of its prompt at a time; None: as many as it
    has. ``cache`` None: those that mlx-lm makes (``make_prompt_cache``)."""
    if cache is None:
        bounded = max_kv_size is not None and not hasattr(model, "make_cache")
        return max_kv_size + step if bounded and max_kv_size is not None else None
    sizes = [c.max_size + step if isinstance(c, RotatingKVCache) else None for c in flat(cache)]
    return max((n for n in sizes if n is not None), default=None) if None not in sizes else None


def note_bounds(model: nn.Module, session: Session | None) -> bool:
    """Whether ``max_kv_size`` bounds the caches that mlx-lm makes for this model; else it is told."""
    if not hasattr(model, "make_cache"):
        return True
    if session is not None:
        session.note("max_kv_size bounds nothing here: this model makes its own caches (kv_eviction halve does bound)")
    return False


def bounded_tokens(length: int, max_tokens: int, most: int) -> int:
    """``max_tokens`` of a text that ends with so many tokens.

    Raises:
        PromptError: the prompt alone is longer.
    """
    if length > most:
        raise PromptError(f"{length} prompt tokens pass max_kv_size {most}, and nothing may go: give more, or halve")
    room = most - length + 1  # the last one is not computed
    return room if max_tokens < 0 else min(max_tokens, room)


def halved(text: Sequence[int], most: int) -> list[int]:
    """Of a text the first tokens and the last, half of ``most`` together."""
    last = most // 2 - SINKS
    return list(text) if len(text) <= most // 2 else [*text[:SINKS], *text[len(text) - last :]]


def refuse_unknown_text(held: int, known: int, *, embeddings: bool) -> None:
    """Only a text that is known can be computed anew.

    Raises:
        UsageError: caches hold more than is known, or the prompt is none of tokens.
    """
    if embeddings:
        raise UsageError("kv_eviction halve: a prompt of embeddings cannot be computed anew; leave it out")
    if held != known:
        raise UsageError(
            f"kv_eviction halve: the caches hold {held} tokens, of which it is not known what they are; give "
            "them as history, or another eviction"
        )
