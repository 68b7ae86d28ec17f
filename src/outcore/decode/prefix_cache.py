"""The prefix cache of a loaded model: what makes its files valid and where they lie, and what is found in it."""

from __future__ import annotations

import json
import platform
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from ..checkpoint.identity import identity_of, identity_of_adapter
from ..checkpoint.lazy_model import LazyModel
from ..checkpoint.packed_store import cached
from ..engine.session import Session
from ..machine.hardware import version
from ..options import LoadOptions
from .blocks import FOLDER, BlockFiles
from .prefix import CAPTURED, GRID, PrefixCache, PrefixMatch
from .request import KnownPrefix

FORMAT = "prompts 1"
"""Goes into every name: what another version of this computes in another way gets another one."""

NO_BLOCKS = f"{{name}}: prompts are not kept, since chunks of {{step}} tokens do not end where blocks of {GRID} do"
"""A note."""


def prefix_cache(lazy: LazyModel, o: LoadOptions) -> PrefixCache | None:
    """A model's prefix cache, if it was asked for. There is none where blocks end within chunks of prompts."""
    if o.prefix_cache == "off" or GRID % (o.prefill_step_size or GRID):
        return None
    validity = [
        FORMAT,
        identity_of(lazy.checkpoint),
        json.dumps(o.model_config, sort_keys=True, default=repr),
        identity_of_adapter(Path(o.adapter_path)) if o.adapter_path else "",
        o.dtype or "",
        *(version("mlx"), mlx_lm.__version__),
        *_device(),
    ]
    folder = cached(FOLDER, lazy.checkpoint, validity).name.removeprefix(f"{FOLDER}-")
    # Not the model itself, whose session refers to this.
    model = weakref.ref(lazy.model)

    def caches() -> list[Any]:
        found: list[Any] = make_prompt_cache(model())
        return found

    most = None if isinstance(o.prefix_cache, str) else o.prefix_cache
    return PrefixCache(BlockFiles(folder, most), validity, caches)


def _device() -> list[str]:
    """What computes: another device rounds otherwise."""
    info = mx.device_info()
    known = [str(info.get(name, "")) for name in ("device_name", "architecture")]
    return [str(mx.default_device().type), platform.machine(), *known]


def block_step(step: int) -> int:
    """The largest chunk of a prompt, in tokens, that is no larger than this and ends where each block does."""
    return next(tokens for tokens in range(min(step, GRID), 0, -1) if GRID % tokens == 0)


def look_up(
    session: Session,
    tokens: Sequence[int],
    step: int,
    *,
    whole: bool = True,
    shared: int = 0,
) -> tuple[PrefixMatch | None, KnownPrefix]:
    """What was kept of a prompt, with the caches that it is in; and what goes with them.

    Args:
        step: tokens of a chunk. Where a block ends within one, nothing is found or kept.
        whole: all of it will do.
        shared: its first tokens, with which others' texts begin too.
    """
    prefix = session.prefix
    if prefix is None or GRID % step or session.plan.kv_slot:
        return None, KnownPrefix()
    found = prefix.find(tokens, step, whole=whole)
    if found is None:
        return None, KnownPrefix(recording=prefix.recording(tokens, step, shared=shared))
    recording = prefix.recording(tokens, step, found.tokens, shared) if found.logits is None else None
    session.metrics.prompt_found += found.tokens
    return found, KnownPrefix(found.tokens, found.logits, recording)


def unkept(session: Session, known: KnownPrefix, tokens: int) -> KnownPrefix:
    """The same of a prompt of so many tokens, of which nothing is kept, as there is no memory for it; it is told."""
    if known.recording is None:
        return known
    session.note(f"prefix cache: a prompt of {tokens} tokens is not kept, as memory is too small for that")
    return replace(known, recording=None)


def captured_bytes(session: Session, tokens: int) -> int:
    """Bytes of states that are held while so many tokens of a prompt are computed, to be kept."""
    return (
        CAPTURED * session.size.states
        if session.prefix is not None and not session.plan.kv_slot and tokens > GRID
        else 0
    )
