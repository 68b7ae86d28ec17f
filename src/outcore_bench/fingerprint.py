"""Describes the machine and the model of a measurement by names, sizes and versions, without paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from mlx.utils import tree_flatten

from outcore.decode.preparation import Preparation
from outcore.machine.hardware import cpu_name, filesystem, gpu_name
from outcore.version import __version__

from .document import Machine, Model

PACKAGES = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal", "mlx-lm", "numpy", "transformers")
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def machine(folder: Path) -> Machine:
    commit, changed = _git()
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=gpu_name(),
        device=str(mx.default_device()),
        memory_bytes=int(psutil.virtual_memory().total),
        filesystem=filesystem(folder),
        kernel=platform.platform(),
        python=platform.python_version(),
        versions=_versions(),
        git_commit=commit,
        git_changed_files=changed,
    )


def describe(name: str, prepared: Preparation) -> Model:
    profile = prepared.profile
    checkpoint, config = profile.lazy.checkpoint, profile.lazy.config
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in DTYPES:
            dtypes[DTYPES[tensor.dtype]] += tensor.nbytes
    layers = sum(layer.nbytes for layer in profile.layers)
    quantization = config.get("quantization")
    return Model(
        name=name,
        model_type=str(config.get("model_type")),
        nbytes=checkpoint.nbytes,
        layers=len(profile.size.layers),
        layer_bytes=layers,
        non_layer_bytes=sum(a.nbytes for _, a in tree_flatten(profile.lazy.model.parameters())) - layers,
        quantization={k: v for k, v in quantization.items() if not isinstance(v, dict)} if quantization else None,
        dtype=dtypes.most_common(1)[0][0] if dtypes else "unknown",
    )


def _versions() -> dict[str, str]:
    found = {"outcore": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        driver = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        driver = None
    return found | ({"nvidia driver": driver[0]} if driver else {})


def _git() -> tuple[str, int]:
    """Returns this checkout's commit and number of changed files; an empty commit and 0 for an installed package."""
    # A package that is installed below another project's checkout is not tracked there.
    if not _run_git("ls-files", Path(__file__).name):
        return "", 0
    return _run_git("rev-parse", "HEAD"), len(_run_git("status", "--porcelain").splitlines())


def _run_git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.rstrip()
