"""What is known of the device that MLX computes on."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from outcore.machine import mac
from outcore.machine.device import metal_info, most_slot_bytes


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
    info, metal = mx.device_info(), metal_info()
    buffer = int(metal.get("max_buffer_length", 0)) or None
    return DeviceFacts(
        name=str(info.get("device_name", "unknown")),
        memory=int(info.get("total_memory", 0) or info.get("memory_size", 0)) or None,
        working_set=int(metal.get("max_recommended_working_set_size", 0)) or None,
        wired_limit=mac.wired_limit(),
        buffer=buffer,
        slot=most_slot_bytes(),
    )
