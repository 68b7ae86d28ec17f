"""Finds the rows that a pass will look up in tables on disk before it begins, and starts to read them (the core's group
``row_prefetch``).

Which rows these are depends on tokens only: of embeddings the tokens, of tables of n-grams what the model's code
computes from a token and those before it. So before a pass the model's own code runs on the pass's tokens and copies
of its caches, with layers that return what they are given and tables that note what they are asked. Of a layer with
tables inside, it runs until it needs a weight. Nothing but the rows' numbers is evaluated. The pass itself then asks
for the same rows and finds them read or being read; rows that it asks for besides are read then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.checkpoint.lazy_model import DTYPES
from outcore.engine.model_profile import ModelProfile
from outcore.engine.streamed_layers import StreamedTable
from outcore.engine.streaming import Streaming
from outcore.modules.cache_rollback import KEEPER
from outcore.modules.hooks import Call, handle, swap, unswap
from outcore.modules.layers import modules

# Where a module with a replaced call keeps it (``modules.hooks.swap``).
CALL = "_outcore_call"


def install(streaming: Streaming, profile: ModelProfile) -> None:
    """Makes each pass of the model start reading the rows that it will look up before it begins.

    A model with one table (its embedding) asks for it first in each pass: nothing would be gained.
    """
    tables = [t for t in streaming.tables if t.reader is not None]
    if len(tables) < 2 or CALL not in streaming.model.__dict__:
        return  # not bound to a ring: this is called again once it is
    prefetch = RowPrefetch(tables, profile, [t.module for t in streaming.tables if t.reader is None])
    within: Call = streaming.model.__dict__[CALL]

    def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                prefetch.begin(original, args, kwargs)
                return original(*args, **kwargs)
            finally:
                prefetch.end()

        return within(run, args, kwargs)

    streaming.model.__dict__[CALL] = call


class Reached(Exception):
    """Ends the run of a layer or a model ahead of a pass, where its rows are known or it needs weights."""


class RowPrefetch:
    """Runs a model ahead of its passes to find the rows of ``tables`` that they will look up; ``streamed``: modules
    outside of layers whose weights are streamed."""

    def __init__(self, tables: Sequence[StreamedTable], profile: ModelProfile, streamed: Sequence[nn.Module]) -> None:
        self._tables = tables
        self._noted: list[tuple[StreamedTable, mx.array]] = []
        self._left = 0  # layers with tables that this run has not called
        inside = {id(t.module) for t in tables}
        self._holding = {id(x.module) for x in profile.layers if inside & set(map(id, modules(x.module)))}
        self._classes: dict[type, type] = {}
        self._calls: list[tuple[nn.Module, Call]] = []
        for layer in profile.layers:
            self._calls.append((layer.module, partial(self._passed, id(layer.module) in self._holding)))
            if id(layer.module) in self._holding:
                weights = {id(p.module): p.module for p in layer.parameters}
                self._calls += [(module, _reached) for module in weights.values()]
        self._calls += [(module, _reached) for module in streamed]
        self._calls += [(t.module, partial(self._looked_up, t, _zero(t))) for t in tables]

    def begin(self, run: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        """Starts reading the rows that ``run(*args, **kwargs)`` will look up, as far as they can be known."""
        self._left = len(self._holding)
        # A model's code may raise anything on layers that do nothing. What it noted until then is right.
        with suppress(Exception), self._replaced():
            run(*(_copy(a) for a in args), **{k: _copy(v) for k, v in kwargs.items()})
        noted, self._noted = self._noted, []
        mx.eval([ids for _, ids in noted])
        for table, ids in noted:
            _read_ahead(table, ids)

    def end(self) -> None:
        """Drops what was noted or read and not asked for."""
        self._noted = []
        for table in self._tables:
            assert table.reader is not None
            while table.reader.ahead:
                table.reader.ahead.popitem()[1][1].cancel()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        before = [(module, type(module), module.__dict__.get(CALL)) for module, _ in self._calls]
        try:
            for module, call in self._calls:
                if CALL in module.__dict__:
                    module.__dict__[CALL] = call
                elif (kind := self._classes.get(type(module))) is not None:
                    module.__class__ = kind
                    module.__dict__[CALL] = call
                else:
                    kind = type(module)
                    swap(module, "Prefetched", call)
                    self._classes[kind] = type(module)
            yield
        finally:
            for module, kind, was in before:
                if was is None:
                    unswap(module)
                    module.__class__ = kind
                else:
                    module.__dict__[CALL] = was

    def _passed(self, holds: bool, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if holds:
            with suppress(Reached):
                original(*args, **kwargs)
            self._left -= 1
        if self._left <= 0:
            raise Reached
        return args[0]

    def _looked_up(
        self, table: StreamedTable, zero: mx.array, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> mx.array:
        self._noted.append((table, args[0]))
        return mx.broadcast_to(zero, (*args[0].shape, zero.shape[-1]))


def _read_ahead(table: StreamedTable, ids: mx.array) -> None:
    """Starts reading the rows of ``ids`` that are not being read."""
    assert table.reader is not None
    rows, _ = table.asked(ids)
    for info in table.table.places:
        if (key := (info.file, info.offset, *rows)) not in table.reader.ahead:
            size = info.nbytes // info.shape[0]
            table.reader.ahead[key] = table.reader.submit(info.file, info.offset, size, rows, table.table.layer.path)


def _reached(*_: Any) -> Any:
    raise Reached


def _zero(table: StreamedTable) -> mx.array:
    """Returns a row of zeros of a table, as large and of the dtype that its lookups give; it takes no memory."""
    places, casts, module = table.table.places, table.table.casts, table.module
    n = 0 if len(places) == 1 else 1  # quantized: the scales' dtype
    width = places[0].shape[-1] if len(places) == 1 else module.dims
    return mx.broadcast_to(mx.zeros((1,), dtype=casts[n] or DTYPES[places[n].dtype]), (width,))


def _copy(value: Any, depth: int = 6) -> Any:
    """Returns caches, alone or in lists, as objects of their own; arrays share memory until one is written to."""
    if isinstance(value, mx.array):
        return handle(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_copy(v, depth) for v in value)
    if isinstance(value, str | int | float | nn.Module | type) or value is None or depth == 0 or callable(value):
        return value
    if not hasattr(value, "__dict__"):
        return value
    twin = object.__new__(type(value))
    twin.__dict__.update({k: v if k == KEEPER else _copy(v, depth - 1) for k, v in vars(value).items()})
    return twin
