"""Images that ``--image`` and ``/image`` name; packages open them (the group ``parts``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.positions import config_of
from ..decode.media import TEXT_ONLY, MediaReader, media_reader
from ..errors import UsageError
from ..packages import modules


def open_images(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> tuple[MediaReader, list[Any]]:
    """Returns the reader of images of the model in ``folder``, and the images.

    Raises:
        UsageError: the model reads text only, or an image cannot be read.
    """
    config = config_of(folder)
    reader = media_reader(folder, config, args.ranks)
    for package in modules("parts").values() if reader is not None else ():
        taken, remote = package.takes(folder, config), args.allow_remote_images
        if taken and reader is not None:
            return reader, [package.open_picture(name, taken, remote) for name in names]
    raise UsageError(f"images: {TEXT_ONLY}")


def with_images(tokenizer: TokenizerWrapper, reader: MediaReader, text: str, count: int) -> Any:
    """Returns the content of a message that begins with images, as the model's chat template takes it."""
    if "image" in str(tokenizer.chat_template):
        return [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
    return reader.mark * count + text
