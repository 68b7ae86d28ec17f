"""Tiny random models of mlx-vlm's types, made of its own configuration classes; ``zoo`` has mlx-lm's."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

import zoo
from outcore_vision.text_model import GONE, WHOLE, text_classes
from vision_configs import config_of

__all__ = ["NO_TEXT", "config_of", "folders", "save_checkpoint"]


def _all(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


NO_TEXT = {
    **_all(
        "bonsai ernie_image flux2 flux3 ideogram4 llada_image mage_flow ming_image minimax_h3 moss_image qwen_image"
        " z_image",
        "makes images or films",
    ),
    **_all(
        "dinov2 moge3 pp_doclayout_v3 rfdetr rt_detr_v2 sam3 sam3_1 sam3d_body sam3d_objects sapiens2 siglip"
        " video_depth_anything yolo11",
        "sees, and writes no text",
    ),
    **_all(
        "bert colidefics3 colqwen2_5 embedding_gemma2 gemma3_embedding lfm2_colbert lfm2_embedding llama_bidirec"
        " llama_nemotron_vl_embedding ministral3_embedding modernbert qwen3_embedding qwen3_vl_embedding xlm_roberta",
        "gives vectors, which outcore_embed streams",
    ),
    **_all("d1_omni gliner2_5 laya openai_privacy_filter", "gives labels or decisions"),
    **_all("florence2 nemotron_parse", "a decoder that needs all of its input encoded before"),
    "diffusion_gemma": "writes by denoising a canvas",
    "lfm2_encoder": "fills in masked words",
    "nemotron_voicechat": "from speech to speech",
}
"""Folders of which no text is asked, and why."""


def save_checkpoint(
    folder_of_type: str,
    folder: Path,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    *,
    towers: bool = False,
    quantize: dict[str, Any] | None = None,
    recipe: str | None = None,
    named_by: str = "mlx-vlm",
) -> Path:
    """Writes a checkpoint of one of mlx-vlm's model folders as it would write it; without ``towers`` only the language
    model's weights: its loader then goes without the rest, if that is not mixed with it. ``quantize``: bits and
    group_size for ``mlx_vlm.convert``, whose mixed ``recipe`` may say which modules get more bits.
    ``named_by``: the library whose tensor names are used."""
    config = config_of(folder_of_type)
    model, beside = _in_mlx_lm(config) if named_by == "mlx-lm" else _in_mlx_vlm(folder_of_type, config, towers)
    model.eval()
    whole = {k: v for k, v in tree_flatten(model.parameters()) if v.dtype in (mx.int32, mx.int64)}
    zoo.make_weights(model, seed)
    # The zoo draws any numbers. What a model computes itself, as sizes of tables, stays; what a checkpoint would bring,
    # as a table of experts by token, is zeros until then.
    drawn = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten([(k, v if v.any().item() else drawn[k] % 4) for k, v in whole.items()]))
    to_cast = getattr(model, "cast_predicate", lambda _: True)
    weights = tree_flatten(model.parameters())
    model.update(tree_unflatten([(k, v.astype(dtype)) for k, v in weights if v.dtype == mx.float32 and to_cast(k)]))
    if quantize is not None:
        config = _quantized(model, config, quantize, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    saved = dict(tree_flatten(model.parameters()))
    if config.get("tie_word_embeddings"):
        saved = {k: v for k, v in saved.items() if not k.endswith("lm_head.weight")}
    saved |= {name: mx.zeros(weight.shape, dtype) for name, weight in beside.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), saved, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _in_mlx_lm(config: dict[str, Any]) -> tuple[Any, dict[str, mx.array]]:
    from mlx_lm.utils import _get_classes

    model, arguments = _get_classes(config)
    return model(arguments.from_dict(copy.deepcopy(config))), {}


def _in_mlx_vlm(folder_of_type: str, config: dict[str, Any], towers: bool) -> tuple[Any, dict[str, mx.array]]:
    """A model, and weights that its checkpoint has beside those: mlx-vlm's loader wants them."""
    classes = text_classes(folder_of_type)
    model: Any = classes[0](classes[1].from_dict(copy.deepcopy(config)))
    whole, pruned = model.__dict__[WHOLE][0], model.__dict__[GONE]
    if towers:
        return whole, {}
    # mlx-vlm goes without modules of the top alone, not without lists of modules.
    mixed = any(path.count(".") > 1 or isinstance(whole.get(path[:-1]), list) for path in pruned)
    return model, {k: v for k, v in tree_flatten(whole.parameters()) if k.startswith(pruned)} if mixed else {}


def _quantized(model: Any, config: dict[str, Any], quantize: dict[str, Any], recipe: str | None) -> dict[str, Any]:
    """Quantizes as ``mlx_vlm.convert`` does; returns the configuration that it writes."""
    from mlx_vlm.convert import mixed_quant_predicate_builder
    from mlx_vlm.quant_utils import quantize_model
    from mlx_vlm.utils import skip_multimodal_module

    own = getattr(model, "quant_predicate", None)

    def wanted(path: str, module: Any) -> Any:
        if skip_multimodal_module(path):
            return False
        return True if own is None else own(path, module)

    with contextlib.redirect_stdout(None):
        _, config = quantize_model(
            model,
            config,
            quantize["group_size"],
            quantize["bits"],
            quant_predicate=wanted if recipe is None else mixed_quant_predicate_builder(recipe, model),
        )
    if not any(name.endswith(".scales") for name, _ in tree_flatten(model.parameters())):
        raise ValueError("no weight is as wide as a group")
    return config


def folders() -> list[str]:
    """mlx-vlm's model folders."""
    import mlx_vlm.models

    (where,) = mlx_vlm.models.__path__
    return sorted(p.name for p in Path(where).iterdir() if (p / "__init__.py").exists())
