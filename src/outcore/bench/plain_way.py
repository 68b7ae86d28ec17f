"""Streaming the plain way, to quote speeds beside: per layer `mx.load`, evaluate, compute, evaluate, release.

    python bench/plain_way.py models/llama-4gb --tokens 4

This is what one writes first on MLX, and what others ship. It is right and it bounds memory; it reads nothing ahead,
reads each tensor on one thread, into fresh memory, and waits for the device twice a layer. It gives mlx-lm's logits bit
for bit and runs in mlx-lm's own loop, which sweeps twice before the first token of a prompt and once after the last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from outcore.checkpoint import TensorInfo, open_checkpoint
from outcore.errors import OutcoreError, UnsupportedModelError
from outcore.layers import Layer, absent, arrays_in, find_layers, put, swap, unswap
from outcore.origins import open_lazily


class PlainWay:
    """A model whose layers' weights are loaded anew each time a layer is called.

    Args:
        folder: a local model folder whose layers mlx-lm uses as they lie on disk.

    Attributes:
        model: works in mlx-lm's functions; 1-D parameters and what is not a layer stay in memory.

    Raises:
        UnsupportedModelError: mlx-lm changes layers' parameters on loading, so they cannot be loaded one by one.
        CheckpointError: the folder is not a whole model.
    """

    def __init__(self, folder: Path) -> None:
        lazy = open_lazily(open_checkpoint(folder))
        self.model = lazy.model
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

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[tuple[int, mx.array]]:
        """Yield ``(token, log-probabilities)`` from mlx-lm's loop, greedily."""
        for token, logprobs in generate_step(mx.array(list(prompt)), self.model, max_tokens=max_tokens):
            yield int(token), logprobs

    def close(self) -> None:
        """Give the layers their own classes back; their weights stay absent."""
        for layer in self._layers:
            unswap(layer.module)

    def __enter__(self) -> PlainWay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loading(layer: Layer, places: Sequence[TensorInfo]) -> Callable[..., Any]:
    """A layer's call that loads its weights first and lets go of them afterwards."""
    nothing = absent([p.array for p in layer.parameters])
    files = sorted({place.file for place in places})

    def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        shards: dict[Path, Any] = {file: mx.load(str(file)) for file in files}
        weights = [shards[place.file][place.name] for place in places]
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
        mx.clear_cache()
        return out

    return call


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Generate greedily, streaming the plain way; prints seconds a token.")
    parser.add_argument("model", type=Path, help="local model folder")
    parser.add_argument("--tokens", type=int, default=4, help="tokens to generate (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        with PlainWay(args.model) as plain:
            began = time.perf_counter()
            for token, _ in plain.generate([5, 6, 7], args.tokens):
                now = time.perf_counter()
                print(f"token {token}: {now - began:.2f} s")
                began = now
    except OutcoreError as e:
        print(f"plain_way: {e}", file=sys.stderr)
        return 1
    print(f"peak MLX memory: {mx.get_peak_memory() / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
