"""Loads a model's tokenizer with mlx-lm, and names the folder in its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx_lm.utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import CheckpointError, OutcoreError, PromptError, UsageError
from ..modules.mlx_lm_tokenizer import inner_tokenizer
from ..text import half_character, one_line, shortened
from .checkpoint import CONFIG, check_files
from .find_model import require_tokenizer


def load_tokenizer(
    folder: Path, config: Mapping[str, Any] | None = None, *, eos: Any = None, extra_eos: Sequence[str] = ()
) -> TokenizerWrapper:
    """Load a model folder's tokenizer.

    Args:
        config: further arguments, as in mlx-lm.
        eos: ids of the tokens that end an answer; None: those of the folder's configuration, or else of the tokenizer.
        extra_eos: further such tokens, as text or number.

    Raises:
        CheckpointError: the tokenizer is missing or invalid.
        UsageError: the tokenizer does not have a token of ``extra_eos``.
    """
    check_files(folder)
    require_tokenizer(folder)
    try:
        if eos is None and (folder / CONFIG).exists():
            eos = mlx_lm.utils.load_config(folder).get("eos_token_id")
        tokenizer: TokenizerWrapper = mlx_lm.utils.load_tokenizer(folder, dict(config or {}), eos_token_ids=eos)
        tokenizer.get_vocab()
        # Silences transformers' warning about long texts: Outcore reports those itself and names the request.
        warned = getattr(inner_tokenizer(tokenizer), "deprecation_warnings", None)
        if isinstance(warned, dict):
            warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    except BaseException as e:
        # A tokenizer may run code of its own, and a panic in the tokenizers package is no Exception.
        if isinstance(e, OutcoreError) or not (isinstance(e, Exception) or type(e).__name__ == "PanicException"):
            raise
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {one_line(e)}") from e
    vocabulary = tokenizer.get_vocab() if extra_eos else {}
    for token in extra_eos:
        # mlx-lm would accept any number, and replace an unknown token by the unknown-token id.
        number = int(token) if token.isdecimal() and len(token) < 20 else vocabulary.get(token)
        if number not in vocabulary.values():
            raise UsageError(
                f"--extra-eos-token {shortened(token)}: this model has no such token; give one of its tokens, or its "
                "number"
            )
        tokenizer.add_eos_token(token)
    return tokenizer


def whole_text(text: str, name: str = "the prompt") -> str:
    """Return the text, or raise ``PromptError`` if it holds half of a surrogate pair."""
    if (at := half_character(text)) is not None:
        raise PromptError(f"{name}: character {at} is half of a surrogate pair; give whole characters")
    return text
