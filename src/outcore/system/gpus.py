"""The NVIDIA GPUs that a process may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Numbers or identifiers, with commas (CUDA C++ Programming Guide, "CUDA Environment Variables")."""


def nvidia_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """As ``CUDA_VISIBLE_DEVICES`` names them: those that it has, else one for each device file."""
    if VISIBLE in environment:
        return [name for given in environment[VISIBLE].split(",") if (name := given.strip())]
    return [str(n) for n in range(sum(p.name[6:].isdecimal() for p in devices.glob("nvidia[0-9]*")))]
