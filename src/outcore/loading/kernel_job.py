"""``python -m outcore.kernel_job``, a job as JSON on standard input: compile CUDA kernels (``kernels``).

Either one quantized product, which takes longest, or the model's own forward pass on random weights with its quantized
products left out; and of the functions that ``mx.compile`` fuses, and of the lookups of tokens, all but a share. So
each process compiles kernels of its own, side by side with the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..engine.kernel_jobs import KernelJob, Product


def run(job: KernelJob, opened: dict[str, Any]) -> None:
    """Compile what ``job`` says.

    Args:
        opened: arguments of ``prepare``, and the model's ``folder``.
    """
    if job.product is not None:
        multiply(job.product, job.rows)
    else:
        if job.shares > 1:
            fuse_share(job.share, job.shares)
        pass_without_products(job, opened)


def multiply(product: Product, rows: int) -> None:
    """Evaluate a product of zeros: for so many tokens, and for one of each of so many sequences."""
    p, dtype = product, getattr(mx, product.dtype)
    weight = mx.zeros((p.columns, p.inner * p.bits // 32), mx.uint32)
    groups = (p.columns, p.inner // p.group_size)
    affine = p.mode == "affine"
    scales = mx.zeros(groups, dtype if affine else mx.uint8)
    biases = mx.zeros(groups, dtype) if affine else None
    how: dict[str, Any] = {"transpose": True, "group_size": p.group_size, "bits": p.bits, "mode": p.mode}
    for shape in ((1, rows, p.inner), (rows, 1, p.inner)):
        mx.eval(mx.quantized_matmul(mx.zeros(shape, dtype), weight, scales, biases, **how))


def pass_without_products(job: KernelJob, opened: dict[str, Any]) -> None:
    """Evaluate a pass over so many tokens, and one over the token that follows; of one sequence, or of several."""
    # Here, because a product needs none of it, and together they take seconds.
    from mlx_lm.models.cache import make_prompt_cache

    from ..calibration.random_model import rig
    from ..modules.hooks import arrays_in
    from .preparation import prepare

    rows, sequences = job.rows, job.sequences
    options = {k: v for k, v in opened.items() if k != "folder"}
    prepared = prepare(Path(opened["folder"]), **options, context=rows + 8, prompt=rows, least=True)
    with rig(prepared.profile, prepared.cpu_streams) as made, no_products():
        if sequences > 1:
            from mlx_lm.generate import BatchGenerator

            # Of unlike lengths, so that caches are padded and merged; one ends before the others.
            generator = BatchGenerator(made.model, prefill_batch_size=1, prefill_step_size=rows)
            prompts = [[t % made.rows for t in range(max(2, rows - n))] for n in range(sequences)]
            generator.insert(prompts, max_tokens=[8 + n for n in range(sequences)])
            for _ in range(20 * sequences):
                generator.next()
            generator.close()
            return
        cache = make_prompt_cache(made.model)
        # The token that follows is a number of another kind, and looked up by another kernel.
        for n, ids in enumerate((made.tokens(rows), made.tokens(1).astype(mx.uint32))):
            looks_up = job.share == max(0, job.shares - 2 + n)
            with nullcontext() if looks_up else no_lookups():
                mx.eval(mx.argmax(made.model(ids, cache=cache)[:, -1], axis=-1), arrays_in(cache))


def fuse_share(share: int, shares: int) -> None:
    """From now on ``mx.compile`` fuses functions of one share; the others run as they are written, by kernels that MLX
    brings along. Functions that it was given before are not affected, so this comes before ``mlx.nn`` is imported."""
    original, order = mx.compile, list[object]()

    def compile_share(function: Callable[..., Any], *args: Any, **how: Any) -> Callable[..., Any]:
        fused = original(function, *args, **how)

        def call(*a: Any, **k: Any) -> Any:
            if not any(function is other for other in order):
                order.append(function)
            number = next(n for n, other in enumerate(order) if other is function)
            return (fused if number % shares == share else function)(*a, **k)

        return call

    vars(mx)["compile"] = compile_share


@contextmanager
def no_lookups() -> Iterator[None]:
    """Let embeddings of tokens be zeros."""
    import mlx.nn as nn

    def zeros(module: nn.Module, ids: mx.array) -> mx.array:
        quantized = isinstance(module, nn.QuantizedEmbedding)
        rows = module.scales if quantized and module.mode == "affine" else module["weight"]
        dtype = rows.dtype if mx.issubdtype(rows.dtype, mx.floating) else mx.bfloat16
        dims = module.dims if quantized else module["weight"].shape[-1]
        return mx.zeros((*ids.shape, dims), dtype)

    originals = {kind: kind.__call__ for kind in (nn.Embedding, nn.QuantizedEmbedding)}
    for kind in originals:
        kind.__call__ = zeros
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__call__ = original


@contextmanager
def no_products() -> Iterator[None]:
    """Let quantized products be zeros, that depend on what would be multiplied."""
    original = mx.quantized_matmul

    def zeros(x: mx.array, w: mx.array, scales: mx.array, *_: Any, transpose: bool = True, **how: Any) -> mx.array:
        columns = scales.shape[0] if transpose else scales.shape[-1] * how.get("group_size", 64)
        return mx.zeros((*x.shape[:-1], columns), x.dtype) + 0 * x[..., :1]

    vars(mx)["quantized_matmul"] = zeros
    try:
        yield
    finally:
        vars(mx)["quantized_matmul"] = original


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    kind = given["job"]["product"]
    run(KernelJob(**given["job"] | {"product": kind and Product(**kind)}), given["opened"])
