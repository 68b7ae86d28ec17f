"""MLX's CUDA kernels, kept where they stay.

MLX compiles one when it is first needed, for seconds to half a minute, and leaves it in the system's temporary folder.
Metal's kernels come compiled, and the CPU's take a second.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import mlx.core as mx

from ..errors import StoreError
from .cache_folder import make_cache, require_own
from .cache_use import keep
from .device import on_cuda
from .hardware import version

FOLDER = "MLX_PTX_CACHE_DIR"
"""The environment variable by which MLX is told where it keeps CUDA kernels. It looks when it compiles the first."""

HALF_S = 120.0
"""Seconds without a change after which a kernel that is not whole is taken for one whose process was killed."""


def keep_kernels() -> Path | None:
    """Have MLX keep the kernels that it compiles in the cache folder, unless it was told another; None: it keeps none,
    or where it does by itself.

    What was cut off while it was written there goes: MLX takes whatever is there for whole. It writes a kernel's source
    last.
    """
    if not on_cuda():
        return None
    given = os.environ.get(FOLDER)
    try:
        own = make_cache()
        # What is compiled for one GPU does not run on another.
        architecture = re.sub(r"[^\w.-]", "-", str(mx.device_info().get("architecture", "gpu")))
        for name in ("kernels", f"mlx-{version('mlx')}-{architecture}"):  # for this user alone: what is in it runs
            own /= name
            own.mkdir(mode=0o700, exist_ok=True)
            require_own(own)
    except (StoreError, OSError):
        return Path(given) if given else None
    if given is not None and given != str(own):
        return Path(given) if given else None
    os.environ[FOLDER] = str(own)
    keep(own)  # MLX reads and writes there whenever it likes
    with contextlib.suppress(OSError):
        for kernel in own.rglob("*.ptx"):
            source = kernel.with_suffix(".cu")
            whole = kernel.stat().st_size and source.exists() and source.stat().st_size
            if not whole and time.time() - kernel.stat().st_mtime > HALF_S:
                kernel.unlink(missing_ok=True)
    return own
