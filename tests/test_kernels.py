"""CUDA kernels that are compiled beforehand: what each process computes, and that MLX is told where to keep them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import outcore
import zoo
from outcore.cli import machine_checks as doctor
from outcore.engine import kernels
from outcore.engine.kernels import (
    FOLDER,
    Compiling,
    DraftCopy,
    compile_kernels,
    jobs_for,
    keep_kernels,
    kernels_kept,
    products_in,
)
from outcore.loading import kernel_job
from outcore.loading.kernel_job import KernelJob, Product
from outcore.loading.preparation import prepare


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
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": "sm_90", "free_memory": 10**11})
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER, raising=False)
    found = keep_kernels()
    assert found is not None and found.is_relative_to(tmp_path / "cache" / "kernels")
    assert os.environ[FOLDER] == str(found)
    return found


class Told:
    """A process's standard input."""

    def __init__(self, began: list[str]) -> None:
        self.began = began

    def write(self, text: bytes) -> None:
        self.began.append(text.decode())

    def flush(self) -> None:
        return

    close = flush


def test_products_stand_for_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    found = prepare(folder, memory="1GB", context=72, prompt=64).profile
    shapes = {m["weight"].shape[0] % 128 for m in found.lazy.model.modules() if isinstance(m, nn.QuantizedLinear)}
    assert shapes == {0, 64}, "the model has both kinds"
    products = products_in(found)
    assert {p.columns % 128 for p in products} == {0, 64} and len(products) == 2
    assert {(p.bits, p.group_size, p.mode, p.dtype) for p in products} == {(4, 64, "affine", "float32")}
    assert all(p.inner % 64 == 0 and p.columns < 512 for p in products)
    jobs = jobs_for(found, prompt=500)
    assert jobs[:7] == [KernelJob(64, share=n, shares=7) for n in range(7)]
    assert [j.rows for j in jobs[7:]] == [64] * 2 + [8] * 2 + [32] * 2
    # Only those that a prompt of so many tokens, drafts of so many, or so many sequences use.
    assert [[j.rows for j in jobs_for(found, n)[7:]] for n in (7, 8, 17, 33)] == [
        [], [8] * 2, [8] * 2 + [32] * 2, [64] * 2 + [8] * 2 + [32] * 2
    ]  # fmt: skip
    assert jobs_for(found, prompt=7)[0] == KernelJob(7, share=0, shares=7)
    drafting = replace(found, size=replace(found.size, drafted=16))
    assert [j.rows for j in jobs_for(drafting, 7)[7:]] == [8] * 2 + [32] * 2
    several = jobs_for(replace(found, size=replace(found.size, sequences=8)), 7)
    assert [(j.sequences, j.product is None) for j in several] == [(1, True)] * 7 + [(2, True)] * 7 + [(1, False)] * 2
    # With a copy of 3 bits that drafts, of every product that it has.
    assert {p.bits for p in products_in(found, DraftCopy(3, 64))} == {4, 3} and len(
        jobs_for(found, 64, DraftCopy(3, 64))
    ) == 7 + 3 * 4
    # Where the copy is the high bits of the model's own codes, the same.
    nested = prepare(folder, memory="1GB", context=72, prompt=64, draft="self:3").profile
    assert nested.lazy.high == 3 and set(products_in(nested, DraftCopy(3, 64))) == set(
        products_in(found, DraftCopy(3, 64))
    )
    plain = prepare(zoo.save_checkpoint("llama", tmp_path / "plain"), memory="1GB").profile
    assert products_in(plain) == [] and len(products_in(plain, DraftCopy(3, 64))) == 2
    cast = prepare(folder, memory="1GB", dtype="float16").profile
    assert {p.dtype for p in products_in(cast)} == {"float16"}


@pytest.mark.parametrize(
    ("columns", "inner", "stands"),
    [(4096, 4096, (256, 256)), (248320, 12288, (256, 256)), (32, 4096, (288, 256)), (96, 4160, (352, 256)),
     (96, 4128, (352, 288))],
)  # fmt: skip
def test_another_kernel_is_not_chosen_for_the_one_that_stands(
    columns: int, inner: int, stands: tuple[int, int]
) -> None:
    p = Product.like(columns, inner, 4, 32, "affine", mx.bfloat16)
    assert (p.columns, p.inner, p.dtype) == (*stands, "bfloat16")
    assert (p.columns % 128 == 0, p.inner % 64 == 0) == (columns % 128 == 0, inner % 64 == 0)


@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [(2, 64, "affine"), (3, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")],
)
def test_a_product_is_evaluated_for_tokens_and_for_sequences(
    bits: int, group: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    original = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda x, *a, **k: seen.append(x.shape) or original(x, *a, **k))
    kernel_job.multiply(Product.like(96, 256, bits, group, mode, mx.float32), 8)
    assert [shape[:2] for shape in seen] == [(1, 8), (8, 1)]


def test_all_but_products_is_evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(folder, memory="1GB", context=72, prompt=64)
    monkeypatch.setattr("outcore.loading.preparation.prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(mx, "quantized_matmul", lambda *_, **__: pytest.fail("a product was computed"))
    graphs: list[str] = []
    original = mx.eval

    def evaluated(*arrays: Any) -> None:
        if len(arrays) == 2 and isinstance(arrays[0], mx.array):
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                mx.export_to_dot(file.name, arrays[0])
                graphs.append(file.read())
        original(*arrays)

    monkeypatch.setattr(mx, "eval", evaluated)
    kernel_job.run(KernelJob(64), {"folder": str(folder)})
    # The answer depends on everything: embeddings, norms, attention, and the function between products.
    assert len(graphs) == 2
    for what in ("Rsqrt", "Cos", "Gather", "Softmax", "CompiledSigmoid"):
        assert all(what in graph for graph in graphs), what


def test_a_process_of_its_own_compiles_a_job(folder: Path) -> None:
    what = json.dumps({"job": {"rows": 8, "product": None, "sequences": 1}, "opened": {"folder": str(folder)}})
    # Its standard input stays open: it ends by itself, and when whoever started it is gone.
    command = [sys.executable, "-m", "outcore.loading.kernel_job"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(what + "\n")
        process.stdin.flush()
        assert process.wait(60) == 0, process.stderr.read()
    slow = "import time, outcore.loading.kernel_job as j; j.run = lambda *_: time.sleep(60); import runpy"
    code = f"{slow}; import sys, threading; threading.Thread(target=j._end_with_parent).start(); j.run()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 1


def test_loading_waits_for_the_kernels_once(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began: list[str] = []
    shown: list[tuple[str, int, int]] = []

    class Process:
        """Takes three looks."""

        returncode: int | None = None

        def __init__(self, command: list[str], **options: Any) -> None:
            own = Path(options["env"][FOLDER])
            assert own.parent == cuda and own.name.startswith("job-") and options["env"]["PYTHONSAFEPATH"] == "1"
            self.stdin = Told(began)
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
    assert len(jobs) == 13 and all(j["opened"]["folder"] == str(folder) for j in jobs)
    waited = [(done, total) for what, done, total in shown if what == "compiling kernels, once"]
    assert waited and waited[0] == (0, 13) and waited == sorted(waited)
    model, _ = outcore.load_model(folder, memory="1GB", context=64)
    model.outcore.close()
    assert len(began) == 13, "the second time they are there"
    # Another compute type needs others, and several sequences one more.
    model, _ = outcore.load_model(folder, memory="1GB", context=64, sequences=3)
    model.outcore.close()
    assert [json.loads(text)["job"]["sequences"] for text in began[13:]] == [2] * 7
    del began[13:]
    model, _ = outcore.load_model(folder, memory="1GB", context=64, dtype="float16")
    model.outcore.close()
    assert len(began) == 26


def test_what_fails_or_hangs_ends_nobody_and_is_tried_again(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cuda / "done"
    failing = Compiling({KernelJob(8): done}, {"folder": str(folder / "nowhere")}, 1)
    failing.begin()
    failing.wait()
    failing.close()
    assert not done.exists() and kernels._settled(done), "for a day"
    os.utime(kernels._failed(done), (0, 0))
    assert not kernels._settled(done)
    monkeypatch.setattr(kernels, "MOST_S", 0.3)
    slow = Compiling({KernelJob(rows): done for rows in (8, 9, 10)}, {"folder": str(folder)}, 1)
    slow.begin()
    began = time.monotonic()
    slow.wait()
    assert time.monotonic() - began < 2
    slow.close()
    slow.close()
    assert not done.exists() and kernels._settled(done)


WRITES = """
import os, sys
from pathlib import Path
own = Path(os.environ["MLX_PTX_CACHE_DIR"])
assert sys.stdin.readline()
(own / "deep").mkdir(parents=True)
for name in ("a", "deep/b"):
    for kind in (".ptx", ".txt", ".cu"):
        (own / name).with_suffix(kind).write_text(name + kind)
"""


def test_what_a_process_compiled_is_kept_when_it_is_whole(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    original, popen = Path.replace, subprocess.Popen
    monkeypatch.setattr(Path, "replace", lambda s, to: moved.append(s.suffix) or original(s, to))
    for ended, expected in (("", 6), ("sys.exit(1)", 0), ("import time; time.sleep(60)", 0)):
        for file in cuda.glob("**/*.*"):
            file.unlink()
        command = [sys.executable, "-c", f"{WRITES}\n{ended}"]
        with monkeypatch.context() as patched:
            patched.setattr(kernels.subprocess, "Popen", lambda _, c=command, **how: popen(c, **how))
            patched.setattr(kernels, "MOST_S", 3.0)
            compiling = Compiling({KernelJob(8): cuda / "done"}, {}, 1)
            compiling.begin()
            compiling.wait()
            compiling.close()
        assert len([f for f in cuda.glob("**/*.*") if f.is_file()]) == expected
        assert not list(cuda.glob("job-*"))
    # MLX looks for the last of them first.
    assert len(moved) == 6 and moved[-2:] == [".ptx", ".ptx"]
    left = cuda / "job-1-x"
    left.mkdir()
    keep_kernels()
    assert left.exists()
    os.utime(left, (0, 0))
    keep_kernels()
    assert not left.exists()


SHARE = """
import json, sys
import mlx.core as mx
fused, original = [], mx.compile
def noted(function, *a, **k):
    whole = original(function, *a, **k)
    def call(*args, **how):
        fused.append(function.__qualname__)
        return whole(*args, **how)
    return call
mx.compile = noted
from outcore.loading import kernel_job
from outcore.loading.kernel_job import KernelJob, run
without, original_lookups = [], kernel_job.no_lookups
kernel_job.no_lookups = lambda: without.append(1) or original_lookups()
run(KernelJob(8, share=int(sys.argv[2]), shares=int(sys.argv[3])), {"folder": sys.argv[1]})
print(json.dumps([sorted(set(fused)), len(without)]))
"""


def test_fused_functions_are_shared_out(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5", tmp_path / "m")

    def fused(share: int, shares: int) -> tuple[list[str], int]:
        command = [sys.executable, "-c", SHARE, str(folder), str(share), str(shares)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    (whole, none), *parts = fused(0, 1), *(fused(n, 3) for n in range(3))
    assert len(whole) >= 3 and all(names for names, _ in parts) and none == 0
    assert sorted(name for names, _ in parts for name in names) == whole, "each once"
    assert [n for _, n in parts] == [2, 1, 1], "one looks up the prompt, another what follows"


def test_embeddings_that_are_left_out_are_zeros_of_their_shape_and_type() -> None:
    plain = nn.Embedding(100, 64)
    plain.set_dtype(mx.bfloat16)
    ids = mx.array([[1, 2, 3]])
    for module in (plain, plain.to_quantized(group_size=32, bits=4), plain.to_quantized(mode="mxfp4", group_size=32)):
        with kernel_job.no_lookups():
            found = module(ids)
        own = module(ids)
        assert (found.shape, found.dtype) == (own.shape, own.dtype) and not found.any() and own.any()


def test_half_a_kernel_goes_and_a_whole_one_stays(cuda: Path) -> None:
    old = time.time() - 1000
    for name, source, when in (
        ("half", None, old), ("whole", "source", old), ("under way", None, time.time()), ("full disk", "", old),
    ):  # fmt: skip
        (cuda / f"{name}.ptx").write_text("x")
        if source is not None:
            (cuda / f"{name}.cu").write_text(source)
        os.utime(cuda / f"{name}.ptx", (when, when))
    keep_kernels()
    assert sorted(f.name for f in cuda.glob("*.ptx")) == ["under way.ptx", "whole.ptx"]
    assert kernels_kept() == (cuda, 8)
    assert {stat.S_IMODE(f.stat().st_mode) for f in (cuda, cuda.parent)} == {0o700}


def test_mlx_was_told_another_folder(tmp_path: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "mine.ptx").write_text("x")
    os.utime(theirs / "mine.ptx", (0, 0))
    monkeypatch.setenv(FOLDER, str(theirs))
    assert keep_kernels() == theirs and (theirs / "mine.ptx").exists()
    # Empty: none are kept, and the current folder is none of ours.
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.chdir(theirs)
    assert keep_kernels() is None and (theirs / "mine.ptx").exists()


def test_other_devices_compile_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(kernels, "on_cuda", lambda: False)
    prepared = prepare(folder, memory="1GB")
    assert compile_kernels(prepared.profile, prepared.opened, 0, 8) is None and FOLDER not in os.environ
    assert kernels_kept() is None


def test_several_sequences_are_padded_merged_and_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(folder, memory="1GB", context=72, prompt=64)
    monkeypatch.setattr("outcore.loading.preparation.prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(mx, "quantized_matmul", lambda *_, **__: pytest.fail("a product was computed"))
    seen: list[tuple[int, ...]] = []
    model = prepared.profile.lazy.model
    original = type(model).__call__
    monkeypatch.setattr(
        type(model), "__call__", lambda s, ids, *a, **k: seen.append(ids.shape) or original(s, ids, *a, **k)
    )
    kernel_job.run(KernelJob(16, sequences=2), {"folder": str(folder)})
    assert (2, 1) in seen and (1, 1) in seen, "together, and the one that is left alone"
    assert max(shape[1] for shape in seen) >= 14


def test_what_cannot_be_told_to_another_process_is_left_to_this_one(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(folder, memory="1GB")
    began: list[str] = []
    monkeypatch.setattr(kernels, "_start", lambda what, _: began.append(what) or object())
    compile_kernels(prepared.profile, {**prepared.opened, "model_config": {"x": object()}}, 0, 64)
    assert len(began) == 6 and all(json.loads(text)["job"]["product"] for text in began)

    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kernels, "_start", refuses)
    nobody = compile_kernels(prepared.profile, prepared.opened, 0, 8)
    assert nobody is not None
    nobody.wait()
    nobody.close()
    for executable in ("", None):
        monkeypatch.setattr(sys, "executable", executable)
        assert compile_kernels(prepared.profile, prepared.opened, 0, 8) is None


def test_a_job_runs_nothing_that_lies_in_the_current_folder(
    folder: Path, cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xxhash.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and Path(p) != tmp_path])
    done = cuda / "done"
    compiling = Compiling({KernelJob(8): done}, {"folder": str(folder)}, 1)
    compiling.begin()
    compiling.wait()
    assert done.exists() and not (tmp_path / "ran").exists()


def test_an_interrupt_while_kernels_are_compiled_leaves_nothing_and_the_next_load_works(
    folder: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Any] = []
    original = kernels._start

    def started(what: str, folder: Path) -> Any:
        processes.append(original(what, folder))
        return processes[-1]

    def interrupted(what: str, *_: int) -> None:
        if what == "compiling kernels, once":
            raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "_start", started)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        outcore.load_model(folder, memory="1GB", resident=0, context=64, progress=interrupted)
    assert processes and all(p.returncode is not None and p.stdin.closed for p in processes)
    assert threading.active_count() == threads, "the reader's ended"
    assert not list(cuda.glob("[!.]*")), "nothing is taken for done, or for failed"
    # The next load, and what it says.
    monkeypatch.setattr(kernels, "jobs_for", lambda *_: [])
    streamed, _ = outcore.load_model(folder, memory="1GB", resident=0, context=64)
    resident, _ = outcore.load_model(folder, memory="1GB", context=64)
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(streamed(ids), resident(ids))
    streamed.outcore.close()
    resident.outcore.close()


def test_the_doctor_has_kernels_compiled_beside_its_other_checks(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    ended: list[str] = []

    class Process:
        returncode = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            self.stdin = Told(began)

        def poll(self) -> int:
            return 0

        def wait(self, timeout: float | None = None) -> None:
            return

        def kill(self) -> None:
            ended.append("killed")

    monkeypatch.setattr(kernels.subprocess, "Popen", Process)
    monkeypatch.setattr(doctor, "on_cuda", lambda: True)
    monkeypatch.setattr(doctor, "cores", lambda: 16)
    at: dict[str, int] = {}
    monkeypatch.setattr(doctor, "CHECKS", {
        "early": lambda _: at.update(early=len(began)) or doctor.Finding("early", True, ""),
        "answers": doctor.answers,
    })  # fmt: skip
    assert [f.ok for f in doctor.examine()] == [True, True]
    assert at["early"] == len(began) == 7, "none is begun again when the model is loaded"
    assert {json.loads(text)["job"]["rows"] for text in began} == {4}
    assert len(list(cuda.glob("outcore-*"))) == 7
    # Where there are few cores the other checks are left alone.
    for file in cuda.glob("outcore-*"):
        file.unlink()
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    assert doctor.examine()[1].ok and at["early"] == 7 and len(began) == 14
    # A check that is interrupted leaves no process.
    for file in cuda.glob("outcore-*"):
        file.unlink()
    monkeypatch.setattr(doctor, "cores", lambda: 16)
    monkeypatch.setattr(Process, "poll", lambda _: None)

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(doctor.CHECKS, "early", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor.examine()
    assert ended == ["killed"] * 7
