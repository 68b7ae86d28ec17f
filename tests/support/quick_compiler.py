"""A g++ for runs of many tests: MLX's CPU functions, 140 of them in a fresh folder, in a third of the time.

MLX compiles each with ``g++`` (mlx/backend/cpu/jit_compiler.cpp), and most of that time goes into one header. Here it
is compiled once a run, and whoever says ``g++`` finds that first. What is compiled with other flags does without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")


def make(folder: Path) -> Path | None:
    """Make it in a folder; the folder to put first into ``PATH``, or None where there is nothing to gain."""
    compiler = shutil.which("g++")
    include = Path(sysconfig.get_path("platlib")) / "mlx" / "include"
    if compiler is None or not (include / HEADER).exists():
        return None
    header = folder / HEADER
    header.parent.mkdir(parents=True)
    shutil.copy(include / HEADER, header)
    command = [compiler, "-std=c++17", "-O3", "-Wall", "-fPIC", "-I", str(include), "-x", "c++-header"]
    made = subprocess.run([*command, str(header), "-o", f"{header}.gch"], capture_output=True)
    if made.returncode:
        return None
    wrapper = folder / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{compiler}" "-I{folder}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper.parent


def first_in_path(folder: Path) -> None:
    """Have this process, and those that it starts, find it."""
    if (found := make(folder)) is not None:
        os.environ["PATH"] = os.pathsep.join([str(found), os.environ.get("PATH", "")])
