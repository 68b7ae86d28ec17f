"""Imports mlx-lm without transformers, which would take half of the time of ``outcore info``.

On import mlx-lm names four classes of transformers; it uses them when a tokenizer is loaded. Stand-ins take their
place. Later imports of transformers, for example by a model's own code, get the real module.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAMES = {
    "transformers": ["AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"],
    "transformers.tokenization_utils_base": ["PreTrainedTokenizerBase"],
}


class _Tokenizer:
    """Stands for the four classes."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Does nothing, as no tokenizer is looked up."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this process imported mlx-lm without tokenizers")


def leave_out() -> None:
    """Imports mlx-lm's modules with the stand-ins, unless transformers is imported already."""
    if "transformers" in sys.modules:
        return
    for module, classes in NAMES.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(dict.fromkeys(classes, _Tokenizer))
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        for module in NAMES:
            del sys.modules[module]
