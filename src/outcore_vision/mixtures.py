"""mlx-vlm's mixtures that have no module which is called with hidden states and expert indices alone.

Forms of them that have one, which compute the same. A switch with ``outcore_routes`` is called otherwise by the model,
and then calls itself with these two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers as mlx_lm_switches
from mlx_vlm.models import switch_layers as mlx_vlm_switches

from outcore.modules.layers import named_modules


class MoEMLP(mlx_vlm_switches.SwitchMLP):
    """Moondream 3's: it holds its router."""

    outcore_routes = True

    def __call__(self, x: mx.array, indices: mx.array | None = None) -> mx.array:
        it: Any = self
        if indices is not None:
            return super().__call__(x, indices)
        gates, used = it.router(x), it.num_experts_per_tok
        chosen = mx.stop_gradient(mx.argpartition(-gates, kth=used - 1, axis=-1)[..., :used])
        scores = mx.softmax(mx.take_along_axis(gates, chosen, axis=-1), axis=-1, precise=True)
        return (it(x, chosen) * scores[..., None]).sum(axis=-2)

    def activation(self, x: mx.array) -> mx.array:
        inner, gate = mx.split(x, 2, axis=-1)
        return nn.gelu(inner) * (gate + 1.0)


class ZayaSwitchMLP(nn.Module):
    """ZAYA1's for text: a router may choose no expert, by a number after the last one's."""

    outcore_routes = True

    def __call__(self, x: mx.array, indices: mx.array, scores: mx.array | None = None, _: None = None) -> mx.array:
        it: Any = self
        if scores is not None:
            out = it(x, mx.minimum(indices, it.num_experts - 1))
            if it.config.zaya_use_mod:
                out = mx.where((indices == it.num_experts)[..., None], x[..., None, :], out)
            return (out * scores[..., None]).sum(axis=-2)
        inner = it.linear_fc1(x[..., None, None, :], indices).squeeze(-2)
        if it.config.gated_linear_unit:
            gate, up = mx.split(inner, 2, axis=-1)
            inner = nn.silu(gate) * up
        else:
            inner = (nn.gelu if it.config.activation_func == "gelu" else nn.silu)(inner)
        out = it.linear_fc2(inner[..., None, :], indices)
        return out.squeeze(-2)


class InklingSparseMoE(nn.Module):
    """Inkling's, with its router's matrix in a module of its own."""

    def __call__(self, x: mx.array) -> mx.array:
        it: Any = self
        tokens = x.reshape(-1, x.shape[-1])
        it.switch_mlp.scales_trivial()  # before its numbers by expert are those of the cache's experts
        indices, weights, shared = it._route(it.gate_weight(tokens))
        routed = (it.switch_mlp(tokens, indices) * weights[..., None]).sum(axis=-2)
        return (routed + it.shared_experts(tokens, shared)).reshape(x.shape).astype(x.dtype)


class Router(nn.Module):
    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.astype(x.dtype).T


FORMS: dict[str, type[nn.Module]] = {
    "mlx_vlm.models.moondream3.language.MoEMLP": MoEMLP,
    "mlx_vlm.models.zaya1_vl.language.ZayaSwitchMLP": ZayaSwitchMLP,
    "mlx_vlm.models.inkling.language.InklingSparseMoE": InklingSparseMoE,
}


def arrange(module: nn.Module) -> None:
    """Gives a module of ``FORMS`` its form. Inkling's has none on Metal, where mlx-vlm has a kernel for all of it."""
    kind: Any = type(module)
    form = FORMS.get(f"{kind.__module__}.{kind.__name__}")
    if form is None or issubclass(kind, form) or (form is InklingSparseMoE and mx.metal.is_available()):
        return
    if form is InklingSparseMoE:
        module["gate_weight"] = Router(module["gate_weight"])
    module.__class__ = _formed(kind, cast(Any, form))


def renamed(model: nn.Module, weights: Any) -> Any:
    """Returns a model's weights by the names that they have in it. ``weights``: a file's name, or names and arrays."""
    routers = {path for path, module in named_modules(model) if isinstance(module, Router)}
    named = weights if isinstance(weights, str | Path) else list(weights)
    return [(f"{n}.weight" if n in routers else n, w) for n, w in named] if isinstance(named, list) else named


@cache
def _formed(kind: Any, form: Any) -> type:
    bases = (form, kind, mlx_lm_switches.SwitchMLP) if hasattr(form, "outcore_routes") else (form, kind)
    return type(kind.__name__, bases, {"__module__": kind.__module__})
