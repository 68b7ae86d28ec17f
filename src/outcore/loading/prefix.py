"""The prefix cache of a model as it was loaded: what makes its files valid, and where they lie."""

from __future__ import annotations

import json
import platform
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from ..checkpoint.checkpoint import identity_of_adapter
from ..checkpoint.lazy_model import LazyModel
from ..checkpoint.packed_store import cached
from ..decode.blocks import FOLDER, BlockFiles
from ..decode.prefix import GRID, PrefixCache
from ..machine.hardware import version
from ..options import LoadOptions

FORMAT = "prompts 1"
"""Goes into every name: what another version of this computes in another way gets another one."""

NO_BLOCKS = f"{{name}}: prompts are not kept, since chunks of {{step}} tokens do not end where blocks of {GRID} do"
"""A note."""


def prefix_cache(lazy: LazyModel, o: LoadOptions) -> PrefixCache | None:
    """A model's prefix cache, if it was asked for. There is none where blocks end within chunks of prompts."""
    if o.prefix_cache == "off" or GRID % (o.prefill_step_size or GRID):
        return None
    validity = [
        FORMAT,
        lazy.checkpoint.identity(),
        json.dumps(o.model_config, sort_keys=True, default=repr),
        identity_of_adapter(Path(o.adapter_path)) if o.adapter_path else "",
        o.dtype or "",
        *(version("mlx"), mlx_lm.__version__),
        *_device(),
    ]
    folder = cached(FOLDER, lazy.checkpoint, validity).name.removeprefix(f"{FOLDER}-")
    # Not the model itself, whose session refers to this.
    model = weakref.ref(lazy.model)

    def caches() -> list[Any]:
        found: list[Any] = make_prompt_cache(model())
        return found

    most = None if isinstance(o.prefix_cache, str) else o.prefix_cache
    return PrefixCache(BlockFiles(folder, most), validity, caches)


def _device() -> list[str]:
    """What computes: another device rounds otherwise."""
    info = mx.device_info()
    known = [str(info.get(name, "")) for name in ("device_name", "architecture")]
    return [str(mx.default_device().type), platform.machine(), *known]
