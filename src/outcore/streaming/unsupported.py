"""What MLX cannot compute on a device, told before it says so in the middle of a sweep."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear

from ..errors import UsageError
from ..model.lazy_model import LazyModel
from ..model.module_tree import named_modules
from ..system.device import on_cpu
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
    for path, module in named_modules(lazy.model):
        if isinstance(module, SwitchLinear):
            dtype = to.target(f"{path}.weight", module.weight.dtype) or module.weight.dtype
            if dtype != mx.float32:
                name = str(dtype).removeprefix("mlx.core.")
                raise UsageError(
                    f"{lazy.checkpoint.folder}: experts in {name}, which MLX computes on a GPU only; on the CPU device "
                    "give --dtype float32, or a quantized model"
                )
