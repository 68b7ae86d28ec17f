"""What stands behind a loaded model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..disk.replica import Replicas
from ..errors import BudgetError
from ..machine.exclusive import Exclusive
from ..modules.cache_form import CacheForm
from ..plan.planner import prefill_steps
from ..sizes import format_size
from .memory_monitor import Watch
from .observers import Observers
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
        prefix: keeps what was computed of prompts (``decode.prefix``); None: nothing does.
        residency: sheds and regrows resident layers while the model runs; None where nothing can be streamed.
        watch: what watches memory meanwhile; None where it was not asked for, or nothing could be shed.
        experience: what drafting has taught (``decode.speculative.acceptance``); None: it has not begun.
        exclusive: which thread computes with the model.
        found: tokens of the last prompt that were computed before, and found (``prefix``).
        in_cache: tokens of the last text, its prompt and then its answer, that went into the ``prompt_cache`` given.
        text: tokens that the last text goes on with, prompt and answer, where older ones had to go
            (``decode.eviction``), of which ``in_cache`` are in its caches; None: all do.
        unbound: binds the model to a ring where that failed while it ran; None: it did not.
        finalizer: ends threads and closes files when the model is dropped unclosed; None when everything is resident.
        limits: gives back what it needs of MLX's allocator.
        closing: who is called when it is to be closed, before it waits for the pass under way.
        closed: whether ``close`` was called.
        random_after: the state in which mlx-lm's ``load`` would have left MLX's random numbers; ours left them as they
            were.
    """

    cpu_streams: int = 1
    positions: int | None = None
    vocabulary: int | None = None
    forms: tuple[CacheForm, ...] = ()
    prefix: Any = None
    residency: Residency | None = None
    watch: Watch | None = None
    experience: Any = None
    exclusive: Exclusive = field(default_factory=Exclusive)
    found: int = 0
    in_cache: int = 0
    text: list[int] | None = None
    unbound: Callable[[], None] | None = None
    finalizer: weakref.finalize[Any, Any] | None = None
    limits: weakref.finalize[Any, Any] | None = None
    closing: Observers = field(default_factory=Observers)
    closed: bool = False
    random_after: int = 0

    def __repr__(self) -> str:
        plan = self.plan
        layers = f"{plan.held} in memory"
        ring = f", the others through {plan.slots} slots of {format_size(plan.slot_bytes)}" if plan.streams else ""
        peak, budget = format_size(plan.peak_bytes), format_size(plan.budget_bytes)
        return f"<Session{', closed' * self.closed}: {layers}{ring}; {peak} planned of {budget}; reads {self.io}>"

    def read_from(self, replicas: Replicas | None) -> None:
        """Take note of the folders that it is read from. Whoever is lost is told of at once, and at the end."""
        self.replicas = replicas
        if replicas is None:
            return
        there = weakref.ref(self)

        def note(line: str) -> None:
            logging.getLogger("outcore").warning("%s", line)
            if (session := there()) is not None:
                session.note(line)

        replicas.note = note

    @property
    def lost_folder(self) -> bool:
        """Whether the model's own folder can be read no more, and mirrors are."""
        return self.replicas is not None and self.replicas.all[0].lost is not None

    def bind_again(self) -> None:
        """Try what failed when slots or files were changed for others while the model ran.

        Raises:
            OutcoreError: it fails again.
        """
        with self.exclusive:
            if self.unbound is not None:
                self.unbound()

    def allow(self, budget: int) -> None:
        """Run within another budget from now on, of which layers give what is missing.

        Args:
            budget: bytes.

        Raises:
            BudgetError: it is too small; nothing has changed, but that nothing in memory drafts any more.
        """
        with self.exclusive:
            before = self.plan
            self.plan = replace(before, budget_bytes=budget)
            try:
                if before.peak_bytes > budget and self.residency is not None:
                    steps = [s for s in prefill_steps(self.size.prompt) if s <= before.prefill_step]
                    self.residency.accommodate(self.size, steps or [before.prefill_step])
            except BudgetError:
                # What drafted may have been given up, all the same.
                self.plan = replace(self.plan, budget_bytes=before.budget_bytes)
                raise
            self.hold(self.plan)

    def before_pass(self) -> None:
        """Look at memory, where nothing is streamed; a streamed model looks by itself.

        Raises:
            BudgetError: memory is not enough even with nothing resident.
        """
        if self.streaming is None and not self.closed and self.watch is not None:
            self.watch.before_pass()

    def close(self) -> None:
        """Free slots, threads and files, and give MLX's limits back. A streamed model cannot be called afterwards. Safe
        to call twice, and from another thread than the one that generates: then between two of its tokens."""
        self.closing()
        with self.exclusive:
            self.closed = True
            if self.watch is not None:
                self.watch.close()
            if self.streaming is not None:
                self.streaming.close()
            self.transport.close()
            if self.limits is not None:
                self.limits()
            drafts = getattr(self.drafting, "model", None)
            if (own := getattr(drafts, "outcore", None)) is not None:
                own.close()  # another model, which was loaded for this one

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
