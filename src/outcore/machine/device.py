"""The device that MLX computes on: which it is, and the largest slot that it can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..sizes import ARRAY_BYTES

COMPUTE_DTYPES: dict[str, mx.Dtype] = {name: getattr(mx, name) for name in ("float32", "bfloat16", "float16")}
"""What can be computed in."""


def on_cpu() -> bool:
    """Whether MLX computes on the processor's cores."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def on_cuda() -> bool:
    """Whether it computes on a CUDA device."""
    return not on_cpu() and not mx.metal.is_available()


def on_metal() -> bool:
    """Whether it computes on Apple's GPU."""
    return not on_cpu() and mx.metal.is_available()


def device_kind() -> str:
    """``cpu`` or ``gpu``."""
    return "cpu" if on_cpu() else "gpu"


def metal_info() -> Mapping[str, Any]:
    """What MLX says of Metal's GPU, which on a Mac has the buffers of the CPU device too; empty elsewhere."""
    found: Mapping[str, Any] = mx.device_info(mx.gpu) if mx.metal.is_available() else {}
    return found


def most_slot_bytes() -> int:
    """Bytes of the largest slot that can be made: one array, and on a Mac one Metal buffer, on whichever device."""
    return min(ARRAY_BYTES, int(metal_info().get("max_buffer_length", 0)) or ARRAY_BYTES)
