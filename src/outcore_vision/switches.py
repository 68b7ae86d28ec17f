"""mlx-vlm's modules in forms that the engine knows: routed experts as mlx-lm's, weights used in calls alone."""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers as mlx_lm_switches
from mlx_vlm.models import switch_layers as mlx_vlm_switches
from mlx_vlm.models.linear import DECODE_BLOCK_SIZE
from mlx_vlm.models.linear import linear as LINEAR
from mlx_vlm.models.quantized_verifier import singleton_quantized_linear as SINGLE
from mlx_vlm.models.quantized_verifier import supports_quantization

from outcore.modules.layers import PIECE, modules

from .mixtures import arrange

# Methods by which other code uses a module's weights beside calling it, by the module's class.
BESIDE = {"HyperConnection": ("_mix",)}

# Modules that call what is in them token by token, if these are few: each is streamed as one piece.
WHOLE = {"CompressedAttention", "SparseCompressedAttention", "Glm5NextAttention"}

# mlx-vlm's function that multiplies by a quantized module's weights beside calling it.
SINGLY = "singleton_quantized_linear"

# Where a streamed module has its replaced call, and an embedding its product (``outcore.modules.hooks``).
CALL, PRODUCT = "_outcore_call", "_outcore_product"

# Attribute of a module of ``BESIDE`` while it is called.
WITHIN = "_outcore_within"

STACKED = mlx_vlm_switches.SwitchLinear, mlx_vlm_switches.QuantizedSwitchLinear


class SwitchGLU(mlx_vlm_switches.SwitchGLU, mlx_lm_switches.SwitchGLU):
    """Counts as a switch of either library.

    mlx-vlm computes up to eight tokens as it does single ones: the same operations here, projection by projection.
    """

    def __call__(
        self, x: mx.array, indices: mx.array, weights: Any = None, shared: Any = None, residual: Any = None
    ) -> Any:
        if self.training or x.ndim != 3 or not 1 < x.shape[1] <= DECODE_BLOCK_SIZE:
            return super().__call__(x, indices, weights, shared, residual)
        tokens = [_token(x, indices, i) for i in range(x.shape[1])]
        up = [self.up_proj(x, idx, sorted_indices=back is not None) for x, idx, back in tokens]
        gate = [self.gate_proj(x, idx, sorted_indices=back is not None) for x, idx, back in tokens]
        inner = [self.activation(u, g) for u, g in zip(up, gate, strict=True)]
        down = [
            self.down_proj(each, idx, sorted_indices=back is not None)
            for each, (_, idx, back) in zip(inner, tokens, strict=True)
        ]
        shape = (indices.shape[0], 1, indices.shape[2])
        out = [
            each if back is None else mlx_vlm_switches._scatter_unsort(each, back, shape)
            for each, (_, _, back) in zip(down, tokens, strict=True)
        ]
        return self._combine(mx.concatenate([each.squeeze(-2) for each in out], axis=1), weights, shared, residual)

    def outcore_combine(self, routed: mx.array, weights: Any = None, shared: Any = None, residual: Any = None) -> Any:
        """Adds up the experts' results as a call with these arguments does."""
        return self._combine(routed, weights, shared, residual)


def _token(x: mx.array, indices: mx.array, i: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """Returns one token's hidden states and expert indices as a switch prepares them, and how they were sorted."""
    x, indices = mx.contiguous(x[:, i : i + 1]), mx.contiguous(indices[:, i : i + 1])
    x = mx.expand_dims(x, (-2, -3))
    if indices.size < 64:
        return x, indices, None
    found: tuple[mx.array, mx.array, mx.array] = mlx_vlm_switches._gather_sort(x, indices)
    return found


def adapt(model: nn.Module) -> None:
    """Gives modules classes that the engine knows; attributes and paths stay."""
    for module in modules(model):
        arrange(module)
        kind: Any = type(module)
        if kind is mlx_vlm_switches.SwitchGLU:
            module.__class__ = SwitchGLU
        elif (ours := _counterpart(module)) is not None:
            module.__class__ = _both(kind, ours)
        elif names := [name for name in BESIDE.get(kind.__name__, ()) if hasattr(kind, name)]:
            module.__class__ = _called(kind, tuple(names))
        elif kind.__name__ in WHOLE:
            module.__class__ = _one_piece(kind)


def call_singly() -> None:
    """Makes ``SINGLY`` and ``linear`` of a streamed module run within one call of it, in the modules of models that are
    imported by now."""
    for name, module in list(sys.modules.items()):
        for begun, theirs, ours in ((SINGLY, SINGLE, _single), ("linear", LINEAR, _linear)):
            if name.startswith("mlx_vlm.models.") and vars(module).get(begun) is theirs:
                setattr(module, begun, ours)


def _single(linear: nn.Module, x: mx.array) -> mx.array | None:
    call = linear.__dict__.get(CALL)
    if call is None or not isinstance(linear, nn.QuantizedLinear) or not supports_quantization(linear) or x.ndim != 3:
        return cast("mx.array | None", SINGLE(linear, x))
    return cast("mx.array | None", call(partial(SINGLE, linear), (x,), {}))


def _linear(product: Any, x: mx.array) -> mx.array:
    """mlx-vlm's product of a few tokens, which calls a module for each of them."""
    module, name = (product, CALL) if isinstance(product, nn.Module) else (getattr(product, "__self__", None), PRODUCT)
    call = getattr(module, "__dict__", {}).get(name)
    if call is None or x.ndim != 3 or not 1 < x.shape[1] <= DECODE_BLOCK_SIZE:
        return cast(mx.array, LINEAR(product, x))

    def each(x: mx.array) -> Any:
        module.__dict__[name] = lambda original, args, kwargs: original(*args, **kwargs)
        try:
            return LINEAR(product, x)
        finally:
            module.__dict__[name] = call

    return cast(mx.array, call(each, (x,), {}))


def _counterpart(module: nn.Module) -> Any:
    """Returns mlx-lm's class of modules like this one; None: there is none, or it is that already."""
    for name in ("SwitchGLU", "SwitchMLP", "SwitchLinear", "QuantizedSwitchLinear"):
        if isinstance(module, getattr(mlx_vlm_switches, name)):
            ours = getattr(mlx_lm_switches, name)
            return None if isinstance(module, ours) else ours
    if sum(isinstance(child, STACKED) for child in module.children().values()) < 2:
        return None
    asked = list(inspect.signature(type(module).__call__).parameters)[1:3]
    known = isinstance(module, mlx_lm_switches.SwitchMLP)
    return mlx_lm_switches.SwitchMLP if asked == ["x", "indices"] and not known else None


@cache
def _both(kind: Any, ours: Any) -> type:
    return type(kind.__name__, (kind, ours), {"__module__": kind.__module__})


@cache
def _one_piece(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, PIECE: True})


@cache
def _called(kind: Any, names: tuple[str, ...]) -> type:
    """Returns a subclass whose methods ``names`` run within a call of the module, where its weights are present."""

    def call(self: Any, *args: Any, outcore_method: str = "__call__", **kwargs: Any) -> Any:
        within = self.__dict__.get(WITHIN, False)
        self.__dict__[WITHIN] = True
        try:
            return getattr(super(made, self), outcore_method)(*args, **kwargs)
        finally:
            self.__dict__[WITHIN] = within

    def method(name: str) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.__dict__.get(WITHIN, False):
                return getattr(super(made, self), name)(*args, **kwargs)
            return self(*args, outcore_method=name, **kwargs)

        return run

    members = {"__module__": kind.__module__, "__call__": call, **{name: method(name) for name in names}}
    made: Any = type(kind.__name__, (kind,), members)
    return cast(type, made)
