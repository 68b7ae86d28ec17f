"""Multi-token-prediction heads of random weights, as the tensors of original checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mtp_originals
import zoo
from outcore_drafts.mtp.head import MtpHead, text_model
from outcore_drafts.mtp.layouts import DEEPSEEK, OWN, QWEN, HeadLayer

TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite")


IN_PLACE = ("qwen3_5", "qwen3_5_moe", "deepseek_v32")
"""Those whose tiny checkpoints, as mlx-lm's convert writes them, may have a head beside them: mlx-lm drops it."""


def is_qwen(model_type: str) -> bool:
    return model_type.startswith("qwen")


def random_head(model_type: str, seed: int = 7) -> MtpHead:
    """A head for a tiny model of the type."""
    text: Any = text_model(zoo.build(model_type))
    at = max(i for i, layer in enumerate(text.model.layers) if not getattr(layer, "is_linear", False))
    layer: nn.Module = type(text.model.layers[at])(text.args, at)
    head = MtpHead(text.args.hidden_size, HeadLayer(layer), text.args.rms_norm_eps)
    zoo.make_weights(head, seed)
    return head


def originals(model_type: str, head: MtpHead, zero_centred: bool = False) -> dict[str, mx.array]:
    """Its weights by the names, and in the forms, that the original has."""
    qwen = is_qwen(model_type)
    names = dict(zip(OWN, (QWEN if qwen else DEEPSEEK).own, strict=True))
    layers = len(text_model(zoo.build(model_type)).model.layers)
    own, inside = ("mtp.", "mtp.layers.0.") if qwen else (f"model.layers.{layers}.",) * 2
    found: dict[str, mx.array] = {}
    shifted = 1.0 if zero_centred else 0.0
    for path, array in tree_flatten(head.parameters()):
        module, _, key = path.rpartition(".")
        norm = array.ndim == 1 and "norm" in path
        if not path.startswith("layer."):
            found[f"{own}{names[module]}.{key}"] = array - shifted if norm else array
            continue
        path = path.removeprefix("layer.")
        if ".switch_mlp." in path:
            for e in range(array.shape[0]):
                found[inside + path.replace("switch_mlp", f"experts.{e}")] = array[e]
        elif path.endswith("embed_q.weight"):
            up = dict(tree_flatten(head.parameters()))["layer.self_attn.unembed_out.weight"]
            both = mx.concatenate([array.swapaxes(-1, -2), up], axis=1)
            found[inside + "self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        elif not path.endswith("unembed_out.weight"):
            found[inside + path] = array - shifted if norm else array
    if not qwen:  # what is the model's own lies there once more
        found[own + "embed_tokens.weight"] = mx.zeros((4, 4))
        found[own + "shared_head.head.weight"] = mx.zeros((4, 4))
    return found


def save_head(model_type: str, folder: Path, **how: Any) -> Path:
    """Write a head's tensors into a folder, which may be the model's."""
    folder.mkdir(exist_ok=True)
    if model_type in TYPES:
        found = originals(model_type, random_head(model_type), **how)
    else:
        found = {name: mx.array(a) for name, a in mtp_originals.original(model_type, **how).items()}
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), found)
    return folder
