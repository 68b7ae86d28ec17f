"""What joins a streamed model without being part of it: KV offload, experts on demand, packed copies, other machines.

The engine knows these alone. Whatever is not there is None, or does nothing (``Stage``).
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
    from .layer_sizes import Cast, Place
    from .recorded_pass import Leaving, RecordedPass
    from .streamed_layers import StreamedUnit
    from .undo import Moved, Undo


class KVOffloader(Protocol):
    """Keeps keys and values of streamed layers elsewhere (``kv_offload``). It is told of layers by their modules' ids;
    those that it does not know it passes by."""

    def resize(self, slot_bytes: int) -> None:
        """Between forward passes: the largest layer's take so many bytes now."""

    def expect(self, modules: Sequence[int]) -> None:
        """Between forward passes: these layers will be called, in this order."""

    def adopt(self, caches: Sequence[Any]) -> None:
        """Between forward passes: these caches of the whole model will be used."""

    def begin_sweep(self) -> None:
        """Nothing is under way."""

    def enter(self, module: int, caches: Sequence[Any], building: bool) -> None:
        """A layer is about to be called; ``building``: only its graph is built for now."""

    def arrive(self, module: int) -> None:
        """Wait for what it needs to be there."""

    def computed(self, module: int) -> None:
        """All of the layer was computed."""

    def abandon(self) -> None:
        """A forward pass broke off."""

    def close(self) -> None:
        """Free all that is held. Safe to call twice."""


class ExpertCaches(Protocol):
    """Reads routed experts one by one (``experts``)."""

    def bind(self, ring: Ring, units: Sequence[StreamedUnit]) -> None:
        """Layers are streamed through this ring from now on."""

    def begin(self, tokens: int | None) -> bool:
        """A pass over so many tokens begins (None: many); returns whether it takes experts from the caches, so that
        nothing goes through the ring."""

    def settle(self) -> None:
        """Return when the experts of all that was built so far are there."""

    def end(self) -> None:
        """A pass's graph is built."""

    def abandon(self) -> None:
        """A pass broke off."""

    def done(self, lease: Lease) -> None:
        """A unit of the ring is computed, and its slot still holds it."""

    def close(self) -> None:
        """Give the modules their own classes back, and the memory."""


class PassRecorder(Protocol):
    """What calls of streamed layers go through (``executor.LayerExecutor``)."""

    recording: RecordedPass | None

    def moved(self) -> Moved: ...

    def reached(self, moved: Moved) -> None: ...


class Stage:
    """The ranks that have other layers of the model. Of this class itself: there are none, so nothing is sent, and
    nobody is waited for.

    Attributes:
        alone: there are none.
    """

    alone = True

    @property
    def eager(self) -> bool:
        """Whether the model evaluates arrays in its forward pass, on whichever rank."""
        return False

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None:
        """Calls of streamed layers go through ``recorder``. ``before_send`` is called before anything is sent."""

    def whole(self, model: nn.Module) -> None:
        """Nothing of the model is streamed here."""

    def fill(self, copy: nn.Module | None) -> None:
        """A copy of the whole model, which drafts on this rank, fills the caches of other ranks' layers; None: it was
        given up."""

    def watch(self, module: nn.Module) -> None:
        """A layer stays in memory from now on: send what it puts out, if others need it."""

    def unwatch(self, module: nn.Module) -> None:
        """A layer will be streamed."""

    def begin_sweep(self, *, pooled: bool) -> None:
        """A sweep begins; ``pooled``: experts are read one by one, so routers are evaluated on the way."""

    def passes(self) -> AbstractContextManager[Callable[[], None]]:
        """Several passes are recorded meanwhile; what it gives is called before each of them."""
        return contextlib.nullcontext(lambda: None)

    @property
    def waits(self) -> bool:
        """Whether ``settle`` would wait."""
        return False

    def settle(self) -> None:
        """Wait for all that was built so far depends on, where passes are not recorded.

        Raises:
            LinkError: another rank is gone, silent, or sent what it should not.
        """

    def leaving(self, module: int, out: Any) -> Leaving:
        """What other ranks need of a layer's outputs; ``module``: the layer's id."""
        return []

    def depart(self, leaving: Leaving) -> None:
        """Compute it and send it."""

    def abandon(self) -> None:
        """After something failed: nobody waits for what was under way."""

    def transaction(self, undo: Undo | None) -> None:
        """What takes caches back if a pass fails, where nothing is streamed; None: it is over."""

    working: Callable[[], AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """This rank waits for its device meanwhile, so others have patience with it."""


class ExpertFinder(Protocol):
    """Finds routed experts that can be read one by one (``on_demand``)."""

    def switches_in(self, layer: Layer) -> Sequence[nn.Module]:
        """Modules that are called with numbers of experts."""

    def experts(
        self,
        layer: Layer,
        pieces: Sequence[Projection],
        casts: Sequence[mx.Dtype | None],
        place: Place,
        used: int,
        to: Cast,
    ) -> tuple[Any, ExpertNumbers | None]:
        """A layer's experts, of which a token uses so many, and what they weigh; None where there are none."""
