"""Tokenizers of tests' models, loaded once for what stands in a folder: it takes 0.1 s, and each command does it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import AutoTokenizer, TokenizerWrapper

FROM_PRETRAINED = AutoTokenizer.from_pretrained.__func__
MOST = 16
"""So many are kept."""


def keeping(load: Callable[..., TokenizerWrapper]) -> Callable[..., TokenizerWrapper]:
    """``mlx_lm.tokenizer_utils.load``, which hands out copies of what it has loaded before.

    What one of them is given (a template, tokens that end an answer) is its own; what cannot be loaded is tried again.
    """
    kept: dict[Hashable, TokenizerWrapper] = {}

    def loaded(folder: Path, extra: dict[str, Any] | None = None, **how: Any) -> TokenizerWrapper:
        key = _key(folder, extra or {}, how)
        if key is None:
            return load(folder, extra, **how)
        if key not in kept:
            made = load(folder, extra, **how)
            while len(kept) >= MOST:
                kept.pop(next(iter(kept)))
            kept[key] = made
        return _copied(kept[key], folder)

    return loaded


def _key(folder: Path, extra: dict[str, Any], how: dict[str, Any]) -> Hashable | None:
    """What it is made of; None where that is code, or a test has put something in transformers' place."""
    files = sorted(path for path in folder.iterdir() if path.suffix != ".safetensors" and path.is_file())
    if any(path.suffix == ".py" for path in files) or AutoTokenizer.from_pretrained.__func__ is not FROM_PRETRAINED:
        return None
    try:
        given = json.dumps([extra, {name: value for name, value in how.items() if name != "defaults"}], sort_keys=True)
    except TypeError:
        return None
    told = repr(how.get("defaults"))
    return (given, told, *((path.name, hashlib.blake2b(path.read_bytes()).digest()) for path in files))


def _copied(tokenizer: TokenizerWrapper, folder: Path) -> TokenizerWrapper:
    made, inner = copy.copy(tokenizer), copy.copy(tokenizer._tokenizer)
    detokenizer = copy.copy(tokenizer._detokenizer)
    if hasattr(detokenizer, "_tokenizer"):
        detokenizer._tokenizer = inner
    inner.init_kwargs, inner.name_or_path = dict(inner.init_kwargs), str(folder)
    vars(made).update(_tokenizer=inner, _detokenizer=detokenizer, _eos_token_ids=set(tokenizer._eos_token_ids))
    return made
