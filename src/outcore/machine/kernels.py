"""Keeps MLX's compiled CUDA kernels in the cache folder.

MLX compiles a kernel when it is first needed, in seconds to half a minute, and stores it in the temporary folder.
Metal's kernels are compiled already, and compiling the CPU's takes a second.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import mlx.core as mx

from ..errors import StoreError
from .cache_folder import keep, make_cache, require_own
from .device import on_cuda
from .hardware import version

# Environment variable for MLX's folder of CUDA kernels, read when it compiles the first.
FOLDER = "MLX_PTX_CACHE_DIR"

# An incomplete kernel that has not changed for so many seconds is abandoned: its process was killed.
HALF_S = 120.0


def keep_kernels() -> Path | None:
    """Makes MLX store compiled kernels in the cache folder, unless the user chose another; returns the folder.

    Removes incomplete kernels, since MLX would load them; complete ones have their source, which MLX writes last.
    Returns None without CUDA, or if MLX chooses the folder.
    """
    if not on_cuda():
        return None
    given = os.environ.get(FOLDER)
    try:
        own = make_cache()
        # A kernel runs only on the architecture that it was compiled for.
        architecture = re.sub(r"[^\w.-]", "-", str(mx.device_info().get("architecture", "gpu")))
        for name in (
            "kernels",
            f"mlx-{version('mlx')}-{architecture}",
        ):  # private to this user, since its files are executed
            own /= name
            own.mkdir(mode=0o700, exist_ok=True)
            require_own(own)
    except (StoreError, OSError):
        return Path(given) if given else None
    if given is not None and given != str(own):
        return Path(given) if given else None
    os.environ[FOLDER] = str(own)
    keep(own)  # until this process ends: MLX may read and write there at any time
    with contextlib.suppress(OSError):
        for kernel in own.rglob("*.ptx"):
            source = kernel.with_suffix(".cu")
            whole = kernel.stat().st_size and source.exists() and source.stat().st_size
            if not whole and time.time() - kernel.stat().st_mtime > HALF_S:
                kernel.unlink(missing_ok=True)
    return own
