"""A tiny ``config.json`` for each model folder of mlx-vlm that has a language model."""

from __future__ import annotations

import copy
from typing import Any

from zoo_configs import BASE, MOE

Config = dict[str, Any]

TOWER: Config = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "width": 64,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "heads": 2,
}

OWN: dict[str, Config] = {}


def config_of(folder: str) -> Config:
    own = copy.deepcopy(OWN.get(folder, {}))
    base = {**BASE, **MOE}
    text = {**base, "model_type": folder, **own.pop("text_config", {})}
    vision = {**TOWER, **own.pop("vision_config", {})}
    return {**text, "model_type": folder, "text_config": text, "vision_config": vision, **own}
