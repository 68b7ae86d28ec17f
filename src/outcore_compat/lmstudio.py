"""For those who come from mlx-flash: its names, with Outcore behind them, also where LM Studio's engine loads models.

    from outcore.integrations.lmstudio import FlashConfig, apply_flash_patch

    apply_flash_patch(FlashConfig(enabled=True, ram_budget_gb=10.0))

That engine loads texts' models by mlx-vlm's ``load_model`` too: those are streamed, others refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from outcore.checkpoint.checkpoint import read_object
from outcore.checkpoint.config import CONFIG
from outcore.checkpoint.find_model import resolve_model
from outcore.decode.loader import load_model
from outcore.errors import UsageError
from outcore.machine.small_files import CONFIG_BYTES

from .flash_config import FlashConfig
from .mlx_lm import Patch
from .patched_calls import load_by
from .settings import PatchSettings, applied_lock, current_settings
from .swapped_names import SwappedNames

__all__ = ["FlashConfig", "apply_flash_patch", "remove_flash_patch"]

SEES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")
"""What the configuration of a model has that takes more than text."""

_log = logging.getLogger("outcore.integrations")


_applied = ExitStack()
"""Gives back what the configuration that is applied has put in place."""


def apply_flash_patch(config: FlashConfig | None = None) -> None:
    """Have mlx-lm's functions, and mlx-vlm's ``load_model``, stream models by this configuration, if it is ``enabled``.

    In place of the one that was applied before. ``ram_budget_gb`` is memory for all, not for weights alone as in
    mlx-flash: a number from there may be too small here.

    Raises:
        UsageError: a field means nothing here, or would change answers; says what to do instead.
    """
    config = config or FlashConfig()
    settings = None
    if config.enabled:
        settings = PatchSettings(config.options(), generation=config.generation())
    remove_flash_patch()
    if settings is None:
        _log.info("FlashConfig(enabled=False): nothing is patched")
        return
    _log.info("ram_budget_gb=%s: for caches, buffers and activations too, not for weights alone", config.ram_budget_gb)
    with applied_lock:
        _applied.enter_context(Patch(settings))
        if importlib.util.find_spec("mlx_vlm") is not None:
            original = importlib.import_module("mlx_vlm.utils").load_model
            names = SwappedNames([(original, _text_model_loader(original))], except_in="outcore")
            names.put()
            _applied.callback(names.give_back)


def remove_flash_patch() -> None:
    """Every name is what it was. Safe to call twice."""
    with applied_lock:
        _applied.close()


def _text_model_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of mlx-vlm's ``load_model``."""

    @functools.wraps(original)
    def load_text_model(model_path: Any, lazy: bool = False, **kwargs: Any) -> Any:
        settings = current_settings()
        if settings is None:
            return original(model_path, lazy, **kwargs)
        folder = resolve_model(str(model_path), kwargs.get("revision"))
        _, config = read_object(folder / CONFIG, CONFIG_BYTES)
        if found := next((name for name in SEES if config.get(name)), None):
            raise UsageError(
                f"{folder.name}: a model that takes images or sound ({found}), and Outcore streams models of texts "
                "alone: end the patch to load it with mlx_vlm, or take the text model of its family"
            )
        if lazy:
            # Somebody looks how it could be run. Caches that cannot be merged say: by mlx-lm's functions, one text at
            # a time; for that LM Studio's engine loads it anew.
            return SimpleNamespace(make_cache=lambda: [object()])
        options = replace(settings.options, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        return load_by(settings, folder, options, load_model)[0]

    return load_text_model
