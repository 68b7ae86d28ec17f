"""Private names of mlx-lm around tokenizers and downloads; those of its models and caches are in ``mlx_lm_compat``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, _byte_decoder


def download(repo: str, revision: str | None) -> Path:
    """A model of the Hub, in its cache, as ``mlx_lm.load`` gets it (``mlx_lm.utils._download``, with its errors)."""
    from mlx_lm.utils import _download

    return Path(_download(repo, revision=revision))


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
