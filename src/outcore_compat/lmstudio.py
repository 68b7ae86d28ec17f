"""mlx-flash's names with Outcore behind them, also inside LM Studio's engine.

    from outcore.integrations.lmstudio import FlashConfig, apply_flash_patch

    apply_flash_patch(FlashConfig(enabled=True, ram_budget_gb=10.0))

That engine loads text models by mlx-vlm's ``load_model``, too. These are streamed; models for images or sound are
refused.
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

# Configuration keys of models that take more than text.
SEES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")

_log = logging.getLogger("outcore.integrations")


# Undoes what the applied configuration has put in place.
_applied = ExitStack()


def apply_flash_patch(config: FlashConfig | None = None) -> None:
    """Has mlx-lm's functions, and mlx-vlm's ``load_model``, stream models by this configuration if it is
    ``enabled``.

    It replaces the configuration that was applied before. ``ram_budget_gb`` is for everything, not for weights alone as
    in mlx-flash: a number from there may be too small here.

    Raises:
        UsageError: a field has no counterpart here, or would change answers; says what to do instead.
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
    """Restores every name. Safe to call twice."""
    with applied_lock:
        _applied.close()


def _text_model_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_text_model(model_path: Any, lazy: bool = False, **kwargs: Any) -> Any:
        settings = current_settings()
        if settings is None:
            return original(model_path, lazy, **kwargs)
        folder = resolve_model(str(model_path), kwargs.get("revision"))
        _, config = read_object(folder / CONFIG, CONFIG_BYTES)
        if found := next((name for name in SEES if config.get(name)), None):
            raise UsageError(
                f"{folder.name}: a model that takes images or sound ({found}), and Outcore streams text models only: "
                "end the patch to load it with mlx_vlm, or take the text model of its family"
            )
        if lazy:
            # LM Studio's engine looks at the caches to choose how to run the model. Since these cannot be merged, it
            # loads the model anew and runs it by mlx-lm's functions, one text at a time.
            return SimpleNamespace(make_cache=lambda: [object()])
        options = replace(settings.options, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        return load_by(settings, folder, options, load_model)[0]

    return load_text_model
