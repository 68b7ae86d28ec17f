"""``model.outcore``: the engine of a loaded model, with the state that decoding keeps from one text to the next."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .. import packages
from ..checkpoint.mirrors import Mirrors
from ..checkpoint.pack import pack_overlay
from ..checkpoint.positions import longest_context, position_limit
from ..disk.metrics import Metrics
from ..disk.reader import Reader, RowReader
from ..errors import BudgetError
from ..machine.device import on_cpu
from ..machine.exclusive import Exclusive
from ..machine.memory import memory_limits
from ..modules.cache_form import CacheForm
from ..modules.layers import modules
from ..modules.split_linear import split_rows
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import prefill_steps
from ..sizes import format_size
from .binding import ReadSettings
from .engine import Engine
from .extensions import kv_offload, on_demand
from .governor import Watch, room
from .model_profile import ModelProfile
from .residency import Residency
from .resident_layers import Drafter, DroppableDraft, come_down
from .streaming import Streaming
from .transport import Transport


@dataclass(frozen=True)
class Folders(ReadSettings):
    """How files are read, from the model's folder and its mirrors. ``kv_dir``: folder for offloaded keys and values;
    None: the cache folder."""

    kv_dir: str | Path | None = None
    mirrors: Mirrors | None = None

    @property
    def readable(self) -> bool:
        return self.mirrors is None or self.mirrors.all[0].lost is None

    def reader(self, files: Any, metrics: Metrics) -> Reader:
        if self.mirrors is None:
            return super().reader(files, metrics)
        return self.mirrors.reader(files, metrics=metrics, **self.options)

    def rows(self, files: Any, metrics: Metrics) -> RowReader:
        return super().rows(files, metrics) if self.mirrors is None else RowReader(files, metrics, self.mirrors.reader)


closed_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions that were closed and are still there: a model and its session refer to each other, so that both wait for the
garbage collector."""


class Session(Engine):
    """A running model, with the state that decoding keeps from one text to the next.

    Args:
        govern: watch memory and shed resident layers when it is short.
        cpu_streams: MLX streams that linear layers are split over.
        prefill_step_size: tokens of a prompt to compute at a time; None: chosen by the plan.
        prefix: the prefix cache (``decode.prefix_cache``); None: there is none.
        media: reads images (``decode.media``); None: the model reads text only.

    Attributes:
        acceptance: acceptance statistics (``decode.speculative.acceptance``); None: nothing was drafted yet.
        drafting: the drafter; None: nothing is drafted.
        residency: makes room, sheds and regrows resident layers.
        watch: checks memory; None: ``govern`` is off, or nothing could be shed.
        closing: functions to call before ``close`` waits for the running pass.
        vocabulary: tokens that the model has embeddings for; None: unknown.
        max_context: tokens of the context that the model was trained for; None: its config does not say.
        found: tokens of the last prompt that the prefix cache held.
        in_cache: tokens of the last text, prompt and answer, that went into the caller's ``prompt_cache``.
    """

    transport: Transport
    reading: Folders
    exclusive: Exclusive

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        calibration: Calibration,
        reading: Folders,
        *,
        govern: bool = True,
        lazy: bool = False,
        cpu_streams: int = 1,
        prefill_step_size: int | None = None,
        notes: tuple[str, ...] = (),
        prefix: Any = None,
        media: Any = None,
    ) -> None:
        embeddings = [m for m in modules(profile.lazy.model) if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
        self.vocabulary = max((m.weight.shape[0] for m in embeddings), default=None)
        self.max_context = longest_context(profile.lazy.config)
        self.prefix, self.media, self.cpu_streams = prefix, media, cpu_streams
        self.acceptance: Any = None
        self.found = self.in_cache = 0
        self.closing, self._notes = list[Callable[[], object]](), notes
        self.drafting: Drafter | None = None
        self.watch: Watch | None = None
        self._tell_of_lost_folders(reading.mirrors)
        if on_cpu():
            split_rows(profile.lazy.model, cpu_streams)
        smaller = come_down(profile.size, plan, room(memory_limits()), calibration) if govern else plan
        if smaller.streams:
            pack_overlay(profile.lazy, profile.layers, profile.overlay, reading.progress)
        super().__init__(smaller, profile, reading, lazy=lazy, exclusive=Exclusive())
        self.residency = Residency(self, calibration, prefill_step_size)
        self.residency.layers.shed_layers |= set(plan.resident) - set(smaller.resident)
        if govern and self.residency.layers.movable()[0]:
            self.watch = Watch(self, self.residency)

    # Properties

    @property
    def forms(self) -> tuple[CacheForm, ...]:
        return self.profile.trace.forms

    @property
    def positions(self) -> int | None:
        """Tokens that the model has positions for; None: no limit."""
        return position_limit(self.profile.lazy.config)

    def __repr__(self) -> str:
        plan = self.plan
        layers = f"{plan.held} in memory"
        ring = f", the others through {plan.slots} slots of {format_size(plan.slot_bytes)}" if plan.streams else ""
        peak, budget = format_size(plan.peak_bytes), format_size(plan.budget_bytes)
        closed = ", closed" * (self.closed)
        return f"<Session{closed}: {layers}{ring}; {peak} planned of {budget}; reads {self.io}>"

    def __dir__(self) -> list[str]:
        return ["close", "in_cache", "metrics", "notes", "plan"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: what cannot be streamed, a faster dtype, what was shed and why."""
        return self._notes if self.watch is None else (*self._notes, *self.watch.notes)

    def note(self, line: str) -> None:
        if line not in self._notes:
            self._notes = (*self._notes, line)

    # Changes between passes

    def stream(self, plan: Plan) -> None:
        pack_overlay(self.profile.lazy, self.profile.layers, self.profile.overlay, self.reading.progress)
        super().stream(plan)
        if self.watch is not None:
            self.watch.attach()

    def draft_with(self, drafting: Drafter | None, droppable: DroppableDraft | None = None) -> None:
        """Sets the drafter; ``droppable`` describes the model without it (None: it cannot be given up)."""
        self.drafting, self.residency.layers.draft = drafting, droppable

    def without_draft(self, profile: ModelProfile) -> None:
        """Gives up the drafter; ``profile`` is the model's without it."""
        self.profile, self.size = profile, profile.size
        if self.drafting is not None:
            self.drafting = self.drafting.give_up(self)

    def allow(self, budget: int) -> None:
        """Changes the budget to ``budget`` bytes, shedding layers if needed.

        Raises:
            BudgetError: it is too small. Nothing has changed, except that a draft in memory may have been given up.
        """
        with self.exclusive:
            before = self.plan
            self.plan = replace(before, budget_bytes=budget)
            try:
                if before.peak_bytes > budget:
                    steps = [s for s in prefill_steps(self.size.prompt) if s <= before.prefill_step]
                    self.residency.accommodate(self.size, steps or [before.prefill_step])
            except BudgetError:
                # The draft may have been given up nevertheless.
                self.plan = replace(self.plan, budget_bytes=before.budget_bytes)
                raise
            self.hold(self.plan)

    def before_pass(self) -> None:
        """Checks memory if nothing is streamed; a streamed model checks by itself."""
        if self.watch is not None and not self.closed and self.streaming is None:
            self.watch.before_pass()

    def check_disk(self, plan: Plan, size: ModelSize) -> None:
        offload = kv_offload()
        if offload is not None and plan.kv_slot and (self.streaming is None or self.streaming.kv is None):
            offload.check_room(size, plan, self.reading.kv_dir, self.reading.io)

    def close(self) -> None:
        for call in self.closing:
            call()
        with self.exclusive:
            super().close()
            closed_sessions.add(self)
            if self.drafting is not None:
                self.drafting.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Internals

    def _connect(self) -> Transport:
        share = self.profile.share
        return Transport() if share is None else share.install(self)

    def _join(self, streaming: Streaming, plan: Plan) -> None:
        experts = None if (found := on_demand()) is None else found.experts_for(streaming, self.profile, plan)
        offload = kv_offload()
        for package in packages.modules("row_prefetch").values() if self.transport.alone else ():
            package.install(streaming, self.profile)
        streaming.join(experts, None if offload is None else offload.offloader(streaming, self, plan))

    def _tell_of_lost_folders(self, mirrors: Mirrors | None) -> None:
        if mirrors is None:
            return
        there = weakref.ref(self)

        def note(line: str) -> None:
            logging.getLogger("outcore").warning("%s", line)
            if (session := there()) is not None:
                session.note(line)

        mirrors.note = note
