"""mlx-flash's settings, for those who come from there: each means something here, or is refused by name.

Fields and defaults are those of every version of it (0.1 to 0.3.2). A field that has mlx-flash's default counts as not
given, so that a configuration that was written down whole can be read.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from outcore.checks import choice, real, whole
from outcore.errors import UsageError
from outcore.options import LoadOptions

EVICTION = {"free": "auto", "dontneed": "auto", "none": "cached"}
"""Ways of reading that are like its ways of forgetting what was read: around the page cache, or through it."""

_CHANGES = "it would change the answers: leave it out"
_HOLDS = "the budget holds always, for prompts and contexts too: leave it out, or give ram_budget_gb more"
_SHOWN = "outcore monitor shows it, and model.outcore holds the plan and the metrics: leave it out"
_KV_ROOM = "the disk's room bounds it, and of each layer the last block is in memory: leave it out"

REFUSED = {
    **dict.fromkeys(("moe_top_k_override", "tiled_execution", "tile_size"), _CHANGES),
    "expert_cache_size": "experts have the memory that ram_budget_gb leaves: give it more",
    "metal_kernels": "all kernels are MLX's own, and there are none to switch off: leave it out",
    **dict.fromkeys(
        ("strict_guardrails", "enable_prefill_guardrail", "max_safe_prefill_tokens", "max_safe_context_tokens"), _HOLDS
    ),
    "kv_cache_local_window_size": "caches are quantized as a whole, as in mlx-lm: leave it out",
    **dict.fromkeys(("max_in_memory_kv_tokens", "disk_kv_max_tokens"), _KV_ROOM),
    **dict.fromkeys(("min_quant_bits", "strict_quant"), "models of any width are run: leave it out"),
    **dict.fromkeys(("debug", "enable_profiling", "monitor_queue"), _SHOWN),
}
"""Fields that mean nothing here, or would change answers, and what to do instead."""


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
"""Its fields, and their defaults there."""

_Fields: Any = dataclasses.make_dataclass(
    "_Fields",
    [(name, Any, default) for name, default in DEFAULTS.items()],
    namespace={"__post_init__": lambda self: self.validate()},
)


class FlashConfig(_Fields):
    """mlx-flash's configuration of that name; what each field means here: docs/integrations.md.

    ``ram_budget_gb`` is memory in units of 1e9 bytes, for weights, slots, caches and activations together; in mlx-flash
    for weights alone. ``REFUSED`` fields are refused when the configuration is used, unless they have their default.

    Raises:
        UsageError: a value is of another kind, or out of range.
    """

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> FlashConfig:
        """A configuration of a dictionary, such as one that was read from JSON. Names that mlx-flash never had are
        warned of."""
        if unknown := sorted(str(name) for name in d if name not in DEFAULTS):
            warnings.warn(f"unknown to FlashConfig, and without effect: {', '.join(unknown)}", stacklevel=2)
        return cls(**{k: v for k, v in d.items() if k in DEFAULTS})

    def validate(self) -> None:
        """Check what can be without a model.

        Raises:
            UsageError: names the field.
        """
        real("ram_budget_gb", self.ram_budget_gb, 0.1, 2.0**20)
        choice("eviction_strategy", self.eviction_strategy, EVICTION)
        whole("n_io_threads", self.n_io_threads, 1, 32)
        for name, least in {"pipeline_depth": 1, "prefetch_layers": 0, "kv_keep": 0, "prefill_chunk_size": 0}.items():
            whole(name, getattr(self, name), least)
        for name in ("max_kv_size", "kv_bits"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)

    def options(self) -> LoadOptions:
        """How models are held in memory, in Outcore's words.

        Raises:
            UsageError: a field means nothing here, or would change answers; says what to do instead.
        """
        self.validate()
        for name, instead in REFUSED.items():
            if name in self._given():
                raise UsageError(f"{name}={getattr(self, name)!r}: {instead}")
        given = self._given()
        # Layers that are read ahead, and the one that is computed; the ring has at least two.
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
        """Arguments of ``stream_generate``.

        Raises:
            UsageError: they exclude each other.
        """
        found: dict[str, Any] = {}
        if self.max_kv_size is not None:
            found["max_kv_size"] = self.max_kv_size
        if self.kv_bits is not None or self.kv_cache_quantized:
            found |= {"kv_bits": self.kv_bits or self.kv_cache_bits, "quantized_kv_start": 0}
        if len(found) > 2:
            raise UsageError("max_kv_size and kv_bits: caches that are bounded cannot be quantized; leave one out")
        return found

    def caches(self) -> Callable[[nn.Module], list[Any] | None] | None:
        """What makes caches that keep ``kv_keep`` tokens of the beginning; None: mlx-lm's are meant.

        Raises:
            UsageError: more than there are.
        """
        size = self.max_kv_size
        if size is None:
            return None
        if self.kv_keep >= size:
            raise UsageError(f"kv_keep={self.kv_keep}: fewer than max_kv_size={size}")

        def made(model: nn.Module) -> list[Any] | None:
            if hasattr(model, "make_cache"):
                return None  # models with caches of their own bound them themselves, or not at all, as in mlx-lm
            return [RotatingKVCache(max_size=size, keep=self.kv_keep) for _ in model.layers]

        return made

    def _given(self) -> dict[str, Any]:
        """The fields that do not have mlx-flash's defaults."""
        return {name: v for name, default in DEFAULTS.items() if (v := getattr(self, name)) != default}
