"""``python -m outcore.kernel_job JSON``: compile some of the CUDA kernels that a model needs (``kernels``).

The model's own forward pass runs on random weights. Either quantized products are left out of it, or they are all that
is computed: so each process compiles kernels of its own, and what takes longest is done side by side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .calibrate_rig import Rig, rig
from .kernels import Job, Product
from .loader import prepare
from .modules import arrays_in


def run(job: Job, opened: dict[str, Any]) -> None:
    """Compile what ``job`` says.

    Args:
        opened: arguments of ``prepare``, and the model's ``folder``.
    """
    most = max(job.tokens)
    options = {k: v for k, v in opened.items() if k != "folder"}
    prepared = prepare(Path(opened["folder"]), **options, context=most + 8, prompt=most, least=True)
    with rig(prepared.survey, prepared.cpu_streams) as made, instead_of_products(job.product):
        for tokens in job.tokens:
            _pass(made, tokens, evaluate=job.product is None)


def _pass(made: Rig, tokens: int, *, evaluate: bool) -> None:
    cache = make_prompt_cache(made.model)
    # The next token's is a number of another kind, and looked up by another kernel.
    for ids in (made.tokens(tokens), made.tokens(1).astype(mx.uint32))[: 2 if evaluate else 1]:
        out = made.model(ids, cache=cache)
        if evaluate:
            mx.eval(mx.argmax(out[:, -1], axis=-1), arrays_in(cache))


@contextmanager
def instead_of_products(wanted: Product | None) -> Iterator[None]:
    """Let quantized products be zeros, and compute those of one kind at once, of zeros as well."""
    original: Callable[..., mx.array] = mx.quantized_matmul
    seen: set[tuple[Any, ...]] = set()

    def product(x: mx.array, w: mx.array, scales: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        columns = scales.shape[0] if kwargs.get("transpose", True) else w.shape[-1] * 32 // kwargs.get("bits", 4)
        kind = Product.of(columns, kwargs.get("bits", 4), kwargs.get("group_size", 64), kwargs.get("mode", "affine"))
        key = (x.shape, x.dtype, w.shape)
        if kind == wanted and key not in seen:
            seen.add(key)
            mx.eval(original(mx.zeros(x.shape, x.dtype), w, scales, *args, **kwargs))
        return mx.zeros((*x.shape[:-1], columns), x.dtype)

    vars(mx)["quantized_matmul"] = product
    try:
        yield
    finally:
        vars(mx)["quantized_matmul"] = original


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    kind = given["job"]["product"]
    run(Job(tuple(given["job"]["tokens"]), kind and Product(**kind)), given["opened"])
