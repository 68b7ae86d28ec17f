"""MLX's CUDA kernels: compiled before they are needed, side by side, and kept.

MLX compiles a kernel when it is first needed, one after the other, and evaluates nothing meanwhile
(mlx/backend/cuda/jit_module.cpp: a lock is held). On an H200 a quantized product took 30 to 35 s for each of three
numbers of rows, a fused function 3 to 4 s: 88 s before the first token of a 9B at 8 bit, and 30 more when its first
batch or long draft came. So processes of their own compile all that a model will need at once, while its weights are
read. They leave it in MLX's folder for kernels, which is kept with what else is made once, and not in the system's
temporary one, where MLX leaves it by itself. Metal's kernels come compiled, and the CPU's take a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import xxhash

from ..errors import StoreError
from ..machine.cache_folder import make_cache, require_own
from ..machine.cache_use import keep
from ..machine.device import on_cuda
from ..machine.hardware import cores
from ..machine.packages import version
from ..modules.module_tree import named_modules, named_parameters
from ..modules.nested_linear import LOW
from .kernel_jobs import KernelJob, Product
from .model_profile import ModelProfile

FOLDER = "MLX_PTX_CACHE_DIR"
"""The environment variable by which MLX is told where it keeps CUDA kernels. It looks when it compiles the first."""

ROWS = (64, 8, 32)
"""Numbers of rows that MLX has a kernel of its own for, in a quantized product: from 33 on, to 16 and to 32
(mlx/backend/cuda/quantized/qmm); fewer than 8 need none. The first is what a prompt needs."""

FROM = {64: 33, 8: 8, 32: 17}
"""Rows from which on each of them is used."""

SHARES = 7
"""Processes that share the functions that MLX fuses: seven in a Qwen3.5 model, 3 to 4 s each, and 11 s for the one that
is three kernels; two of the processes share the lookups of tokens, too, 2 to 3 s each."""

CONTEXT_BYTES = 1_000_000_000
"""Of the device's memory that a process takes beside this one: CUDA's own, and a layer of each kind. Outside of any
budget, the first time that a model of this shape runs."""

MOST_S = 300.0
"""Seconds after which nobody is waited for: what is still missing is compiled when it is needed."""

AGAIN_S = 86_400.0
"""Seconds after which a job that failed is tried again."""

HALF_S = 120.0
"""Seconds without a change after which a kernel that is not whole is taken for one whose process was killed."""

JOB = "job-"
"""What the names of processes' own folders begin with."""

_numbers = itertools.count()

Progress = Callable[[str, int, int], None]


class DraftCopy(NamedTuple):
    """How the weights of a copy are quantized that drafts for its model; ``group_size`` where they were not before."""

    bits: int
    group_size: int


def products_in(profile: ModelProfile, copy: DraftCopy | None = None) -> list[Product]:
    """The quantized products of a model, one of each kind, read from headers alone; experts' are none of them.

    Args:
        copy: that drafts for it; None: it has none.
    """
    parameters = dict(named_parameters(profile.lazy.model))
    compute = {path: profile.cast.target(path, a.dtype) or a.dtype for path, a in parameters.items()}
    usual = next((t for t in compute.values() if mx.issubdtype(t, mx.floating)), mx.bfloat16)
    products: dict[Product, None] = {}
    copies: dict[Product, None] = {}
    for path, module in named_modules(profile.lazy.model):
        if not isinstance(module, nn.Linear | nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        columns, inner = module[LOW if LOW in module else "weight"].shape
        dtype = usual
        # Where codes are cut the scales are the draft's, and as many as biases.
        if scales := next((key for key in ("scales", "biases") if key in module), None):
            inner = module[scales].shape[-1] * module.group_size
            own = compute[f"{path}.{scales}"]
            dtype = own if mx.issubdtype(own, mx.floating) else usual
            products[Product.like(columns, inner, module.bits, module.group_size, module.mode, dtype)] = None
        if copy is None:
            continue
        # Of codes the high bits are taken, in their own groups.
        own_codes = scales is not None and module.mode == "affine" and module.bits > copy.bits
        group_size = module.group_size if own_codes else copy.group_size
        if inner % group_size == 0:
            copies[Product.like(columns, inner, copy.bits, group_size, "affine", dtype)] = None
    return list(products | copies)


def jobs_for(profile: ModelProfile, prompt: int, copy: DraftCopy | None = None) -> list[KernelJob]:
    """What to compile, what an answer needs first standing first.

    Args:
        prompt: tokens of a chunk of a prompt.
        copy: that drafts for it.
    """
    size = profile.size
    rows = max(2, min(prompt, ROWS[0]))
    passes = [
        KernelJob(rows, sequences=n, share=share, shares=SHARES)
        for n in ((1, 2) if size.sequences > 1 else (1,))
        for share in range(SHARES)
    ]
    # The most that are computed at once, of a prompt, of drafted tokens, or of sequences.
    most = max(prompt, size.drafted + 1, size.sequences)
    counts = [n for n in ROWS if most >= FROM[n]]
    return [*passes, *(KernelJob(n, p) for n in counts for p in products_in(profile, copy))]


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
        own = _own_folder()
    except (StoreError, OSError):
        return Path(given) if given else None
    if given is None:
        os.environ[FOLDER] = given = str(own)
    if given != str(own):
        return Path(given) if given else None
    keep(own)  # MLX reads and writes there whenever it likes
    with contextlib.suppress(OSError):
        for folder in own.glob(f"{JOB}*"):
            if time.time() - folder.stat().st_mtime > 2 * MOST_S:
                shutil.rmtree(folder, ignore_errors=True)
        for kernel in own.rglob("*.ptx"):
            source = kernel.with_suffix(".cu")
            whole = kernel.stat().st_size and source.exists() and source.stat().st_size
            if not whole and time.time() - kernel.stat().st_mtime > HALF_S:
                kernel.unlink(missing_ok=True)
    return own


def _own_folder() -> Path:
    """Made for this user alone: what is in it runs.

    Raises:
        StoreError, OSError: as ``make_cache``.
    """
    folder = make_cache()
    for name in ("kernels", f"mlx-{version('mlx')}-{_architecture()}"):
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        require_own(folder)
    return folder


def kernels_kept() -> tuple[Path, int] | None:
    """Where compiled kernels are, and how many bytes they take; removing the folder is safe. None: there are none."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder).is_dir():
        return None
    sizes = 0
    for file in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):
            sizes += file.stat().st_size
    return Path(folder), sizes


def _architecture() -> str:
    """Of the GPU: what is compiled for one does not run on another."""
    return re.sub(r"[^\w.-]", "-", str(mx.device_info().get("architecture", "gpu")))


class Compiling:
    """Processes that compile a model's kernels.

    Args:
        jobs: and for each a file that is made when it has ended well.
        opened: arguments of ``prepare`` that the model was opened with, and its folder.
        at_once: of them that run side by side.
    """

    def __init__(self, jobs: Mapping[KernelJob, Path], opened: Mapping[str, Any], at_once: int) -> None:
        self._jobs, self._opened, self._at_once = list(jobs.items()), opened, at_once
        self._running: dict[subprocess.Popen[bytes], Path] = {}
        self._of = len(jobs)
        self._mark = f"{JOB}{os.getpid()}-{next(_numbers)}"
        self._began = time.monotonic()

    def _own(self, done: Path) -> Path:
        """The folder that a job's process has for its kernels: several compile some of the same, and MLX writes them
        where others read. No two are alike, of threads that load at once neither."""
        return done.with_name(f"{self._mark}-{done.name}")

    def begin(self) -> None:
        """Begin as many as may run, and note which have ended."""
        for process in [p for p in self._running if p.poll() is not None]:
            done = self._running.pop(process)
            _let_go(process)
            with contextlib.suppress(OSError):
                if process.returncode == 0:
                    _take_over(self._own(done), done.parent)
                (done if process.returncode == 0 else _failed(done)).touch()
            shutil.rmtree(self._own(done), ignore_errors=True)
        while self._jobs and len(self._running) < self._at_once:
            job, done = self._jobs.pop(0)
            try:
                process = _start(json.dumps({"job": asdict(job), "opened": self._opened}), self._own(done))
            except (OSError, ValueError):  # no memory for another process, or no Python that can be started
                self._jobs.clear()
                return
            self._running[process] = done

    def wait(self, progress: Progress = lambda *_: None) -> None:
        """Wait until all is compiled, ``MOST_S`` at most. What fails is compiled when it is needed."""
        while self._running and time.monotonic() - self._began < MOST_S:
            progress("compiling kernels, once", self._of - len(self._jobs) - len(self._running), self._of)
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(iter(self._running)).wait(0.2)
            self.begin()
        for done in self._running.values():
            with contextlib.suppress(OSError):
                _failed(done).touch()

    def close(self) -> None:
        """End what still runs. Safe to call twice."""
        self._jobs.clear()
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait()
            _let_go(process)
        for done in self._running.values():
            shutil.rmtree(self._own(done), ignore_errors=True)
        self._running.clear()


def _take_over(made: Path, kept: Path) -> None:
    """Move kernels from one folder to another. MLX looks for the ``.ptx`` first, so that comes last.

    Raises:
        OSError: a file cannot be moved.
    """
    for file in sorted(made.rglob("*"), key=lambda f: f.suffix == ".ptx"):
        if file.is_file():
            target = kept / file.relative_to(made)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.replace(target)


def _start(what: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process for a job, which ends when this one does: its standard input ends then.

    Args:
        folder: that it keeps its kernels in.

    Raises:
        OSError: there is none.
    """
    environment = os.environ | {
        # This process's own imports: it may be no installed package. And never what lies in the current folder.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONSAFEPATH": "1",
        FOLDER: str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "outcore.loading.kernel_job"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(what.encode() + b"\n")
        process.stdin.flush()
    except OSError:
        process.kill()
        process.wait()
        _let_go(process)
        raise
    return process


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close what a process listened to."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _failed(done: Path) -> Path:
    """The file that is there, for a day, when a job failed."""
    return done.with_name(done.name + "-failed")


def _settled(done: Path) -> bool:
    """Whether a job has ended well, or failed lately: what cannot be compiled is not waited for each time."""
    try:
        return done.exists() or time.time() - _failed(done).stat().st_mtime < AGAIN_S
    except OSError:
        return False


def compile_kernels(
    profile: ModelProfile, opened: Mapping[str, Any], budget: int, prompt: int, copy: DraftCopy | None = None
) -> Compiling | None:
    """Begin to compile what a model needs; None: it is there, or is no matter on this device.

    Args:
        opened: arguments of ``prepare`` that the model was opened with, and its folder.
        budget: bytes of the device's memory that the model is going to take.
        prompt: tokens of a chunk of its prompt.
        copy: that drafts for it.
    """
    folder = keep_kernels()
    # Inside of another program ``sys.executable`` is that program, or nothing.
    if folder is None or not profile.layers or not sys.executable or getattr(sys, "frozen", False):
        return None
    kinds = sorted({layer.kind for layer in profile.size.layers} | {profile.size.rest_kind})
    jobs: dict[KernelJob, Path] = {}
    for job in jobs_for(profile, prompt, copy):
        # A product is the same in every model.
        what = (job, None if job.product is not None else kinds)
        done = folder / f"outcore-{xxhash.xxh64_hexdigest(repr(what).encode())}"
        if not _settled(done):
            jobs[job] = done
    try:
        json.dumps(opened)
    except (TypeError, ValueError):
        # Options that were made in this process cannot be told to another.
        jobs = {job: done for job, done in jobs.items() if job.product is not None}
        opened = {}
    if not jobs:
        return None
    free = mx.device_info().get("free_memory")
    room = int((int(free) - budget) // CONTEXT_BYTES) if free is not None else 1
    compiling = Compiling(jobs, opened, max(1, min(len(jobs), cores(), room)))
    compiling.begin()
    return compiling
