"""Whether this device's kernels round several tokens of a pass otherwise than one token.

Drafts leave greedy text as it is only if each token gets the bits that it has in a pass of its own. Random arrays of
the model's shapes stand for its weights, so that none is read. What is not tried counts as different: recurrences,
windows, experts, and attention that is not MLX's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..engine.model_profile import ModelProfile
from ..machine.allocator import clear_cache
from ..modules.layers import TABLES, is_matrix, named_modules, named_parameters
from ..plan.joint_plan import MOST

# Tokens of the longest pass; contexts between which attention changes its kernel; most outputs of a product.
ROWS, CONTEXTS, OUTPUTS = MOST + 1, (15, 1_100, 4_200), 16_384
_tried: dict[Hashable, bool] = {}  # in this process, by shapes and dtypes


def rows_differ(profile: ModelProfile) -> bool:
    """Whether several rows of a product or of attention may differ from the same rows one by one."""
    owners, attention = dict(named_modules(profile.lazy.model)), profile.trace.attention
    matrices: dict[str, dict[str, mx.Dtype]] = {}
    for path, a in named_parameters(profile.lazy.model):
        owner, _, key = path.rpartition(".")
        if type(owners.get(owner)) in TABLES:
            matrices.setdefault(owner, {})[key] = profile.cast.target(path, a.dtype) or a.dtype
        elif is_matrix(a):
            return True
    trials: dict[Hashable, Callable[[], bool]] = {}
    for module, dtypes in sorted(((owners[o], d) for o, d in matrices.items()), key=lambda each: each[0].weight.nbytes):
        how = (getattr(module, name, None) for name in ("group_size", "bits", "mode"))
        name = type(module), *how, *((k, module[k].shape, str(d)) for k, d in sorted(dtypes.items()))
        trials[name] = partial(_product_differs, module, dtypes, *(shape[-1] for shape in attention))
    trials |= {str(shape): partial(_attention_differs, *shape) for shape in attention}
    return not attention or any(_tried[n] if n in _tried else _tried.setdefault(n, trials[n]()) for n in trials)


def _product_differs(module: nn.Module, dtypes: Mapping[str, mx.Dtype], *used: mx.Dtype) -> bool:
    twin, width = copy.copy(module), module["weight"].shape[-1]
    for key, dtype in dtypes.items():
        twin[key] = _random((min(module[key].shape[0], OUTPUTS), *module[key].shape[1:]), dtype)
    width = width * 32 // module.bits if "scales" in dtypes else width
    floating = next(d for d in (*dtypes.values(), *used) if mx.issubdtype(d, mx.floating))
    x, run = _random((1, ROWS, width), floating), getattr(twin, "as_linear", twin)
    return _rounds(lambda first, end: run(x[:, first:end]))


def _attention_differs(heads: int, shared: int, width: int, values: int, dtype: mx.Dtype) -> bool:
    q = _random((1, heads, ROWS, width), dtype)
    k, v = (_random((1, shared, CONTEXTS[-1] + ROWS, n), dtype) for n in (width, values))

    def run(context: int, first: int, end: int) -> mx.array:
        part = q[:, :, first:end], k[:, :, : context + end], v[:, :, : context + end]
        mask = "causal" if end - first > 1 else None
        return mx.fast.scaled_dot_product_attention(*part, scale=width**-0.5, mask=mask)

    return any(_rounds(partial(run, context)) for context in CONTEXTS)


def _rounds(run: Callable[[int, int], mx.array]) -> bool:
    try:
        one = mx.concatenate([run(i, i + 1) for i in range(ROWS)], axis=-2)
        return not all(mx.array_equal(run(0, n), one[..., :n, :]).item() for n in range(ROWS, 1, -1))
    except (RuntimeError, ValueError):
        return True  # MLX has no kernel for this shape
    finally:
        clear_cache()


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    key = mx.random.key(shape[-1])  # the caller's random state stays
    if mx.issubdtype(dtype, mx.floating):
        return mx.random.normal(shape, dtype, scale=0.5, key=key)
    low, high = (112, 120) if dtype == mx.uint8 else (0, (1 << 31) - 1)  # scales of 8 bits: ordinary numbers
    return mx.random.randint(low, high, shape, key=key).astype(dtype)
