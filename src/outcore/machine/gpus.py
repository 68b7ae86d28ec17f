"""The NVIDIA GPUs that a process may use."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

# Comma-separated numbers or identifiers (CUDA C++ Programming Guide, "CUDA Environment Variables").
VISIBLE = "CUDA_VISIBLE_DEVICES"


def nvidia_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Returns the GPUs' names in ``CUDA_VISIBLE_DEVICES``; if it is not set, a number for each device file."""
    if VISIBLE in environment:
        return [name for given in environment[VISIBLE].split(",") if (name := given.strip())]
    return [str(n) for n in range(sum(p.name[6:].isdecimal() for p in devices.glob("nvidia[0-9]*")))]


def leave_one(environment: MutableMapping[str, str], devices: Path = Path("/dev")) -> None:
    """Hides all GPUs but the first from a process that has not started CUDA.

    If MLX sees several, a thread's current device may be the last (MLX 0.32.4's ``CudaAllocator`` makes a stream on
    each). Then copying a host array to a buffer of the first fails: "cudaMemcpy ... invalid argument" (two H100s;
    dev/log/upstream.md).
    """
    gpus = nvidia_gpus(environment, devices)
    if len(gpus) > 1:
        environment[VISIBLE] = gpus[0]
