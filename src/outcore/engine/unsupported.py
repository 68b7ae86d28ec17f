"""What MLX cannot compute on a device, told before it says so in the middle of a sweep."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from ..checkpoint.lazy_model import LazyModel
from ..errors import UsageError
from ..machine.device import on_cpu
from ..modules.module_tree import named_modules
from .layer_sizes import Cast


def check_experts(lazy: LazyModel, compute: mx.Dtype | None) -> None:
    """Refuse experts that MLX's CPU device does not gather: GatherMM of 0.32.4 takes float32; quantized ones have their
    own.

    Args:
        compute: what is computed in; None: as the checkpoint says.

    Raises:
        UsageError: a dtype that it does not take.
    """
    if not on_cpu():
        return
    to = Cast(lazy.model, compute)

    def computed(path: str, module: nn.Module, key: str) -> mx.Dtype:
        return to.target(f"{path}.{key}", module[key].dtype) or module[key].dtype

    for path, module in named_modules(lazy.model):
        if isinstance(module, SwitchLinear) and (dtype := computed(path, module, "weight")) != mx.float32:
            raise UsageError(
                f"{lazy.checkpoint.folder}: experts in {_named(dtype)}, which MLX computes on a GPU only; on the CPU "
                "device give --dtype float32, or a quantized model"
            )
        # An adapter's, beside quantized experts: these put out what their scales are in.
        base = module.get("linear")
        if "lora_a" not in module or module["lora_a"].ndim != 3 or "scales" not in base:
            continue
        dtype = computed(path, module, "lora_a")
        if mx.float32 not in (dtype, computed(f"{path}.linear", base, "scales")):
            raise UsageError(
                f"{lazy.arguments['adapter_path']}: an adapter of experts in {_named(dtype)}, which MLX computes on a "
                "GPU only; on the CPU device give --dtype float32"
            )


def _named(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
