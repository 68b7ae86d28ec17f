"""Adapters as ``mlx_lm.lora`` saves them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from outcore.machine.random_state import random_state_kept

LORA, DORA, FULL = "lora", "dora", "full"


def save_adapter(
    model: Path,
    folder: Path,
    kind: str = LORA,
    *,
    keys: Sequence[str] | None = None,
    rank: int = 4,
    layers: int = 8,
    dtype: mx.Dtype | None = None,
    seed: int = 7,
) -> Path:
    """Write an adapter of a checkpoint, and return its folder.

    Args:
        keys: of ``lora`` and ``dora`` the modules of a layer that are adapted, None: those that mlx-lm takes by
            default; of ``full`` parts of the names of weights that are replaced.
        layers: so many of the last ones are adapted.
        dtype: of its arrays; None: as mlx-lm has them.
    """
    parameters = {"rank": rank, "scale": 4.0, "dropout": 0.0} | ({"keys": list(keys)} if keys and kind != FULL else {})
    with random_state_kept():
        loaded = mlx_lm.utils.load_model(model)[0]
        if kind != FULL:
            linear_to_lora_layers(loaded, layers, parameters, use_dora=kind == DORA)
    found = dict(tree_flatten(loaded.parameters()))
    if kind == FULL:
        weights = {name: a for name, a in found.items() if any(key in name for key in keys or [""])}
    else:
        weights = {name: a for name, a in found.items() if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")}
    for (name, a), key in zip(weights.items(), mx.random.split(mx.random.key(seed), len(weights)), strict=True):
        if mx.issubdtype(a.dtype, mx.floating):
            noise = mx.random.normal(a.shape, key=key)
            lora = kind != FULL and not name.endswith(".m")
            a = 0.5 * noise * a.shape[-1] ** -0.5 if lora else (a + 0.3 * a.std() * noise).astype(a.dtype)
            weights[name] = a if dtype is None else a.astype(dtype)
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    about = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
