"""mlx-lm without transformers, for a process that needs no tokenizer: importing it is half of the time that `outcore
info` takes.

mlx-lm names four classes of transformers when it is imported, and uses them when a tokenizer is loaded. They get empty
ones. Whatever else asks transformers for something, such as a model's own code, gets the real module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

BASE = "transformers.tokenization_utils_base"


class _Tokenizer:
    """Stands for AutoTokenizer and what tokenizers are made of."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever looked up."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this process said that it needs no tokenizer")


class _Transformers(ModuleType):
    AutoTokenizer = PreTrainedTokenizer = PreTrainedTokenizerFast = _Tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get("transformers") is self:
            del sys.modules["transformers"], sys.modules[BASE]
        return getattr(importlib.import_module("transformers"), name)


def leave_out() -> None:
    """Put the stand-ins where mlx-lm looks. Nothing where transformers is imported already."""
    if "transformers" in sys.modules or (spec := importlib.util.find_spec("transformers")) is None:
        return
    stand_in, base = _Transformers("transformers"), ModuleType(BASE)
    stand_in.__spec__, stand_in.__path__ = spec, list(spec.submodule_search_locations or [])
    base.PreTrainedTokenizerBase = _Tokenizer  # type: ignore[attr-defined]
    sys.modules.update({"transformers": stand_in, BASE: base})
