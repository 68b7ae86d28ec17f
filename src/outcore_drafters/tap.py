"""Records the outputs of a model's layers as it computes, whether these are streamed or in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.modules.hooks import TAP, arrays_in, copy_of, handle


def _nothing() -> None: ...


class Tapped:
    """Base class before a layer's own class; shows the outputs of its calls to ``TAP``, which may return others of the
    same values."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        found = self.__dict__[TAP](out)
        return out if found is None else found


def tap(layer: nn.Module, hear: Callable[[Any], Any]) -> None:
    """Gives ``layer`` a class in front of its own that shows the outputs of its calls to ``hear``."""
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (Tapped, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    layer.__dict__[TAP] = hear


class LayerTaps:
    """Records the outputs of layers. Does not change them. Those of another rank's layer are shown by its stand-in.

    Args:
        layers: in the order in which their outputs are joined. They must not be bound to a ring yet: streaming gives
            a layer a class in front of the one that it has, and takes only that away again.

    Attributes:
        missed: called where the layers' outputs have no form that drafters could read.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._count = len(layers)
        self.missed: Callable[[], object] = _nothing
        self._heard = threading.local()
        for n, layer in enumerate(layers):
            tap(layer, self._tap(n))

    def _tap(self, n: int) -> Any:
        def tap(out: Any) -> Any:
            now: tuple[list[list[mx.array]], int] | None = getattr(self._heard, "now", None)
            if now is None or not (arrays := arrays_in(out)):
                return None
            (heard, skip), state = now, arrays[0]
            if not skip or state.ndim != 3:
                # A later layer may write into the array. This one holds no weights: the array is computed with its
                # layer, before the layer's slot is used again.
                heard[n].append(handle(state))
                return None
            heard[n].append(kept := copy_of(state[:, skip:]))
            # Computed before the next layer, so that the others' states go as soon as that has read them.
            (state,) = mx.depends([state], [kept])
            return state if out is arrays[0] else (state, *out[1:]) if isinstance(out, tuple) else None

        return tap

    @contextmanager
    def listening(self, skip: int = 0) -> Iterator[list[mx.array]]:
        """Records what passes that this thread builds meanwhile put out. The list gets one array (1, tokens, layers *
        hidden) at the end, unevaluated, unless the layers were not called once each; the first ``skip`` tokens' states
        are left out, and not kept."""
        each: list[list[mx.array]] = [[] for _ in range(self._count)]
        joined: list[mx.array] = []
        self._heard.now = each, skip
        try:
            yield joined
        finally:
            self._heard.now = None
        if all(len(heard) == 1 and heard[0].ndim == 3 for heard in each):
            joined.append(mx.concatenate([heard[0] for heard in each], axis=-1))
        else:
            self.missed()
