"""mlx-flash's settings: each either works here or is refused by name.

The fields are those of all versions from 0.1 to 0.3.2. A field with mlx-flash's default counts as not given, so that
complete configurations can be read.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from outcore.checks import choice, real, whole
from outcore.errors import UsageError
from outcore.options import LoadOptions

# The way of reading for each of its ways to drop what was read: around the page cache, or through it.
EVICTION = {"free": "auto", "dontneed": "auto", "none": "cached"}

# Its fields, and their defaults there.
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
            warnings.warn(f"unknown to FlashConfig, and without effect: {', '.join(unknown)}", stacklevel=2)
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
            raise UsageError("max_kv_size and kv_bits: caches that are bounded cannot be quantized; leave one out")
        return found
