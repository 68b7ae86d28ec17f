"""Makes a model's prefix cache for ``decode.prefix_cache``, and lists what its files' validity depends on."""

from __future__ import annotations

import json
import platform
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from outcore.checkpoint.identity import identity_of, identity_of_adapter
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.packed_store import cached
from outcore.machine.hardware import version
from outcore.options import LoadOptions

from .blocks import FOLDER, BlockFiles
from .prompts import StoredPrompts

# Part of every file's name; changed with each version of Outcore that computes prompts differently.
FORMAT = "prompts 1"


def make(lazy: LazyModel, o: LoadOptions) -> StoredPrompts:
    validity = [
        FORMAT,
        identity_of(lazy.checkpoint),
        json.dumps(o.model_config, sort_keys=True, default=repr),
        identity_of_adapter(Path(o.adapter_path)) if o.adapter_path else "",
        o.dtype or "",
        *(version("mlx"), mlx_lm.__version__),
        *_device(),
    ]
    folder = cached(FOLDER, lazy.checkpoint, validity).name.removeprefix(f"{FOLDER}-")
    # A weak reference, because the model's session refers to the prefix cache.
    model = weakref.ref(lazy.model)

    def caches() -> list[Any]:
        found: list[Any] = make_prompt_cache(model())
        return found

    most = None if isinstance(o.prefix_cache, str) else o.prefix_cache
    return StoredPrompts(BlockFiles(folder, most), validity, caches)


def _device() -> list[str]:
    """Returns what identifies the device: another device rounds differently."""
    info = mx.device_info()
    known = [str(info.get(name, "")) for name in ("device_name", "architecture")]
    return [str(mx.default_device().type), platform.machine(), *known]
