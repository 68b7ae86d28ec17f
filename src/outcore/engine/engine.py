"""A model that runs by a plan: what the plan keeps in memory is read, and the rest is streamed through a ring."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from enum import Enum
from typing import Any

from ..checkpoint.pack import pack_overlay
from ..disk.metrics import Metrics
from ..disk.reader import THREADS
from ..disk.ring import Ring
from ..errors import BudgetError
from ..machine.allocator import Needs, clear_cache
from ..machine.device import device_kind, on_cpu
from ..machine.exclusive import Exclusive
from ..machine.memory import memory_limits
from ..modules.hooks import swap, unswap
from ..modules.split_linear import split_rows
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import prefill_steps
from .binding import (
    ReadSettings,
    check_when_read,
    close_all,
    forget,
    make_resident,
    pool_units,
    ring_units,
    row_readers,
    scratch_for,
    streamed_tables,
)
from .droppable_draft import Drafter, DroppableDraft
from .governor import room
from .kv_disk import KvDisk, KvLayer
from .memory_monitor import Watch
from .model_profile import ModelProfile
from .observers import Observers
from .residency import Residency
from .resources import Resources
from .streaming import Streaming
from .transport import Solo, Transport
from .vocabulary import StreamedTable

LONGEST = 1 << 20
"""Tokens that a file of keys and values has room for from the start at most. It is sparse."""


class State(Enum):
    """Of an engine."""

    RESIDENT = "resident"
    STREAMING = "streaming"
    CLOSED = "closed"


class Engine:
    """Runs a model by a plan. It is complete when constructed; while it runs only its own methods change it, between
    forward passes.

    Args:
        profile: the lazily opened model.
        govern: watch memory while it runs, and shed resident layers where it is short.
        lazy: what stays in memory is read when it is first needed, where nothing is streamed.
        prefill_step_size: tokens of a prompt at a time, if they were asked for.
        notes: what the user should know already.

    Attributes:
        plan: what is resident, what is streamed, and where the bytes go.
        size: what the model weighs.
        metrics: live counters.
        streaming: what streams the model; None while everything is resident.
        transport: to the ranks that have other layers of the model.
        exclusive: which thread computes with the model.
        drafting: what drafts tokens for it; None for nothing.
        residency: makes room, sheds and regrows resident layers.
        watch: what watches memory; None where it was not asked for, or nothing could be shed.
        reading: how files are read, and the folders that they are read from.
        closing: who is called when it is to be closed, before it waits for the pass under way.

    Raises:
        StoreError, ReadError, UsageError: see their docstrings.
        CheckpointError: a file was written to since the model was opened.
    """

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        calibration: Calibration,
        reading: ReadSettings,
        *,
        cpu_streams: int = 1,
        govern: bool = True,
        lazy: bool = False,
        prefill_step_size: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.plan, self.size, self.profile, self.metrics = plan, profile.size, profile, Metrics()
        self.exclusive, self.closing = Exclusive(), Observers()
        self.streaming: Streaming | None = None
        self.watch: Watch | None = None
        self.drafting: Drafter | None = None
        self._notes, self.reading = notes, reading
        self._unbound: Plan | None = None  # could not be bound while the model ran: whoever calls it next tries again
        self._resources = Resources(profile.lazy.model)
        self._tell_of_lost_folders()
        clear_cache()
        if on_cpu():
            split_rows(profile.lazy.model, cpu_streams)
        self.transport: Transport = Solo() if profile.share is None else profile.share.install(self)
        self.residency = Residency(self, calibration, prefill_step_size)
        if govern:
            self.residency.layers.come_down(room(memory_limits()))
        try:
            if self.plan.streams:
                self._bind(self.plan)
            else:
                self.hold(self.plan)
                self._load_all(lazy)
        except BaseException:
            self._resources.close()
            raise
        if govern and self.residency.layers.spare_bytes:
            self.watch = Watch(self, self.residency)

    # What it is

    @property
    def state(self) -> State:
        """Whether anything is streamed now."""
        if self._resources.closed:
            return State.CLOSED
        return State.RESIDENT if self.streaming is None else State.STREAMING

    @property
    def io(self) -> str:
        """How files are read: ``direct``, ``cached``, or ``none`` when everything is resident."""
        return self._resources.io

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: what cannot be streamed, a dtype that would be faster, what was shed and why."""
        return self._notes if self.watch is None else (*self._notes, *self.watch.notes)

    def note(self, line: str, *, instead: str | None = None) -> None:
        """Tell the user once; in place of lines that begin with ``instead``."""
        kept = tuple(n for n in self._notes if instead is None or not n.startswith(instead))
        self._notes = kept if line in kept or not line else (*kept, line)

    # What changes it, between passes

    def adopt(self, plan: Plan, size: ModelSize | None = None) -> None:
        """Run by another plan from now on, for a model of another size; MLX keeps no more freed memory than it leaves
        over."""
        self.plan, self.size = plan, size or self.size
        self.hold(plan)

    def resize(self, size: ModelSize) -> None:
        """Count what the model weighs anew, before there is a plan for that."""
        self.size = size

    def stream(self, plan: Plan) -> None:
        """Stream by a plan from the next pass on, through a ring of its own.

        Raises:
            StoreError, ReadError, CheckpointError: files or slots cannot be had. The next call tries again.
        """
        model = self.profile.lazy.model

        def again(_: object, args: Any, kwargs: Any) -> Any:
            self.bind_again()
            return model(*args, **kwargs)

        unswap(model)
        try:
            self._bind(plan)
        except BaseException:
            # Its weights are neither in memory nor bound to a ring.
            self._unbound = plan
            unswap(model)  # it may have got as far as the ring
            swap(model, "Unbound", again)
            raise
        self._unbound, self.plan = None, plan
        if self.watch is not None:
            self.watch.attach()

    def bind_again(self) -> None:
        """Try once more what failed when slots or files were changed for others while the model ran.

        Raises:
            OutcoreError: it fails again.
        """
        with self.exclusive:
            if self._unbound is not None:
                self.stream(self._unbound)

    def draft_with(self, drafting: Drafter | None, droppable: DroppableDraft | None = None) -> None:
        """What drafts from now on; ``droppable``: how it is given up where memory is short."""
        self.drafting, self.residency.layers.draft = drafting, droppable

    def without_draft(self, profile: ModelProfile) -> None:
        """What drafted was given up: the model is another one without it."""
        self.profile, self.size = profile, profile.size

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
                if before.peak_bytes > budget:
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
        if self.state is State.RESIDENT and self.watch is not None:
            self.watch.before_pass()

    def check_disk(self, plan: Plan, size: ModelSize) -> None:
        """Raise a StoreError where the disk has no room for a plan's keys and values."""
        if plan.kv_slot and (self.streaming is None or self.streaming.beside is None):
            scratch_for(size, plan, self.reading).close()

    def close(self) -> None:
        """Free slots, threads and files, and give MLX's limits back. A streamed model cannot be called afterwards. Safe
        to call twice, and from another thread than the one that generates: then between two of its tokens."""
        self.closing()
        with self.exclusive:
            if self.streaming is not None:
                self.streaming.close()
            self.transport.close()
            self._resources.close()

    # How it is done

    def hold(self, plan: Plan) -> None:
        """Take what a plan needs of MLX's allocator."""
        left_over = 0 if plan.streams else max(0, plan.budget_bytes - plan.peak_bytes)
        needs = Needs(
            # Where nothing is streamed, what the budget leaves over is the allocator's.
            cache=plan.allocator_bytes + left_over,
            # MLX allocates for queued work ahead of its turn, as much as there is room for. Behind each operation that
            # took it past this limit it waits for work to finish; freed memory is not counted there, or makes room
            # late.
            memory=plan.budget_bytes - plan.allocator_bytes - self.size.ahead,
            waits=plan.streams,
            wired=plan.peak_bytes,
        )
        self._resources.limits(needs)

    def _load_all(self, lazy: bool) -> None:
        """Read all weights into memory; or have the first call read them."""
        profile = self.profile
        make_resident(profile, (), (), self.reading.progress, lazy)
        self.transport.whole(profile.lazy.model)
        profile.lazy.checkpoint.check()
        if lazy:
            check_when_read(profile)

    def _bind(self, plan: Plan) -> None:
        """Bind what the plan streams to a ring, and read into memory what is not there yet. Nothing is held on an
        error."""
        profile, reading = replace(self.profile, size=self.size), self.reading
        pack_overlay(profile.lazy, profile.layers, profile.overlay, self.reading.progress)
        self.hold(plan)
        if self.streaming is not None:
            self.streaming.release()
            self.streaming.set_pools(*pool_units(profile, plan))
        units, order = ring_units(profile, plan)
        resident = [profile.layers[i].module for i in plan.resident]
        stays = {id(module) for module in resident}
        streamed = [n for n in order if id(units[n].layer.module) not in stays]
        reader = reading.reader(units, self.metrics)
        tables: list[StreamedTable] = []
        try:
            # It was opened a while ago, or long ago, where memory got short since. From here on the reader looks.
            if not reading.lost_folder:
                profile.lazy.checkpoint.check()
            tables = streamed_tables(profile, plan, units, self.metrics, reading.replicas)
            # Weights that are in memory and shall not be: freed before slots are made.
            forget([units[n].layer for n in streamed], tables)
            ring = Ring(
                [u.unit for u in units],
                reader,
                slots=plan.slots,
                order=streamed,
                metrics=self.metrics,
                device=device_kind(),
            )
            if self.streaming is not None:
                self.streaming.bind(units, ring, order=order, resident=resident, tables=tables)
            else:
                self.streaming = Streaming(
                    profile.lazy.model,
                    units,
                    ring,
                    order=order,
                    resident=resident,
                    tables=tables,
                    metrics=self.metrics,
                    copies=profile.copies,
                    evaluates=profile.evaluates,
                    exclusive=self.exclusive,
                    graph=profile.size.graph(on_cpu()),
                    transport=self.transport,
                )
                self.streaming.set_pools(*pool_units(profile, plan))
            self._keep_apart(self.streaming, plan)
            make_resident(profile, [units[n].layer for n in streamed], [t.table for t in tables], self.reading.progress)
            ring.start()
        except BaseException:
            close_all(reader, *row_readers(tables))
            raise
        kv = self.streaming.beside
        self._resources.io = "direct" if reader.direct else "cached"
        self._resources.files(ring, *row_readers(tables), *([] if kv is None else [kv]))

    def _keep_apart(self, streaming: Streaming, plan: Plan) -> None:
        """Have keys and values of streamed layers lie on disk, if that is the plan.

        Raises:
            StoreError: the disk has no room for them.
        """
        if not plan.kv_slot:
            return
        if isinstance(kv := streaming.beside, KvDisk):
            kv.resize(plan.kv_slot)
            return
        profile, scratch, there = self.profile, scratch_for(self.size, plan, self.reading), weakref.ref(streaming)

        def drain() -> None:
            if (streaming := there()) is not None:
                streaming.drain()

        streaming.beside = KvDisk(
            [KvLayer(id(profile.layers[i].module), profile.layers[i].path, n) for i, n in profile.kept_apart.items()],
            scratch,
            slot_bytes=plan.kv_slot,
            tokens=max(plan.context, min(profile.max_context or 0, LONGEST)),
            drain=drain,
            metrics=self.metrics,
            device=device_kind(),
            threads=self.reading.threads or THREADS,
        )

    def _tell_of_lost_folders(self) -> None:
        """Tell at once, and at the end, when one of the folders that are read from is lost."""
        if self.reading.replicas is None:
            return
        there = weakref.ref(self)

        def note(line: str) -> None:
            logging.getLogger("outcore").warning("%s", line)
            if (engine := there()) is not None:
                engine.note(line)

        self.reading.replicas.note = note
