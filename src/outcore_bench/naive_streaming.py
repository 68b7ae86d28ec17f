"""Naive streaming, for comparison: per layer `mx.load`, evaluate, compute, evaluate, release.

It bounds memory and gives mlx-lm's logits bit for bit, but prefetches nothing, reads each tensor on one thread into
fresh memory, and waits for the device twice per layer. mlx-lm's loop makes two forward passes before the first token
and one after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from outcore.checkpoint.checkpoint import TensorInfo, open_checkpoint
from outcore.checkpoint.lazy_model import open_lazily
from outcore.errors import UnsupportedModelError
from outcore.machine.allocator import clear_cache
from outcore.modules.hooks import absent, arrays_in, put, swap, unswap
from outcore.modules.layers import Layer, find_layers


class NaiveStreaming:
    """Loads a layer's weights each time the layer is called.

    Args:
        dtype: compute in this dtype; None: the checkpoint's.
        options: ``model_config`` and ``trust_remote_code``, as in ``mlx_lm.load``.

    Attributes:
        model: a model for mlx-lm's functions. 1-D parameters and everything outside the layers stay in memory.

    Raises:
        UnsupportedModelError: mlx-lm changes layers' parameters on loading, so they cannot be loaded one by one.
    """

    def __init__(self, folder: Path, dtype: mx.Dtype | None = None, **options: Any) -> None:
        lazy = open_lazily(open_checkpoint(folder), **options)
        self.model = lazy.model
        if dtype is not None:
            self.model.set_dtype(dtype)
        self._layers = find_layers(self.model)
        for layer in self._layers:
            paths = [f"{layer.path}.{p.path}" for p in layer.parameters]
            changed = [path for path in paths if path not in lazy.origins]
            if changed:
                raise UnsupportedModelError(
                    f"{folder}: mlx-lm changes {changed[0]} when it loads it; save the model with mlx_lm.convert first"
                )
            places = [lazy.origins[path] for path in paths]
            put(layer.parameters, absent([p.array for p in layer.parameters]))
            swap(layer.module, "Plain", _loading(layer, places))
        mx.eval(self.model.parameters())

    def close(self) -> None:
        """Restores the layers' classes; their weights stay absent."""
        for layer in self._layers:
            unswap(layer.module)


def _loading(layer: Layer, places: Sequence[TensorInfo]) -> Callable[..., Any]:
    """Returns a layer's call that loads its weights before and releases them afterwards."""
    nothing = absent([p.array for p in layer.parameters])
    dtypes = [p.array.dtype for p in layer.parameters]
    files = sorted({place.file for place in places})

    def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        shards: dict[Path, Any] = {file: mx.load(str(file)) for file in files}
        weights = [shards[place.file][place.name].astype(dtype) for place, dtype in zip(places, dtypes, strict=True)]
        del shards
        mx.eval(weights)
        put(layer.parameters, weights)
        try:
            out = original(*args, **kwargs)
            # Evaluates the caches as well: the output does not depend on a recurrent state.
            mx.eval(arrays_in(out, args, kwargs))
        finally:
            put(layer.parameters, nothing)
        del weights
        clear_cache()
        return out

    return call
