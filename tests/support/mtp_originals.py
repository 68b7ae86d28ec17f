"""Heads of random weights for tiny models, tensor by tensor as originals have them: written after the layouts, with
nothing of ``outcore.checkpoint``'s tables, so that those can be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

import zoo

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

HIDDEN = 64


class _Drawn:
    """Random tensors under a prefix, at which no layer saturates."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.made: Tensors = {}

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self.made[f"{name}.weight"] = (self._random.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)

    def vector(self, name: str, size: int, about: float) -> None:
        self.made[name] = (about + 0.3 * self._random.normal(size=size)).astype(np.float32)

    def norms(self, at: str, *names: str, size: int = HIDDEN) -> None:
        for name in names:
            self.vector(f"{at}{name}.weight", size, 1.0)

    def gated(self, at: str, width: int) -> None:
        """An MLP."""
        for name in ("gate_proj", "up_proj"):
            self.matrix(f"{at}.{name}", width, HIDDEN)
        self.matrix(f"{at}.down_proj", HIDDEN, width)

    def latent(self, at: str, heads: int = 4, rank: int = 64, nope: int = 64, rope: int = 16, value: int = 64) -> None:
        self.matrix(f"{at}.q_a_proj", rank, HIDDEN)
        self.matrix(f"{at}.q_b_proj", heads * (nope + rope), rank)
        self.matrix(f"{at}.kv_a_proj_with_mqa", rank + rope, HIDDEN)
        self.matrix(f"{at}.kv_b_proj", heads * (nope + value), rank)
        self.matrix(f"{at}.o_proj", HIDDEN, heads * value)
        self.norms(f"{at}.", "q_a_layernorm", "kv_a_layernorm", size=rank)


def layers_of(model_type: str) -> int:
    """That a tiny model has."""
    return int(zoo.CONFIGS[model_type]["num_hidden_layers"])


def original(model_type: str, seed: int = 7) -> Tensors:
    """The head of a type's original, and what lies beside it: what is the model's own once more."""
    drawn = _Drawn(seed)
    _sparse(drawn, model_type)
    return drawn.made


def _experts(d: _Drawn, at: str) -> None:
    d.matrix(f"{at}gate", 4, HIDDEN)
    for e in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_experts"):
        d.gated(f"{at}{e}", 64)


def _sparse(d: _Drawn, model_type: str) -> None:
    at = f"model.layers.{layers_of(model_type)}."
    d.norms(at, "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    d.matrix(f"{at}eh_proj", HIDDEN, 2 * HIDDEN)
    d.latent(f"{at}self_attn")
    d.matrix(f"{at}self_attn.indexer.wq_b", 2 * 32, 64)
    d.matrix(f"{at}self_attn.indexer.wk", 32, HIDDEN)
    d.matrix(f"{at}self_attn.indexer.weights_proj", 2, HIDDEN)
    d.norms(f"{at}self_attn.indexer.", "k_norm", size=32)
    d.vector(f"{at}self_attn.indexer.k_norm.bias", 32, 0.0)
    _experts(d, f"{at}mlp.")
    d.vector(f"{at}mlp.gate.e_score_correction_bias", 4, 0.5)
    for shared in ("embed_tokens", "shared_head.head"):
        d.matrix(f"{at}{shared}", 8, HIDDEN)


TYPES = ("deepseek_v32", "glm_moe_dsa")
