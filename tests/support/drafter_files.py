"""Folders of tiny random drafters, as they are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

import zoo

BETWEEN = 96


def size_of(model_type: str) -> tuple[int, int, int]:
    """Width, tokens and layers of a tiny model."""
    config = zoo.CONFIGS[model_type]
    text = config.get("text_config", config)
    return text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]


def eagle3_config(model_type: str, known: int | None = None, **changes: Any) -> dict[str, Any]:
    """An EAGLE-3 config for a tiny model; ``known``: tokens of its own head, None: it has none."""
    hidden, vocabulary, layers = size_of(model_type)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": known or vocabulary,
        "norm_before_fc": known is None,
        "norm_before_residual": known is not None,
        "tie_word_embeddings": known is None,
        "eagle_aux_hidden_state_layer_ids": [1, layers - 1, layers],
        "transformer_layer_config": {
            "hidden_size": hidden,
            "intermediate_size": BETWEEN,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": vocabulary,
        },
        "speculators_config": {"verifier": {"model_type": model_type, "num_hidden_layers": layers}},
    } | changes


def save_eagle3(model_type: str, folder: Path, known: Sequence[int] | None = None, **changes: Any) -> Path:
    """Writes a random drafter; ``known``: the tokens of its own head, in rising order; None: it has none."""
    hidden, _, _ = size_of(model_type)
    config = eagle3_config(model_type, None if known is None else len(known), **changes)
    widths = {"q": 64, "k": 32, "v": 32}
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.0.self_attn.{n}_proj.weight": (width, 2 * hidden) for n, width in widths.items()
    }
    between = config["transformer_layer_config"].get("intermediate_size", BETWEEN)
    shapes |= {
        "fc.weight": (hidden, 3 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, 64),
        "layers.0.mlp.gate_proj.weight": (between, hidden),
        "layers.0.mlp.up_proj.weight": (between, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, between),
        **{f"layers.0.{n}.weight": (hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": (hidden,),
    }
    if known is None:
        shapes["input_norm.weight"] = (3 * hidden,)
    else:
        shapes["lm_head.weight"] = (len(known), hidden)
    keys = mx.random.split(mx.random.key(7), len(shapes))
    weights = {
        name: mx.random.normal(shape, key=key) * shape[-1] ** -0.5 if len(shape) == 2 else mx.ones(shape)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    if known is not None:
        weights["d2t"] = mx.array([token - n for n, token in enumerate(known)])
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
