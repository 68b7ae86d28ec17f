"""The private names of mlx-lm's tokenizers and downloads that Outcore uses; ``mlx_lm_compat`` has the models'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, _byte_decoder


def download(repo: str, revision: str | None) -> Path:
    """Return the cached folder of a Hub model, downloading it if necessary; errors as of ``mlx_lm.utils._download``."""
    from mlx_lm.utils import _download

    return Path(_download(repo, revision=revision))


def byte_decoder() -> dict[str, int]:
    """Return the byte for each character of a byte-level tokenizer's vocabulary (GPT-2's table)."""
    return dict(_byte_decoder())


def inner_tokenizer(tokenizer: TokenizerWrapper) -> Any:
    return tokenizer._tokenizer


def has_template_code(tokenizer: TokenizerWrapper) -> bool:
    return tokenizer._chat_template is not None


def set_chat_template(tokenizer: TokenizerWrapper, template: str) -> None:
    tokenizer._tokenizer.chat_template = template
    tokenizer._chat_template = None
    tokenizer.has_chat_template = True
