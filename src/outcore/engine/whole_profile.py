"""Profiles a model as ``load`` opens it: packed copies are streamed as well, and experts may be read one by one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from ..checkpoint.lazy_model import LazyModel
from ..checkpoint.packed_store import overlay, places
from ..checkpoint.positions import longest_context, position_limit
from ..errors import UsageError, called
from ..machine.device import on_cpu
from ..modules.layers import find_layers, named_modules
from ..plan.workload import planned_context
from . import model_profile
from .extensions import on_demand
from .layer_sizes import Cast
from .model_profile import ModelProfile


def profile_of(lazy: LazyModel, *, context: int | None, prompt: int | None, **how: Any) -> ModelProfile:
    """Calls ``model_profile.profile_of`` with the model's packed copies and experts. ``context``: tokens; None: as
    ``planned_context`` chooses."""
    context = planned_context(longest_context(lazy.config), position_limit(lazy.config), context, prompt)
    prompt = min(context, prompt or context)
    planned = overlay(lazy)
    how |= {"where": places(lazy, find_layers(lazy.model), planned), "overlay": planned, "experts": on_demand()}
    return model_profile.profile_of(lazy, context=context, prompt=prompt, **how)


def check_experts(lazy: LazyModel, compute: mx.Dtype | None) -> None:
    """Raises UsageError for experts that MLX cannot compute on the CPU device: its GatherMM (0.32.4) takes float32
    only. Quantized experts have another kernel."""
    if not on_cpu():
        return
    to = Cast(lazy.model, compute)

    def computed(path: str, module: nn.Module, key: str) -> mx.Dtype:
        return to.target(f"{path}.{key}", module[key].dtype) or module[key].dtype

    for path, module in named_modules(lazy.model):
        if isinstance(module, SwitchLinear) and (dtype := computed(path, module, "weight")) != mx.float32:
            raise UsageError(
                f"{lazy.checkpoint.folder}: experts in {_named(dtype)}, which MLX computes on a GPU only; on the CPU "
                f"device give {called('dtype')} float32, or a quantized model"
            )
        # An adapter next to quantized experts, whose outputs have the dtype of their scales.
        base = module.get("linear")
        if "lora_a" not in module or module["lora_a"].ndim != 3 or "scales" not in base:
            continue
        dtype = computed(path, module, "lora_a")
        if mx.float32 not in (dtype, computed(f"{path}.linear", base, "scales")):
            raise UsageError(
                f"{lazy.arguments['adapter_path']}: an adapter of experts in {_named(dtype)}, which MLX computes on a "
                f"GPU only; on the CPU device give {called('dtype')} float32"
            )


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
