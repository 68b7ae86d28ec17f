"""What a prompt has beside text, such as images: a package reads it, and the core passes on what it makes of it.

In an image's places, token ids are made of its content, so that whatever compares texts by their tokens, such as the
prefix cache, tells images apart. Where ids are looked up or drafted, ``plain`` puts the model's own placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..packages import modules

# Ids from here on stand for places of images; no vocabulary is as large. They fit into 31 bits.
VIRTUAL = 2**30
TEXT_ONLY = "this model reads text only"


class Media(Protocol):
    """The images of one text, by positions from its beginning. ``placeholder``: the model's token in their places;
    ``shift``: by how much the model's positions of tokens after them differ from their places in the text."""

    placeholder: int
    shift: int

    def room(self, model: nn.Module, held: int) -> int:
        """Returns the bytes that they need until the prompt is computed; caches hold its first ``held`` tokens."""

    def open(self, model: nn.Module, held: int, tokens: Sequence[int], hold: Callable[[int], None] | None) -> None:
        """Computes what passes over ``tokens``, the text's last ones, need; caches hold those before ``held``. Makes
        room first, and tells ``hold`` its bytes; None: there is room. ``close`` gives it back."""

    def arguments(self, first: int, ids: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """Returns the ids (tokens,) of a pass that begins at position ``first``, without virtual ones, and the model's
        other arguments for that pass."""

    def close(self) -> None:
        """Called when the prompt was computed, or given up; ``open`` may be called again."""


def media_reader(folder: Path, config: Mapping[str, Any], ranks: object = None) -> Any:
    """Returns what reads a model's images, from ``make`` of a package's module of the group ``media``; None: it reads
    text only, or several machines share it."""
    found = (package.make(folder, config) for package in modules("media").values() if ranks is None)
    return next((each for each in found if each is not None), None)


def plain(media: Media | None, tokens: Sequence[int]) -> list[int]:
    """Returns tokens with the model's own placeholder instead of virtual ids."""
    return [token if media is None or token < VIRTUAL else media.placeholder for token in tokens]
