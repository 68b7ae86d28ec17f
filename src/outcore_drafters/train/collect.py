"""Collects a model's hidden states along its own continuations of given texts, in files of bounded size.

Many texts share each forward pass, so that streamed weights are read once for all of them. A file is written whole
under a temporary name and then renamed: an interrupted collection goes on with the next file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outcore.errors import HeaderError
from outcore.modules.hooks import TAP, arrays_in, handle, handles
from outcore.text import printable

from ..tap import tap

# The model's likeliest next tokens that are kept for each token, and numbers of a piece of logits.
LIKELY, PIECE = 16, 16 << 20

# Tokens of a prompt that are computed at once; few, since a recurrent layer's graph holds a state for each token.
CHUNK = 32


@contextmanager
def tapped(layers: Sequence[nn.Module], which: Sequence[int]) -> Iterator[list[mx.array]]:
    """Records the outputs of some layers, (texts, tokens, hidden), in the order in which they are computed. No layer
    may change between streamed and resident meanwhile."""
    heard: list[mx.array] = []
    chosen = [(layers[i], type(layers[i])) for i in which]
    for layer, _ in chosen:
        tap(layer, lambda out: heard.append(handle(arrays_in(out)[0])))
    try:
        yield heard
    finally:
        for layer, kind in chosen:
            layer.__class__ = kind
            del layer.__dict__[TAP]


def continue_texts(
    model: nn.Module,
    layers: Sequence[nn.Module],
    which: Sequence[int],
    prompts: np.ndarray[Any, Any],
    more: int,
    draw: Callable[[mx.array], mx.array],
) -> dict[str, mx.array]:
    """Returns ``tokens`` int32 (texts, prompt + more), ``states`` float16 (texts, prompt + more - 1, 3 * hidden), and
    of the model's predictions ``likely`` int32 and ``chances`` float16 (texts, prompt + more - 1, LIKELY).

    Args:
        which: the layers whose outputs are kept.
        prompts: int32 (texts, prompt).
        draw: chooses tokens (texts,) from log-probabilities (texts, vocabulary).
    """
    cache = make_prompt_cache(model)
    tokens, made = [mx.array(prompts)], list[tuple[mx.array, mx.array, mx.array]]()
    with tapped(layers, which) as heard:

        def run(ids: mx.array) -> mx.array:
            heard.clear()
            logits: mx.array = model(ids, cache=cache)
            kept = mx.concatenate(heard, axis=-1).astype(mx.float16)
            last = logits[:, -1].astype(mx.float32)
            mx.eval(last, logits, kept, handles(*cache))
            made.append((kept, *_likeliest(logits)))
            return last

        logits = mx.zeros(())
        for at in range(0, prompts.shape[1], CHUNK):
            logits = run(tokens[0][:, at : at + CHUNK])
        for n in range(more):
            tokens.append(draw(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.int32)[:, None])
            if n + 1 < more:
                logits = run(tokens[-1])
    parts = [mx.concatenate(list(part), axis=1) for part in (tokens, *zip(*made, strict=True))]
    mx.eval(parts)
    return dict(zip(("tokens", "states", "likely", "chances"), parts, strict=True))


def _likeliest(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Returns ``likely`` and ``chances`` as ``continue_texts`` does."""
    flat, count = logits.reshape(-1, logits.shape[-1]), min(LIKELY, logits.shape[-1])
    found, rows = list[tuple[mx.array, mx.array]](), max(1, PIECE // flat.shape[-1])
    for at in range(0, flat.shape[0], rows):
        part = flat[at : at + rows].astype(mx.float32)
        ids = mx.argpartition(-part, count - 1, axis=-1)[:, :count].astype(mx.int32)
        chances = mx.softmax(mx.take_along_axis(part, ids, axis=-1), axis=-1).astype(mx.float16)
        mx.eval(ids, chances)
        found.append((ids, chances))
    likely, chances = (
        mx.concatenate(list(each)).reshape(*logits.shape[:2], count) for each in zip(*found, strict=True)
    )
    return likely, chances


class Shards:
    """Files with a collection's texts, ``texts`` in each.

    Args:
        folder: created if missing.
        count: how many files the whole collection has.
    """

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count = folder, count

    def path(self, n: int) -> Path:
        return self.folder / f"states-{n:05}.safetensors"

    @property
    def missing(self) -> list[int]:
        """The files that are not there, or not whole; the latter are removed."""
        for n in range(self.count):
            try:
                if self.path(n).exists():
                    self.load(n)  # reads the header, which says where the file ends
            except HeaderError:
                self.path(n).unlink()
        return [n for n in range(self.count) if not self.path(n).exists()]

    def load(self, n: int) -> dict[str, mx.array]:
        try:
            loaded: Any = mx.load(str(self.path(n)))
        except (RuntimeError, ValueError) as error:
            said = "gone, or not whole; give the same command again to collect it anew"
            raise HeaderError(f"{printable(str(self.path(n)))}: {said}") from error
        made: dict[str, mx.array] = loaded
        return made
