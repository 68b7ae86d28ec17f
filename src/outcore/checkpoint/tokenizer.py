"""A model's tokenizer, loaded by mlx-lm; what goes wrong with its files is told as theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx_lm.utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import CheckpointError, OutcoreError, PromptError, UsageError
from ..modules.mlx_lm_tokenizer import inner_tokenizer
from ..text import half_character, one_line, shortened
from .config import CONFIG, check_files


def load_tokenizer(
    folder: Path, config: Mapping[str, Any] | None = None, *, eos: Any = None, extra_eos: Sequence[str] = ()
) -> TokenizerWrapper:
    """A model folder's tokenizer.

    Args:
        config: further arguments, as in mlx-lm.
        eos: ids of the tokens that end an answer; None: as the folder's configuration says, or else the tokenizer.
        extra_eos: further such tokens, as text.

    Raises:
        CheckpointError: it is not there or cannot be used.
        UsageError: an extra token that it does not have.
    """
    check_files(folder)
    try:
        if eos is None and (folder / CONFIG).exists():
            eos = mlx_lm.utils.load_config(folder).get("eos_token_id")
        tokenizer: TokenizerWrapper = mlx_lm.utils.load_tokenizer(folder, dict(config or {}), eos_token_ids=eos)
        tokenizer.get_vocab()
        # transformers would warn of texts that are longer than the model was made for, files of requests among them:
        # what is too long for it is told by us, and of whom.
        warned = getattr(inner_tokenizer(tokenizer), "deprecation_warnings", None)
        if isinstance(warned, dict):
            warned["sequence-length-is-longer-than-the-specified-maximum"] = True
    except BaseException as e:
        # A tokenizer may be code that comes with it; and what panics in the tokenizers package is no Exception.
        if isinstance(e, OutcoreError) or not (isinstance(e, Exception) or type(e).__name__ == "PanicException"):
            raise
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {one_line(e)}") from e
    vocabulary = tokenizer.get_vocab() if extra_eos else {}
    for token in extra_eos:
        # mlx-lm takes any number for one, and a token that is not there for the one that stands for such.
        number = int(token) if token.isdecimal() and len(token) < 20 else vocabulary.get(token)
        if number not in vocabulary.values():
            raise UsageError(
                f"--extra-eos-token {shortened(token)}: this model has no such token; give one of its tokens, or its "
                "number"
            )
        tokenizer.add_eos_token(token)
    return tokenizer


def whole_text(text: str, name: str = "the prompt") -> str:
    """The text, if a tokenizer can take it.

    Raises:
        PromptError: it holds half of a surrogate pair.
    """
    if (at := half_character(text)) is not None:
        raise PromptError(f"{name}: character {at} is half of a surrogate pair; give whole characters")
    return text
