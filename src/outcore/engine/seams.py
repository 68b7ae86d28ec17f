"""Protocols by which KV offload, expert caches and other ranks join a streamed model.

The engine knows nothing else of them. A missing one is None; ``Stage`` itself stands for a model without other ranks.
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
    """Keeps keys and values of streamed layers on disk. Layers are given by their modules' ids; unknown ones are
    ignored."""

    def resize(self, slot_bytes: int) -> None: ...

    def expect(self, modules: Sequence[int]) -> None:
        """Tells it the order in which layers will be called."""

    def adopt(self, caches: Sequence[Any]) -> None:
        """Takes over the caches of the whole model before a pass."""

    def begin_pass(self) -> None: ...

    def enter(self, module: int, caches: Sequence[Any], building: bool) -> None:
        """Called before a layer; ``building``: only its graph is built for now."""

    def arrive(self, module: int) -> None:
        """Waits for a layer's keys and values."""

    def computed(self, module: int) -> None: ...

    def abandon(self) -> None: ...
    def close(self) -> None: ...


class ExpertCaches(Protocol):
    """Reads routed experts one by one (``outcore_experts``)."""

    def bind(self, ring: Ring, units: Sequence[StreamedUnit]) -> None:
        """Uses this ring for layers whose experts are all streamed."""

    def begin(self, tokens: int | None) -> bool:
        """Begins a pass over ``tokens`` tokens (None: many). Returns whether it takes experts from the caches, not the
        ring."""

    def settle(self) -> None:
        """Waits for the experts of everything built so far."""

    def end(self) -> None: ...
    def abandon(self) -> None: ...

    def done(self, lease: Lease) -> None:
        """Called once a unit of the ring is computed, while its slot still holds it."""

    def close(self) -> None: ...


class PassRecorder(Protocol):
    recording: RecordedPass | None

    def moved(self) -> Moved: ...
    def reached(self, moved: Moved) -> None: ...


class Stage:
    """The ranks that hold other layers of the model. This class itself stands for none: it sends and waits for
    nothing."""

    alone = True

    @property
    def eager(self) -> bool:
        """Whether the model evaluates arrays in its forward pass on any rank."""
        return False

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None:
        """Routes calls of streamed layers through ``recorder``, and calls ``before_send`` before anything is sent."""

    def whole(self, model: nn.Module) -> None:
        """Called if none of this rank's layers are streamed."""

    def fill(self, copy: nn.Module | None) -> None:
        """Uses a copy of the whole model, which drafts on this rank, to fill the caches of other ranks' layers; None:
        no longer."""

    def watch(self, module: nn.Module) -> None:
        """Sends the outputs of a layer that is now resident, if other ranks need them."""

    def unwatch(self, module: nn.Module) -> None: ...

    def begin_pass(self, *, pooled: bool) -> None:
        """Begins a pass; ``pooled``: experts are read one by one, so routers are evaluated on the way."""

    def passes(self) -> AbstractContextManager[Callable[[], None]]:
        """Returns a context in which several passes are recorded; it yields a function to call before each of them."""
        return contextlib.nullcontext(lambda: None)

    @property
    def waits(self) -> bool:
        return False

    def settle(self) -> None:
        """Waits for the inputs of everything built so far, unless the pass is recorded. Raises LinkError if another
        rank fails."""

    def leaving(self, module: int, out: Any) -> Leaving:
        """Returns the outputs of a layer (by its module's id) that other ranks need."""
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
        """Returns a layer's experts, ``used`` of which serve a token, and their sizes; None where there are none."""
