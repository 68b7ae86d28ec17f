"""CUDA kernels that are compiled beforehand: what each process computes, and that MLX is told where to keep them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import outcore
import zoo
from outcore import kernel_job, kernels
from outcore.kernels import FOLDER, Compiling, Job, Product, compile_kernels, jobs_for, keep_kernels, kernels_kept
from outcore.loader import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint(
        "llama", tmp_path_factory.mktemp("models") / "m", dtype=mx.float32, quantize={"bits": 4, "group_size": 64}
    )


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device whose kernels are compiled as CUDA's are; where they are kept."""
    monkeypatch.setattr(kernels, "on_cuda", lambda: True)
    monkeypatch.setattr(kernels, "cores", lambda: 16)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90", "free_memory": 10**11})
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER, raising=False)
    found = keep_kernels()
    assert found is not None and found.is_relative_to(tmp_path / "cache" / "kernels")
    assert os.environ[FOLDER] == str(found)
    return found


class Seen:
    """Quantized products that were computed, by rows and the shape of the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products: list[tuple[int, tuple[int, ...]]] = []
        original = mx.quantized_matmul

        def product(x: mx.array, w: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self.products.append((x.size // x.shape[-1], w.shape))
            return original(x, w, *args, **kwargs)

        monkeypatch.setattr(mx, "quantized_matmul", product)


def test_each_job_computes_its_own_products_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(folder, memory="1GB").survey.lazy.model
    columns = {m["scales"].shape[0] for m in model.modules() if isinstance(m, nn.QuantizedLinear)}
    assert len({c % 128 == 0 for c in columns}) == 2, "the model has both kinds"
    found = jobs_for(model, prompt=500)
    assert found[0] == Job((64,)) and {j.product for j in found[1:]} == {
        Product(4, 64, "affine", whole) for whole in (True, False)
    }
    assert [j.tokens for j in found[1:]] == [(64,)] * 2 + [(8,)] * 2 + [(32,)] * 2
    for job in found:
        # Opening a model builds a pass of which nothing is computed.
        prepared = prepare(folder, memory="1GB", context=72, prompt=64)
        with monkeypatch.context() as patch:
            seen = Seen(patch)
            patch.setattr(kernel_job, "prepare", lambda *_, **__: prepared)  # noqa: B023
            kernel_job.run(job, {"folder": str(folder)})
            if job.product is None:
                assert not seen.products
            else:
                rows = {r for r, _ in seen.products}
                assert rows <= {job.tokens[0], 1} and job.tokens[0] in rows
                assert {shape[0] % 128 == 0 for _, shape in seen.products} == {job.product.whole}
                assert len(seen.products) == len(set(seen.products)), "each once"


def test_what_is_not_a_product_is_evaluated_by_the_first_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    original = mx.fast.rms_norm
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, *a, **k: calls.append(x.shape) or original(x, *a, **k))
    prepared = prepare(folder, memory="1GB", context=72, prompt=64)
    monkeypatch.setattr(kernel_job, "prepare", lambda *_, **__: prepared)
    calls.clear()
    kernel_job.run(Job((64,)), {"folder": str(folder)})
    assert {shape[1] for shape in calls} == {64, 1}


def test_a_process_of_its_own_compiles_a_job(folder: Path) -> None:
    what = json.dumps({"job": {"tokens": [8], "product": None}, "opened": {"folder": str(folder)}})
    done = subprocess.run([sys.executable, "-m", "outcore.kernel_job", what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loading_waits_for_the_kernels_once(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began: list[str] = []
    shown: list[tuple[str, int, int]] = []

    class Process:
        """Takes three looks."""

        returncode: int | None = None

        def __init__(self, command: list[str], **options: Any) -> None:
            began.append(command[-1])
            assert options["env"][FOLDER] == str(cuda)
            self.left = 3

        def poll(self) -> int | None:
            self.left -= 1
            self.returncode = 0 if self.left <= 0 else None
            return self.returncode

        def wait(self, timeout: float | None = None) -> None:
            return

    monkeypatch.setattr(kernels.subprocess, "Popen", Process)
    model, _ = outcore.load_model(folder, memory="1GB", context=64, progress=lambda *a: shown.append(a))
    model.outcore.close()
    jobs = [json.loads(text) for text in began]
    assert len(jobs) == 7 and all(j["opened"]["folder"] == str(folder) for j in jobs)
    waited = [(done, total) for what, done, total in shown if what == "compiling kernels, once"]
    assert waited and waited[0] == (0, 7) and waited == sorted(waited)
    model, _ = outcore.load_model(folder, memory="1GB", context=64)
    model.outcore.close()
    assert len(began) == 7, "the second time they are there"
    # Another compute type needs others.
    model, _ = outcore.load_model(folder, memory="1GB", context=64, dtype="float16")
    model.outcore.close()
    assert len(began) == 14


def test_what_fails_or_hangs_ends_nobody_and_is_tried_again(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cuda / "done"
    failing = Compiling([Job((8,), None)], {"folder": str(folder / "nowhere")}, 1, done)
    failing.wait()
    failing.close()
    assert not done.exists()
    monkeypatch.setattr(kernels, "MOST_S", 0.3)
    slow = Compiling([Job((8,), None)] * 3, {"folder": str(folder)}, 1, done)
    began = time.monotonic()
    slow.wait()
    assert time.monotonic() - began < 2
    slow.close()
    slow.close()
    assert not done.exists()


def test_half_a_kernel_goes_and_a_whole_one_stays(cuda: Path) -> None:
    old = time.time() - 1000
    for name, whole, when in (("half", False, old), ("whole", True, old), ("under way", False, time.time())):
        (cuda / f"{name}.ptx").write_text("x")
        if whole:
            (cuda / f"{name}.cu").write_text("source")
        os.utime(cuda / f"{name}.ptx", (when, when))
    keep_kernels()
    assert sorted(f.name for f in cuda.glob("*.ptx")) == ["under way.ptx", "whole.ptx"]
    assert kernels_kept() == (cuda, 8)


def test_mlx_was_told_another_folder(tmp_path: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "theirs"))
    assert keep_kernels() == tmp_path / "theirs"


def test_other_devices_compile_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(kernels, "on_cuda", lambda: False)
    prepared = prepare(folder, memory="1GB")
    assert compile_kernels(prepared.survey, prepared.opened, 0, 8) is None and FOLDER not in os.environ
    assert kernels_kept() is None
