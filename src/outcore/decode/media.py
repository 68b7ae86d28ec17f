"""What a prompt has beside text, such as images; a package reads it, and the core passes on what it makes of it.

Where an image stands, a prompt's token ids are ``VIRTUAL`` or above, made of the image's content. So whatever compares
texts by their tokens, such as the prefix cache, tells images apart. Where ids are looked up, drafted or counted,
``Media.plain`` has the model's own placeholder in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from ..engine.session import Session
from ..errors import UsageError
from ..packages import modules

# Ids from here on stand for places of images; no vocabulary is as large. They fit into 31 bits.
VIRTUAL = 2**30

TEXT_ONLY = "this model reads text only"


class Media(Protocol):
    """The images of one text; positions count from the text's beginning. Made in any thread, and used in the engine's.

    Attributes:
        placeholder: the model's token in images' places.
        shift: by how much the model's positions of tokens after the images differ from their places in the text.
    """

    placeholder: int
    shift: int

    def plain(self, tokens: Sequence[int]) -> list[int]:
        """Returns tokens with the placeholder instead of virtual ids."""

    def room(self, model: nn.Module, held: int) -> int:
        """Returns the bytes that are needed beside weights and caches until the prompt is computed, of which caches
        hold the first ``held`` tokens."""

    def open(self, model: nn.Module, held: int, tokens: Sequence[int]) -> None:
        """Computes what passes need over ``tokens``, the text's last ones, of which caches hold those before position
        ``held``. Called before any pass over the text, when there is room for it."""

    def arguments(self, first: int, ids: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """Returns the ids (tokens,) of a pass that begins at position ``first``, without virtual ones, and the model's
        other arguments for that pass."""

    def close(self) -> None:
        """Frees what only the prompt needed; ``open`` may be called again."""


class MediaReader(Protocol):
    """Reads images for one model. A package's module of the group ``media`` has ``make(folder, config)``, which returns
    one, or None for a model that reads text only. Pictures are paths, bytes, PIL's images, or what ``read`` returned.
    ``mark`` is what stands for an image in a text."""

    mark: str

    def read(
        self, prompt: str | Sequence[int], pictures: Sequence[Any], *, special: bool = False
    ) -> tuple[list[int], list[Any]]:
        """Returns a prompt's tokens and its images. A prompt without placeholders begins with the images. Takes long,
        and may run in any thread. ``special``: the tokenizer adds a BOS token if the prompt has none.

        Raises:
            PromptError: the prompt's placeholders are not as many as the pictures, or a picture cannot be read.
        """

    def media(self, tokens: Sequence[int], images: Sequence[Any]) -> Media:
        """Returns the media of a text, whose ``tokens`` have all ``images`` that ``read`` returned, in their order."""


def media_reader(folder: Path, config: Mapping[str, Any], ranks: object = None) -> MediaReader | None:
    """Returns the reader of a model's images; None: it reads text only, or several machines (``ranks``) share it.
    ``config``: its configuration, with what the user has set in it."""
    found = (package.make(folder, config) for package in modules("media").values() if ranks is None)
    return cast(MediaReader | None, next((each for each in found if each is not None), None))


def read_images(
    session: Session, prompt: str | mx.array | Sequence[int], images: Sequence[Any], history: Sequence[int] = ()
) -> tuple[list[int], Media]:
    """Returns the tokens of a prompt that continues ``history``, and the media of both; images of the history come
    first in ``images``. Raises ``UsageError`` if the model reads text only, ``PromptError`` as ``MediaReader.read``."""
    reader: MediaReader | None = session.media
    if reader is None:
        raise UsageError(f"images: {TEXT_ONLY}")
    given = prompt if isinstance(prompt, str) else cast(list[int], mx.array(cast(list[int], prompt)).tolist())
    tokens, read = reader.read(given, images, special=True)
    return tokens, reader.media([*history, *tokens], read)


def plain(media: Media | None, tokens: Sequence[int]) -> list[int]:
    return list(tokens) if media is None else media.plain(tokens)
