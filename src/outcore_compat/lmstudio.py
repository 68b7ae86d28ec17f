"""Offers mlx-flash's API, implemented by Outcore, also inside LM Studio's engine.

    from outcore.integrations.lmstudio import FlashConfig, apply_flash_patch

    apply_flash_patch(FlashConfig(enabled=True, ram_budget_gb=10.0))

LM Studio's engine also loads text models by mlx-vlm's ``load_model``. These are streamed; models for images or sound
are refused.

Each of mlx-flash's settings, of all versions from 0.1 to 0.3.2, works here or is refused by name. A setting that has
mlx-flash's default counts as not given, so that complete configuration files can be used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from outcore.checkpoint.checkpoint import CONFIG, read_object
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import choice, real, whole
from outcore.decode.loader import load_model
from outcore.errors import UsageError
from outcore.machine.small_files import CONFIG_BYTES
from outcore.options import LoadOptions

from .mlx_lm import Patch
from .patched_calls import load_by
from .settings import PatchSettings, applied_lock, current_settings
from .swapped_names import SwappedNames

__all__ = ["FlashConfig", "apply_flash_patch", "remove_flash_patch"]

# Configuration keys of models that take more than text.
SEES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")

_log = logging.getLogger("outcore.integrations")


# Closing it removes the replacements of the configuration that is applied.
_applied = ExitStack()


# mlx-flash's strategies for freeing memory after a read, and the value of ``LoadOptions.io`` for each.
EVICTION = {"free": "auto", "dontneed": "auto", "none": "cached"}

# mlx-flash's fields and their defaults.
DEFAULTS: dict[str, Any] = {
    "enabled": False, "ram_budget_gb": 2.0, "eviction_strategy": "free", "n_io_threads": 4, "pipeline_depth": 2,
    "prefetch_layers": 2, "max_kv_size": None, "kv_keep": 250, "kv_bits": None, "kv_cache_quantized": False,
    "kv_cache_bits": 8, "prefill_chunk_size": 32, "min_quant_bits": 4, "strict_quant": False,
    "pipelined_execution": False, "debug": False, "enable_profiling": False, "monitor_queue": None,
    "moe_top_k_override": None, "expert_cache_size": 8, "tiled_execution": False, "tile_size": 1024,
    "metal_kernels": True, "strict_guardrails": True, "kv_cache_local_window_size": 128,
    "max_in_memory_kv_tokens": 2048, "enable_prefill_guardrail": True, "max_safe_prefill_tokens": 64,
    "max_safe_context_tokens": 512, "disk_kv_enabled": False, "disk_kv_dir": "", "disk_kv_max_tokens": None,
    "kv_cache_dir": None,
}  # fmt: skip

# The fields that work here. The others would change answers, or have no counterpart.
MEANT = frozenset({
    "enabled", "ram_budget_gb", "eviction_strategy", "n_io_threads", "pipeline_depth", "prefetch_layers", "max_kv_size",
    "kv_bits", "kv_cache_quantized", "kv_cache_bits", "prefill_chunk_size", "pipelined_execution", "disk_kv_enabled",
    "disk_kv_dir", "kv_cache_dir",
})  # fmt: skip

_Fields: Any = dataclasses.make_dataclass(
    "_Fields",
    [(name, Any, default) for name, default in DEFAULTS.items()],
    namespace={"__post_init__": lambda self: self.validate()},
)


class FlashConfig(_Fields):
    """mlx-flash's configuration class; docs/integrations.md says what each field does here.

    ``ram_budget_gb`` is memory in units of 1e9 bytes for weights, slots, caches and activations together; in mlx-flash
    it is for weights alone. Other fields than ``MEANT`` are refused when the configuration is used, unless they have
    their default.

    Raises:
        UsageError: a value has the wrong type, or is out of range.
    """

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> FlashConfig:
        """Makes a configuration from a dictionary, such as one read from JSON. Warns of names that mlx-flash never
        had."""
        if unknown := sorted(str(name) for name in d if name not in DEFAULTS):
            warnings.warn(f"FlashConfig has no such fields, ignored: {', '.join(unknown)}", stacklevel=2)
        return cls(**{k: v for k, v in d.items() if k in DEFAULTS})

    def validate(self) -> None:
        """Checks what can be checked without a model. Raises ``UsageError``, which names the field."""
        real("ram_budget_gb", self.ram_budget_gb, 0.1, 2.0**20)
        choice("eviction_strategy", self.eviction_strategy, EVICTION)
        whole("n_io_threads", self.n_io_threads, 1, 32)
        for name, least in {"pipeline_depth": 1, "prefetch_layers": 0, "prefill_chunk_size": 0}.items():
            whole(name, getattr(self, name), least)
        for name in ("max_kv_size", "kv_bits"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)

    def options(self) -> LoadOptions:
        """Returns the corresponding ``LoadOptions``. Raises ``UsageError`` for a field that has none, or would change
        answers."""
        self.validate()
        given = {name: v for name, default in DEFAULTS.items() if (v := getattr(self, name)) != default}
        if name := next((name for name in given if name not in MEANT), None):
            why = "it has no effect here, or would change answers (docs/integrations.md says which): leave it out"
            raise UsageError(f"{name}={given[name]!r}: {why}")
        # The layers that are read ahead, and the one being computed; the ring has at least two slots.
        slots = [n for n in (given.get("pipeline_depth"), given.get("prefetch_layers", -1) + 1) if n]
        chunk = given.get("prefill_chunk_size")
        return LoadOptions(
            memory=int(self.ram_budget_gb * 1e9),
            slots=max(2, *slots) if slots else None,
            threads=given.get("n_io_threads"),
            io=EVICTION[self.eviction_strategy],
            prefill_step_size=chunk or None,
            kv_disk="on" if self.disk_kv_enabled else "auto",
            kv_dir=self.disk_kv_dir or self.kv_cache_dir or None,
        )

    def generation(self) -> dict[str, Any]:
        """Returns arguments of ``stream_generate``. Raises ``UsageError`` if two of them exclude each other."""
        found: dict[str, Any] = {}
        if self.max_kv_size is not None:
            found["max_kv_size"] = self.max_kv_size
        if self.kv_bits is not None or self.kv_cache_quantized:
            found |= {"kv_bits": self.kv_bits or self.kv_cache_bits, "quantized_kv_start": 0}
        if len(found) > 2:
            raise UsageError("max_kv_size and kv_bits: a KV cache of limited size cannot be quantized; leave one out")
        return found


def apply_flash_patch(config: FlashConfig | None = None) -> None:
    """Has mlx-lm's functions, and mlx-vlm's ``load_model``, stream models by this configuration if it is
    ``enabled``.

    It replaces the configuration that was applied before. ``ram_budget_gb`` is for everything, not for weights alone as
    in mlx-flash: a value chosen for mlx-flash may be too small here.

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
    """Ends what ``apply_flash_patch`` applied. Safe to call twice."""
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
                f"{folder.name}: a model that takes images or sound ({found}); Outcore streams text models only: call "
                "remove_flash_patch() and load it with mlx_vlm, or use a text model of its family"
            )
        if lazy:
            # LM Studio's engine looks at the caches to choose how to run the model. Since these cannot be merged, it
            # loads the model anew and runs it by mlx-lm's functions, one text at a time.
            return SimpleNamespace(make_cache=lambda: [object()])
        options = replace(settings.options, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        return load_by(settings, folder, options, load_model)[0]

    return load_text_model
