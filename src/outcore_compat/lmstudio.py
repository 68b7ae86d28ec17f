"""For those who come from mlx-flash: its names, with Outcore behind them, also where LM Studio's engine loads models.

from outcore.integrations.lmstudio import FlashConfig, apply_flash_patch

apply_flash_patch(FlashConfig(enabled=True, ram_budget_gb=10.0))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler

from outcore.checkpoint.find_model import resolve_model
from outcore.decode.loader import load_with_tokenizer
from outcore.errors import UsageError

from . import text_models
from .flash_config import FlashConfig
from .mlx_lm import Patch
from .patched_calls import load_by, stream_generate
from .settings import PatchSettings, applied

__all__ = ["FlashConfig", "FlashGenerationLoop", "FlashManager", "apply_flash_patch", "remove_flash_patch"]

INSTEAD = {
    "FlashLLM": "a streamed model is of its own class here: outcore.load, or FlashManager(config).load, returns it",
    "FlashEngine": "a streamed model is of its own class here: outcore.load, or FlashManager(config).load, returns it",
    "DiskKVCache": "a streamed model's own caches lie on disk by themselves (disk_kv_enabled); prompt caches are saved "
    "with outcore cache-prompt",
}
"""mlx-flash's names that there is nothing for, and what to use instead."""

_log = logging.getLogger("outcore.integrations")


def __getattr__(name: str) -> Any:
    if name in INSTEAD:
        raise ImportError(f"{name}: {INSTEAD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    settings = settings_of(config) if config.enabled else None
    remove_flash_patch()
    if settings is None:
        _log.info("FlashConfig(enabled=False): nothing is patched")
        return
    _log.info("ram_budget_gb=%s: for caches, buffers and activations too, not for weights alone", config.ram_budget_gb)
    with applied.lock:
        _applied.enter_context(Patch(settings))
        if (names := text_models.swapped_names()) is not None:
            names.put()
            _applied.callback(names.give_back)


def remove_flash_patch() -> None:
    """Every name is what it was. Safe to call twice."""
    with applied.lock:
        _applied.close()


def settings_of(config: FlashConfig) -> PatchSettings:
    """What models get by this configuration.

    Raises:
        UsageError: as ``apply_flash_patch``.
    """
    return PatchSettings(config.options(), generation=config.generation(), caches=config.caches())


class FlashManager:
    """mlx-flash's class of that name: loads a model by a configuration, whether or not that is ``enabled``."""

    def __init__(self, config: FlashConfig | None = None) -> None:
        self.config = config or FlashConfig()
        self.model: Any = None
        self.tokenizer: Any = None

    def load(self, model_path: str | Path) -> tuple[Any, Any]:
        """The model and its tokenizer; ``model.outcore`` holds the plan and the metrics.

        Raises:
            BudgetError: the budget is too small; says the smallest that works.
            UsageError: as ``apply_flash_patch``.
        """
        settings = settings_of(self.config)
        folder = resolve_model(str(model_path))
        self.model, self.tokenizer, _ = load_by(settings, folder, settings.options, load_with_tokenizer)
        return self.model, self.tokenizer

    def shutdown(self) -> None:
        """Free what the model takes. Safe to call twice."""
        if self.model is not None:
            self.model.outcore.close()
        self.model = self.tokenizer = None


class FlashGenerationLoop:
    """mlx-flash's class of that name: a model, and texts of it.

    Args:
        model_or_path: a folder or a name of the Hub; or a model that Outcore has loaded, with its ``tokenizer``.

    Raises:
        UsageError: a model that is in memory already, which could not be streamed any more.
    """

    def __init__(
        self, model_or_path: str | Path | nn.Module, tokenizer: Any = None, config: FlashConfig | None = None
    ) -> None:
        self.config = config or FlashConfig()
        self._settings = settings_of(self.config)
        self._manager: FlashManager | None = None
        if isinstance(model_or_path, nn.Module):
            if getattr(model_or_path, "outcore", None) is None:
                raise UsageError("this model is all in memory already; give its folder, so that it can be streamed")
            self.model, self.tokenizer = model_or_path, tokenizer
            return
        self._manager = FlashManager(self.config)
        self.model, self.tokenizer = self._manager.load(model_or_path)

    def stream_generate(self, prompt: Any, max_tokens: int = 100, **kwargs: Any) -> Iterator[str]:
        """Yield the answer's text as it is made.

        Args:
            kwargs: ``temperature`` or ``temp``; and those of ``outcore.stream_generate``.
        """
        temp = kwargs.pop("temperature", kwargs.pop("temp", 0.0))
        kwargs.setdefault("sampler", make_sampler(temp=temp))
        given = dict(self._settings.generation) | kwargs
        if self._settings.caches is not None and "prompt_cache" not in given:
            given["prompt_cache"] = self._settings.caches(self.model)
        for response in stream_generate(self.model, self.tokenizer, prompt, max_tokens, **given):
            if response.text:
                yield response.text

    def shutdown(self) -> None:
        """Free what was loaded for it. Safe to call twice."""
        if self._manager is not None:
            self._manager.shutdown()
        self.model = self.tokenizer = None
