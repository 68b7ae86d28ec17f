"""What heads put out, computed plainly from their originals' tensors: in numpy, in doubles, all tokens at once, with no
cache and nothing of Outcore's or mlx-lm's. After the files of vLLM and sglang that
``outcore_drafts.mtp.layouts`` names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_originals import Tensors, layers_of

Array = np.ndarray[Any, np.dtype[np.float64]]

EPS = 1e-5


class _Tensors:
    """An original's, in doubles, under a prefix."""

    def __init__(self, tensors: Tensors, at: str) -> None:
        self._tensors, self._at = tensors, at

    def under(self, at: str) -> _Tensors:
        return _Tensors(self._tensors, self._at + at)

    def __call__(self, name: str) -> Array:
        return self._tensors[self._at + name].astype(np.float64)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self(f"{name}.weight").T

    def normed(self, name: str, x: Array, eps: float = EPS) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self(f"{name}.weight")


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _gated(t: _Tensors, x: Array) -> Array:
    return t.linear("down_proj", _silu(t.linear("gate_proj", x)) * t.linear("up_proj", x))


def _rotated(x: Array, dims: int, base: float, pairs: bool = False) -> Array:
    """(heads, tokens, width), of which the first ``dims`` turn; ``pairs``: neighbours together, else halves."""
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin, out = np.cos(angle), np.sin(angle), x.copy()
    first, second = (slice(0, dims, 2), slice(1, dims, 2)) if pairs else (slice(0, dims // 2), slice(dims // 2, dims))
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _seen(tokens: int) -> Any:
    return np.arange(tokens)[:, None] >= np.arange(tokens)


def _attended(q: Array, k: Array, v: Array, seen: Any) -> Array:
    """(heads, tokens, width) each, keys and values repeated for groups of queries; puts out (tokens, heads * width)."""
    k, v = (np.repeat(a, q.shape[0] // a.shape[0], axis=0) for a in (k, v))
    scores = np.where(seen, q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    out = scores @ v
    return out.transpose(1, 0, 2).reshape(out.shape[1], -1)


def _split(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _routed(t: _Tensors, x: Array, bias: str) -> Array:
    """Two groups of two experts, of which one group is asked, by sigmoids and a bias that only chooses."""
    scores = _sigmoid(x @ t("gate.weight").T)
    chosen = scores + t(bias)
    out = _gated(t.under("shared_experts."), x)
    for i, token in enumerate(x):
        group = int(np.argmax([chosen[i, :2].sum(), chosen[i, 2:].sum()]))
        asked = [2 * group, 2 * group + 1]
        share = scores[i, asked] / scores[i, asked].sum() * 1.5
        for e, weight in zip(asked, share, strict=True):
            out[i] += weight * _gated(t.under(f"experts.{e}."), token)
    return out


def _latent(t: _Tensors, x: Array, eps: float, seen: Any) -> Array:
    """Four heads, 64 that do not turn and 16 that do, values of 64."""
    q = t.linear("q_b_proj", t.normed("q_a_layernorm", t.linear("q_a_proj", x), eps))
    both, rank = t.linear("kv_a_proj_with_mqa", x), len(t("kv_a_layernorm.weight"))
    kv = t.normed("kv_a_layernorm", both[:, :rank], eps)
    turned = _rotated(both[None, :, rank:], 16, 10000.0, pairs=True)
    q, kv = _split(q, 4), _split(t.linear("kv_b_proj", kv), 4)
    q = np.concatenate([q[..., :64], _rotated(q[..., 64:], 16, 10000.0, pairs=True)], axis=-1)
    k = np.concatenate([kv[..., :64], np.repeat(turned, 4, axis=0)], axis=-1)
    return t.linear("o_proj", _attended(q, k, kv[..., 64:], seen))


def _sparse(t: _Tensors, x: Array, pairs: bool) -> Array:
    """Latent attention to the four tokens that an indexer of two heads chooses."""

    def chosen(x: Array) -> Any:
        own, index = t.under("self_attn."), t.under("self_attn.indexer.")
        q = _split(index.linear("wq_b", own.normed("q_a_layernorm", own.linear("q_a_proj", x), 1e-6)), 2)
        k = index.linear("wk", x)
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + EPS)
        k = (k * index("k_norm.weight") + index("k_norm.bias"))[None]
        q, k = (_rotated(a, 16, 10000.0, pairs) for a in (q, k))
        weights = index.linear("weights_proj", x) * (2 * 32) ** -0.5
        scores = (np.maximum(q @ k.swapaxes(1, 2), 0) * weights.T[..., None]).sum(0)
        scores = np.where(_seen(len(x)), scores, -np.inf)
        kept = np.argsort(-scores, axis=-1)[:, :4]
        seen = np.zeros(scores.shape, bool)
        np.put_along_axis(seen, kept, True, axis=-1)
        return seen & _seen(len(x))

    first = t.normed("input_layernorm", x)
    x = x + _latent(t.under("self_attn."), first, 1e-6, chosen(first))
    return x + _routed(t.under("mlp."), t.normed("post_attention_layernorm", x), "gate.e_score_correction_bias")


TURNS_PAIRS = {"deepseek_v32": False, "glm_moe_dsa": True}
"""By type, whether the indexer turns neighbours, not halves."""


def states_of(model_type: str, tensors: Tensors, embedded: Array, states: Array, swapped: bool = False) -> Array:
    """A head's states (tokens, hidden) from its tokens' embeddings and the states of the tokens before them.

    Args:
        swapped: in the wrong order.
    """
    t = _Tensors(tensors, f"model.layers.{layers_of(model_type)}.")
    both = [t.normed("enorm", embedded), t.normed("hnorm", states)]
    x = t.linear("eh_proj", np.concatenate(both[::-1] if swapped else both, axis=-1))
    return t.normed("shared_head.norm", _sparse(t, x, TURNS_PAIRS[model_type]))
