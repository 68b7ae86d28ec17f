"""Every private name of mlx-lm that is touched, in one place: what another version may take away (0.32.x has them;
tests/test_mlx_lm_compat.py says which and what for)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import _BaseCache as BaseCache
from mlx_lm.tokenizer_utils import TokenizerWrapper, _byte_decoder

__all__ = ["BaseCache", "byte_decoder", "classes_of", "download", "has_template_code", "inner_tokenizer",
           "set_chat_template", "set_window_index", "window_index"]  # fmt: skip


def classes_of(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The classes of a model and of its arguments (``mlx_lm.utils._get_classes``).

    Raises:
        ValueError: mlx-lm does not know the model.
    """
    from mlx_lm import utils

    return cast(tuple[type[nn.Module], type], utils._get_classes(config))


def download(repo: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    """A model of the Hub, in its cache, as ``mlx_lm.load`` gets it (``mlx_lm.utils._download``, with its errors).

    Args:
        patterns: files that are downloaded; None: all that a model needs.
    """
    from mlx_lm.utils import _download

    return Path(_download(repo, revision=revision, allow_patterns=patterns))


def byte_decoder() -> dict[str, int]:
    """The byte that each character of a byte-level tokenizer's vocabulary stands for (GPT-2's table)."""
    return dict(_byte_decoder())


def inner_tokenizer(tokenizer: TokenizerWrapper) -> Any:
    """The tokenizer of transformers that mlx-lm's wraps."""
    return tokenizer._tokenizer


def has_template_code(tokenizer: TokenizerWrapper) -> bool:
    """Whether code of mlx-lm's renders messages, and not the tokenizer's own template."""
    return tokenizer._chat_template is not None


def set_chat_template(tokenizer: TokenizerWrapper, template: str) -> None:
    """Have a tokenizer render messages by this template, in place of its own or of code of mlx-lm's."""
    tokenizer._tokenizer.chat_template = template
    tokenizer._chat_template = None
    tokenizer.has_chat_template = True


def window_index(cache: RotatingKVCache) -> int:
    """Where a sliding window writes its next token; ``max_size``: from its beginning again, behind ``keep``."""
    return int(cache._idx)


def set_window_index(cache: RotatingKVCache, index: int) -> None:
    """Have it write its next token there."""
    cache._idx = index
