"""What stands behind a loaded model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..disk.metrics import Metrics
from ..generation.speculative.acceptance import Experience
from ..model.cache_form import CacheForm
from ..planning.plan import ModelSize, Plan
from ..streaming.engine import Streaming
from ..system.exclusive import Exclusive

if TYPE_CHECKING:
    from ..generation.speculative.drafting import Drafting
    from .memory_monitor import Watch
    from .residency import Residency


@dataclass
class Session:
    """What stands behind a loaded model, as ``model.outcore``.

    Attributes:
        plan: what is resident, what is streamed, and where the bytes go.
        size: what the model weighs.
        metrics: live counters.
        io: how files are read: ``direct``, ``cached``, or ``none`` when everything is resident.
        streaming: the engine; None when everything is resident.
        notes: what the user should know: layers that could not be streamed, a dtype that would be faster.
        prefill_step_size: tokens of a prompt at a time, if they were asked for.
        cpu_streams: MLX streams that linear layers are split over.
        max_context: tokens that the model itself was made for; None if it does not say. Beyond them it errs.
        positions: tokens that it has positions for at all; None: for any number.
        watch: what watches memory meanwhile; None where it was not asked for, or nothing could be shed.
        finalizer: ends threads and closes files when the model is dropped unclosed; None when everything is resident.
        drafting: what drafts tokens for it; None for nothing. ``experience``: what that has taught.
        forms: what the model's caches look like; none where that is not known.
        residency: sheds and regrows resident layers while the model runs; None where nothing can be streamed.
        unbound: binds the model to a ring where that failed while it ran; None: it did not.
        exclusive: which thread computes with the model.
        vocabulary: tokens that it has embeddings for; None where that is not known.
        wired: gives back the memory that is wired for it; None where none is.
        in_cache: tokens of the last text, its prompt and then its answer, that went into the ``prompt_cache`` given.
    """

    plan: Plan
    size: ModelSize
    metrics: Metrics
    io: str = "none"
    streaming: Streaming | None = None
    notes: tuple[str, ...] = ()
    prefill_step_size: int | None = None
    cpu_streams: int = 1
    max_context: int | None = None
    positions: int | None = None
    finalizer: weakref.finalize[Any, Any] | None = None
    drafting: Drafting | None = None
    experience: Experience = field(default_factory=Experience)
    residency: Residency | None = None
    forms: tuple[CacheForm, ...] = ()
    watch: Watch | None = None
    unbound: Callable[[], None] | None = None
    exclusive: Exclusive = field(default_factory=Exclusive)
    wired: weakref.finalize[Any, Any] | None = None
    in_cache: int = 0
    vocabulary: int | None = None

    def bind_again(self) -> None:
        """Try what failed when slots or files were changed for others while the model ran.

        Raises:
            OutcoreError: it fails again.
        """
        with self.exclusive:
            if self.unbound is not None:
                self.unbound()

    def note(self, line: str) -> None:
        """What the user should know, once."""
        if line not in self.notes:
            self.notes = (*self.notes, line)

    def close(self) -> None:
        """Free slots, threads and files. A streamed model cannot be called afterwards. Safe to call twice, and from
        another thread than the one that generates: then between two of its tokens."""
        with self.exclusive:
            if self.watch is not None:
                self.watch.close()
            if self.streaming is not None:
                self.streaming.close()
            if self.wired is not None:
                self.wired()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
