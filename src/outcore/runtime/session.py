"""What stands behind a loaded model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..model.cache_form import CacheForm
from ..sizes import format_size
from ..system.exclusive import Exclusive
from .memory_monitor import Watch
from .residency import Residency
from .state import State


@dataclass(repr=False)
class Session(State):
    """What stands behind a loaded model, as ``model.outcore``.

    Attributes:
        cpu_streams: MLX streams that linear layers are split over.
        positions: tokens that the model has positions for at all; None: for any number.
        vocabulary: tokens that it has embeddings for; None where that is not known.
        forms: what its caches look like; none where that is not known.
        residency: sheds and regrows resident layers while the model runs; None where nothing can be streamed.
        watch: what watches memory meanwhile; None where it was not asked for, or nothing could be shed.
        experience: what drafting has taught (``generation.speculative.acceptance``); None: it has not begun.
        exclusive: which thread computes with the model.
        in_cache: tokens of the last text, its prompt and then its answer, that went into the ``prompt_cache`` given.
        unbound: binds the model to a ring where that failed while it ran; None: it did not.
        finalizer: ends threads and closes files when the model is dropped unclosed; None when everything is resident.
        limits: gives back what it needs of MLX's allocator.
        closed: whether ``close`` was called.
    """

    cpu_streams: int = 1
    positions: int | None = None
    vocabulary: int | None = None
    forms: tuple[CacheForm, ...] = ()
    residency: Residency | None = None
    watch: Watch | None = None
    experience: Any = None
    exclusive: Exclusive = field(default_factory=Exclusive)
    in_cache: int = 0
    unbound: Callable[[], None] | None = None
    finalizer: weakref.finalize[Any, Any] | None = None
    limits: weakref.finalize[Any, Any] | None = None
    closed: bool = False

    def __repr__(self) -> str:
        plan = self.plan
        layers = f"{len(plan.resident)} of {len(plan.resident) + len(plan.streamed)} layers in memory"
        ring = f", the others through {plan.slots} slots of {format_size(plan.slot_bytes)}" if plan.streams else ""
        peak, budget = format_size(plan.peak_bytes), format_size(plan.budget_bytes)
        return f"<Session{', closed' * self.closed}: {layers}{ring}; {peak} planned of {budget}; reads {self.io}>"

    def bind_again(self) -> None:
        """Try what failed when slots or files were changed for others while the model ran.

        Raises:
            OutcoreError: it fails again.
        """
        with self.exclusive:
            if self.unbound is not None:
                self.unbound()

    def before_pass(self) -> None:
        """Look at memory, where nothing is streamed; a streamed model looks by itself.

        Raises:
            BudgetError: memory is not enough even with nothing resident.
        """
        if self.watch is not None and self.streaming is None and not self.closed:
            self.watch.before_pass()

    def close(self) -> None:
        """Free slots, threads and files, and give MLX's limits back. A streamed model cannot be called afterwards. Safe
        to call twice, and from another thread than the one that generates: then between two of its tokens."""
        with self.exclusive:
            self.closed = True
            if self.watch is not None:
                self.watch.close()
            if self.streaming is not None:
                self.streaming.close()
            if self.limits is not None:
                self.limits()
            drafts = getattr(self.drafting, "model", None)
            if (own := getattr(drafts, "outcore", None)) is not None:
                own.close()  # another model, which was loaded for this one

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
