"""The device that MLX computes on: which it is, and what bounds a buffer, a working set, and with them a slot."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..sizes import ARRAY_BYTES
from .mac import wired_limit

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


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of the device. Bytes; None: this system has no such limit, or does not tell it.

    Attributes:
        name: as MLX gives it.
        memory: of the device, which on a Mac is the machine's.
        working_set: what Metal recommends to use at most; MLX knows what it was when the process began.
        wired_limit: what the user lets the GPU wire (``iogpu.wired_limit_mb``); None too where macOS decides.
        buffer: the largest one that Metal makes.
        slot: the largest array of bytes, and with it the largest slot, alignment included: one Metal buffer on a Mac,
            on whichever device.
    """

    name: str
    memory: int | None
    working_set: int | None
    wired_limit: int | None
    buffer: int | None
    slot: int


def device_facts() -> DeviceFacts:
    """What MLX and the system tell of the device."""
    info = mx.device_info()
    metal = mx.device_info(mx.gpu) if mx.metal.is_available() else {}
    buffer = int(metal.get("max_buffer_length", 0)) or None
    return DeviceFacts(
        name=str(info.get("device_name", "unknown")),
        memory=int(info.get("total_memory", 0) or info.get("memory_size", 0)) or None,
        working_set=int(metal.get("max_recommended_working_set_size", 0)) or None,
        wired_limit=wired_limit(),
        buffer=buffer,
        slot=min(ARRAY_BYTES, buffer or ARRAY_BYTES),
    )


def most_slot_bytes() -> int:
    """Bytes of the largest slot that can be made."""
    return device_facts().slot
