"""The device that MLX computes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..sizes import ARRAY_BYTES

COMPUTE_DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in ("float32", "bfloat16", "float16")}


def on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def on_cuda() -> bool:
    return not on_cpu() and not mx.metal.is_available()


def on_metal() -> bool:
    return not on_cpu() and mx.metal.is_available()


def device_kind() -> str:
    return "cpu" if on_cpu() else "gpu"


def metal_info() -> Mapping[str, Any]:
    """Returns MLX's facts about Metal's GPU, which also apply to the CPU device on a Mac; empty elsewhere."""
    found: Mapping[str, Any] = mx.device_info(mx.gpu) if mx.metal.is_available() else {}
    return found


def most_slot_bytes() -> int:
    """Returns bytes of the largest slot: one array, and on a Mac one Metal buffer."""
    return min(ARRAY_BYTES, int(metal_info().get("max_buffer_length", 0)) or ARRAY_BYTES)
