"""Protocols by which KV offload, expert caches and other ranks join a streamed model.

The engine uses nothing else of them. Without KV offload or expert caches, the object is None; without other ranks, it
is a ``Stage``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..disk.ring import Lease, Ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..modules.layers import Layer, Projection
    from ..plan.partition import ExpertNumbers
    from .executor import Leaving, RecordedPass
    from .layer_sizes import Cast, Place
    from .streamed_layers import StreamedUnit
    from .undo import Moved, Undo


class KVOffloader(Protocol):
    """Keeps keys and values of streamed layers on disk. ``module`` is the ``id`` of a layer's module; layers that are
    not offloaded are ignored."""

    def resize(self, slot_bytes: int) -> None: ...

    def expect(self, modules: Sequence[int]) -> None:
        """Sets the order in which layers will be called, for prefetching."""

    def adopt(self, caches: Sequence[Any]) -> None:
        """Begins to store a text's caches, given for all layers, on disk. Called before a pass."""

    def begin_pass(self) -> None: ...

    def enter(self, module: int, caches: Sequence[Any], building: bool) -> None:
        """Called before a layer with its caches; ``building``: the layer's graph is built now and evaluated later."""

    def arrive(self, module: int) -> None:
        """Waits until a layer's keys and values have been read."""

    def computed(self, module: int) -> None: ...

    def abandon(self) -> None: ...
    def close(self) -> None: ...


class ExpertCaches(Protocol):
    """Reads routed experts one by one (``outcore_experts``)."""

    def bind(self, ring: Ring, units: Sequence[StreamedUnit]) -> None:
        """Uses this ring in passes that stream all experts, and its slots for the experts of layers without a
        cache."""

    def begin(self, tokens: int | None, passes: int = 1) -> bool:
        """Begins a pass over ``tokens`` tokens (None: many), or ``passes`` that share it. Returns whether it takes
        experts from the caches, not the ring."""

    @property
    def pending(self) -> bool:
        """Whether the graph built so far needs experts that may have to be read."""

    @property
    def shared(self) -> bool:
        """Whether some layers' experts are read into the ring's slots."""

    @property
    def expert_s(self) -> float:
        """Mean seconds in which an expert is read; tiny, but not 0, before any was."""

    def settle(self) -> None:
        """Waits until the experts that the graph built so far needs have been read."""

    def end(self) -> None: ...
    def abandon(self) -> None: ...

    def done(self, lease: Lease) -> None:
        """Called once a unit of the ring is computed, while its weights are still in the slot."""

    def close(self) -> None: ...


class PassRecorder(Protocol):
    recording: RecordedPass | None

    def moved(self) -> Moved: ...
    def reached(self, moved: Moved) -> None: ...


class Stage:
    """Exchanges layers' inputs and outputs with other ranks. This class itself is for a single rank: it sends nothing
    and waits for nothing."""

    alone = True

    @property
    def eager(self) -> bool:
        """Whether the model evaluates arrays in its forward pass on any rank."""
        return False

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None:
        """Sets the ``recorder`` of streamed passes, and a function to call before anything is sent."""

    def whole(self, model: nn.Module) -> None:
        """Has each call of the model wait for other ranks at its end. Called if this rank streams no layer."""

    def fill(self, copy: nn.Module | None) -> None:
        """From now on has ``copy``, the copy of the whole model that drafts on this rank, fill the caches of other
        ranks' layers; None: ends it."""

    def watch(self, module: nn.Module) -> None:
        """From now on sends the outputs of a resident layer, if other ranks need them."""

    def unwatch(self, module: nn.Module) -> None: ...

    def begin_pass(self, *, pooled: bool) -> None:
        """Begins a pass; ``pooled``: experts are read one by one, so routers are evaluated while the graph is built."""

    def passes(self) -> AbstractContextManager[Callable[[], None]]:
        """Returns a context in which several passes are recorded; it yields a function to call before each of them."""
        return contextlib.nullcontext(lambda: None)

    @property
    def waits(self) -> bool:
        return False

    def settle(self) -> None:
        """Waits for the inputs that other ranks send for the graph built so far, unless the pass is recorded. Raises
        LinkError if another rank fails."""

    def leaving(self, module: int, out: Any) -> Leaving:
        """Returns those of a layer's outputs ``out`` that other ranks need; ``module``: ``id`` of the layer."""
        return []

    def depart(self, leaving: Leaving) -> None: ...

    def abandon(self) -> None: ...

    def transaction(self, undo: Undo | None) -> None:
        """Sets the undo of a pass in which nothing is streamed; None: the pass is over."""

    # Context in which this rank waits for its device, so other ranks suspend their timeouts.
    working: Callable[[], AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)


class ExpertFinder(Protocol):
    def switches_in(self, layer: Layer) -> Sequence[nn.Module]: ...

    def experts(
        self,
        layer: Layer,
        pieces: Sequence[Projection],
        casts: Sequence[mx.Dtype | None],
        place: Place,
        used: int,
        to: Cast,
    ) -> tuple[Any, ExpertNumbers | None]:
        """Returns a layer's experts and their sizes; None where it has none. ``used``: experts per token."""
