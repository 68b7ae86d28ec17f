"""mlx-lm without transformers, for a process that needs no tokenizer: importing it is half of the time that `outcore
info` takes.

mlx-lm names four classes of transformers when it is imported, and uses them when a tokenizer is loaded. They get empty
ones. Whoever asks transformers for something afterwards, such as a model's own code, gets the real module.
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
    """Stands for AutoTokenizer and what tokenizers are made of."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever looked up."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this process said that it needs no tokenizer")


def leave_out() -> None:
    """Import mlx-lm's own modules with stand-ins. Nothing where transformers is imported already."""
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
