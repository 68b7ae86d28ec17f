"""Streaming the plain way, to quote speeds beside: per layer `mx.load`, evaluate, compute, evaluate, release.

This is what one writes first on MLX, and what others ship. It is right and it bounds memory; it reads nothing ahead,
reads each tensor on one thread, into fresh memory, and waits for the device twice a layer. It gives mlx-lm's logits bit
for bit and runs in mlx-lm's own loop, which sweeps twice before the first token of a prompt and once after the last.
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
    """A model whose layers' weights are loaded anew each time a layer is called.

    Args:
        folder: a local model folder whose layers mlx-lm uses as they lie on disk.
        dtype: what to compute in; None: as the checkpoint says.
        options: ``model_config`` and ``trust_remote_code``, as in ``mlx_lm.load``.

    Attributes:
        model: works in mlx-lm's functions; 1-D parameters and what is not a layer stay in memory.

    Raises:
        UnsupportedModelError: mlx-lm changes layers' parameters on loading, so they cannot be loaded one by one.
        CheckpointError: the folder is not a whole model.
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
                    f"{folder}: {changed[0]} is not on disk as mlx-lm uses it; save the model with mlx_lm.convert first"
                )
            places = [lazy.origins[path] for path in paths]
            put(layer.parameters, absent([p.array for p in layer.parameters]))
            swap(layer.module, "Plain", _loading(layer, places))
        mx.eval(self.model.parameters())

    def close(self) -> None:
        """Give the layers their own classes back; their weights stay absent."""
        for layer in self._layers:
            unswap(layer.module)


def _loading(layer: Layer, places: Sequence[TensorInfo]) -> Callable[..., Any]:
    """A layer's call that loads its weights first and lets go of them afterwards."""
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
            # The caches too: a recurrent state is not on the output's path.
            mx.eval(arrays_in(out, args, kwargs))
        finally:
            put(layer.parameters, nothing)
        del weights
        clear_cache()
        return out

    return call
