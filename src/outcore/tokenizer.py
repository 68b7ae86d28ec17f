"""A model's tokenizer, opened by mlx-lm and transformers after a look at its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm.utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .config import check_files
from .errors import CheckpointError


def load_tokenizer(folder: Path, settings: dict[str, Any], eos_token_ids: Any = None) -> TokenizerWrapper:
    """The tokenizer of a local model folder.

    Args:
        settings: for transformers: ``trust_remote_code`` and its like.
        eos_token_ids: tokens that end an answer, if they are known; None: what the folder's configuration says.

    Raises:
        CheckpointError: it is not there or cannot be used.
    """
    check_files(folder)
    try:
        if eos_token_ids is None:
            eos_token_ids = mlx_lm.utils.load_config(folder).get("eos_token_id")
        return mlx_lm.utils.load_tokenizer(folder, settings, eos_token_ids=eos_token_ids)
    except Exception as e:  # transformers raises what it likes on files that it does not expect
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise CheckpointError(f"{folder}: its tokenizer or config.json cannot be loaded: {why}") from e
