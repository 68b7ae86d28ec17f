"""mlx-vlm's ``load_model``, by which LM Studio's engine loads texts' models too: those are streamed, others refused."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.checkpoint.checkpoint import read_object
from outcore.checkpoint.config import CONFIG
from outcore.checkpoint.find_model import resolve_model
from outcore.decode.loader import load_model
from outcore.errors import UsageError
from outcore.machine.small_files import CONFIG_BYTES

from .patched_calls import load_by
from .settings import applied
from .swapped_names import SwappedNames

SEES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")
"""What the configuration of a model has that takes more than text."""


class NotBatched:
    """Stands for a text model that somebody opens to see how it could be run. Its cache cannot be merged with others:
    LM Studio's engine then runs it by mlx-lm's functions, one text at a time, and loads it for that."""

    def make_cache(self) -> list[object]:
        """A cache without any methods."""
        return [object()]

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refused.

        Raises:
            UsageError: always.
        """
        raise UsageError("this model was opened with lazy=True, only to be looked at; load it with lazy=False")


def swapped_names() -> SwappedNames | None:
    """mlx-vlm's name, and ours; None where it is not installed."""
    if importlib.util.find_spec("mlx_vlm") is None:
        return None
    original: Callable[..., Any] = importlib.import_module("mlx_vlm.utils").load_model

    @functools.wraps(original)
    def load_text_model(model_path: Any, lazy: bool = False, **kwargs: Any) -> Any:
        settings = applied.current
        if settings is None:
            return original(model_path, lazy, **kwargs)
        folder = resolve_model(str(model_path), kwargs.get("revision"))
        refuse_others(folder)
        if lazy:
            return NotBatched()
        options = replace(settings.options, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        return load_by(settings, folder, options, load_model)[0]

    return SwappedNames([(original, load_text_model)], except_in="outcore")


def refuse_others(folder: Path) -> None:
    """Refuse a model that takes images or sound.

    Raises:
        UsageError: it does.
    """
    _, config = read_object(folder / CONFIG, CONFIG_BYTES)
    if found := next((name for name in SEES if config.get(name)), None):
        raise UsageError(
            f"{folder.name}: a model that takes images or sound ({found}), and Outcore streams models of texts alone: "
            "end the patch to load it with mlx_vlm, or take the text model of its family"
        )
