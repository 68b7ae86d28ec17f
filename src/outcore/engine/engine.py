"""Runs a model by a plan: reads what stays in memory and streams the rest through a ring of slots."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from ..disk.metrics import Metrics
from ..disk.ring import Ring
from ..machine.allocator import Needs, clear_cache, limits
from ..machine.device import device_kind
from ..modules.hooks import swap, unswap
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .binding import ReadSettings, check_when_read, forget, make_resident, ring_units, row_readers, streamed_tables
from .model_profile import ModelProfile
from .seams import Stage
from .streamed_layers import Binding, StreamedTable
from .streaming import Streaming


class Engine:
    """Runs a model by a plan. Plan, layers and slots change only through these methods, between forward passes.

    Args:
        lazy: if nothing is streamed, read each weight when it is first needed.
        exclusive: lock to hold while the model computes or changes; None: a single caller needs no lock.

    Attributes:
        size: bytes of the model's layers, caches and activations.
        streaming: streams the model; None while everything is resident.
        transport: exchanges arrays with the ranks that compute other layers of the model.
        unbound: the plan of a ``stream`` that failed, until ``bind_again``; None: there is none.
        io: ``direct``, ``cached``, or ``none`` when everything is resident.

    Raises:
        StoreError, ReadError, UsageError: see their docstrings.
        CheckpointError: a file has changed since the model was opened.
    """

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        reading: ReadSettings,
        *,
        lazy: bool = False,
        exclusive: AbstractContextManager[object] | None = None,
    ) -> None:
        self.plan, self.size, self.profile, self.reading = plan, profile.size, profile, reading
        self.metrics, self.io = Metrics(), "none"
        self.exclusive: AbstractContextManager[object] = contextlib.nullcontext() if exclusive is None else exclusive
        self.streaming: Streaming | None = None
        self.closed = False
        self.unbound: Plan | None = None
        # Both run when the model is closed or garbage-collected, so they must not refer to the model.
        self._give_back: Callable[[], object] | None = None
        self._close_files: weakref.finalize[Any, Any] | None = None
        clear_cache()
        self.transport = self._connect()
        try:
            if plan.streams:
                self._bind(plan)
            else:
                self.hold(plan)
                make_resident(profile, (), reading.progress, lazy)
                self.transport.whole(profile.lazy.model)
                profile.lazy.checkpoint.check()
                if lazy:
                    check_when_read(profile)
        except BaseException:
            self.closed = True
            if self._give_back is not None:
                self._give_back()
            raise

    @property
    def model(self) -> nn.Module:
        return self.profile.lazy.model

    # Changes between passes

    def adopt(self, plan: Plan, size: ModelSize | None = None) -> None:
        """Replaces the plan, and the model's size if ``size`` is given, and sets MLX's memory limits to match. The
        slots stay as they are."""
        if size is not None:
            self.resize(size)
        self.plan = plan
        self.hold(plan)

    def resize(self, size: ModelSize) -> None:
        self.size, self.profile = size, replace(self.profile, size=size)

    def stream(self, plan: Plan) -> None:
        """Binds the model to a new ring for another plan. After an error (files, slots) the model's next call tries
        again."""
        model = self.model

        def again(_: object, args: Any, kwargs: Any) -> Any:
            self.bind_again()
            return model(*args, **kwargs)

        unswap(model)
        try:
            self._bind(plan)
        except BaseException:
            # The weights are neither in memory nor bound to a ring.
            self.unbound = plan
            unswap(model)  # it may have been bound to the ring
            swap(model, "Unbound", again)
            raise
        self.unbound, self.plan = None, plan

    def bind_again(self) -> None:
        """Repeats a ``stream`` that failed."""
        with self.exclusive:
            if self.unbound is not None:
                self.stream(self.unbound)

    def close(self) -> None:
        """Frees slots, threads and files and restores MLX's limits. A streamed model cannot be called afterwards.

        Safe to call twice, and from another thread than the one that generates: it then acts between two tokens.
        """
        with self.exclusive:
            if self.streaming is not None:
                self.streaming.close()
            self.closed = True
            if self._give_back is not None:
                self._give_back()

    # Internals

    def _connect(self) -> Stage:
        return Stage()

    def _join(self, streaming: Streaming, plan: Plan) -> None:
        """Adapts KV offload and expert caches to a plan; called before a ring is replaced, and once the new one
        exists."""

    def hold(self, plan: Plan) -> None:
        if self.closed:
            return
        left_over = 0 if plan.streams else max(0, plan.budget_bytes - plan.peak_bytes)
        needs = Needs(
            # If nothing is streamed, the allocator may cache what the budget leaves over.
            cache=plan.allocator_bytes + left_over,
            # MLX allocates for queued work in advance, up to this limit, then waits for work to finish. While it
            # waits, freed memory counts late or not at all.
            memory=plan.budget_bytes - plan.allocator_bytes - self.size.ahead(plan.prefill_step),
            waits=plan.streams or self.size.rewritten,
            wired=plan.peak_bytes,
        )
        self._give_back = limits.hold(self.model, needs)

    def _bind(self, plan: Plan) -> None:
        """Binds the plan's streamed units to a new ring and reads the other weights into memory. After an error all
        files are closed."""
        profile, reading = self.profile, self.reading
        self.hold(plan)
        if self.streaming is not None:
            self.streaming.release()
            self._join(self.streaming, plan)
        units, order = ring_units(profile, plan)
        resident = [profile.layers[i].module for i in plan.resident]
        stays = {id(module) for module in resident}
        streamed = [n for n in order if id(units[n].layer.module) not in stays]
        reader = reading.reader(sorted({e.file for u in units for e in u.unit.extents}), self.metrics)
        tables: list[StreamedTable] = []
        try:
            # The files were opened some time ago. From here on the reader checks them.
            if reading.readable:
                profile.lazy.checkpoint.check()
            tables = streamed_tables(profile, plan, units, reading, self.metrics)
            # Before the slots are made, free the weights that will be streamed.
            gone = [*(units[n].layer for n in streamed), *(t.table.layer for t in tables)]
            forget(gone)
            ring = Ring(
                [u.unit for u in units],
                reader,
                slots=plan.slots,
                order=streamed,
                metrics=self.metrics,
                device=device_kind(),
                least=plan.unit_bytes if plan.pools else 0,
            )
            bound = Binding(ring, units, order, resident, tables)
            if self.streaming is not None:
                self.streaming.bind(bound)
            else:
                self.streaming = Streaming(
                    self.model,
                    bound,
                    metrics=self.metrics,
                    copies=profile.copies,
                    evaluates=profile.trace.evaluates,
                    exclusive=self.exclusive,
                    transport=self.transport,
                )
            self._join(self.streaming, plan)
            make_resident(profile, gone, reading.progress)
            ring.start()
        except BaseException:
            reader.close()
            for rows in row_readers(tables):
                rows.close()
            raise
        self.io = "direct" if reader.direct else "cached"
        if self._close_files is not None:
            self._close_files.detach()
        kv = self.streaming.kv
        held: list[Any] = [ring, *row_readers(tables), *([] if kv is None else [kv])]
        self._close_files = weakref.finalize(self.model, lambda: [each.close() for each in held])
