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

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self.made[f"{name}.weight"] = (self._random.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)
        if bias:
            self.vector(f"{name}.bias", rows, 0.0)

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

    def heads(self, at: str, queries: int, keys: int, values: int, out: int, bias: bool = False) -> None:
        """Projections of an attention, which have so many rows in all."""
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", values)):
            self.matrix(f"{at}.{name}", rows, HIDDEN, bias)
        self.matrix(f"{at}.o_proj", HIDDEN, out)

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


def original(model_type: str, seed: int = 7, **how: Any) -> Tensors:
    """The head of a type's original, and what may lie beside it: a second head, what is the model's own once more."""
    drawn = _Drawn(seed)
    _WRITERS[model_type](drawn, **how)
    return drawn.made


def _mimo(d: _Drawn) -> None:
    for n in range(2):
        at = f"model.mtp_layers.{n}."
        d.norms(at, "token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm")
        d.norms(at, "final_layernorm")
        d.matrix(f"{at}input_proj", HIDDEN, 2 * HIDDEN)
        d.heads(f"{at}self_attn", 64, 32, 32, 64, bias=True)
        d.gated(f"{at}mlp", 128)


def _mimo_v2(d: _Drawn) -> None:
    for n in range(3):
        at = f"model.mtp.layers.{n}."
        d.norms(at, "enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        d.matrix(f"{at}eh_proj", HIDDEN, 2 * HIDDEN)
        d.heads(f"{at}self_attn", 4 * 32, 4 * 32, 4 * 16, 4 * 16)
        d.vector(f"{at}self_attn.attention_sink_bias", 4, 1.0)
        d.gated(f"{at}mlp", 128)


def _exaone(d: _Drawn) -> None:
    at = "mtp.layers.0."
    d.norms("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    d.matrix("mtp.fc", HIDDEN, 2 * HIDDEN)
    d.norms(at, "input_layernorm", "post_attention_layernorm")
    d.heads(f"{at}self_attn", 4 * 32, 2 * 32, 2 * 32, 4 * 32)
    d.norms(f"{at}self_attn.", "q_norm", "k_norm", size=32)
    d.gated(f"{at}mlp", 128)


def _experts(d: _Drawn, at: str) -> None:
    d.matrix(f"{at}gate", 4, HIDDEN)
    for e in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_experts"):
        d.gated(f"{at}{e}", 64)


def _bailing(d: _Drawn) -> None:
    at = f"model.layers.{layers_of('bailing_moe')}."
    d.norms(at, "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    d.matrix(f"{at}eh_proj", HIDDEN, 2 * HIDDEN)
    d.matrix(f"{at}attention.query_key_value", 8 * 16, HIDDEN, bias=True)
    d.matrix(f"{at}attention.dense", HIDDEN, 64)
    d.norms(f"{at}attention.", "query_layernorm", "key_layernorm", size=16)
    _experts(d, f"{at}mlp.")
    d.vector(f"{at}mlp.gate.expert_bias", 4, 0.5)


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


_WRITERS: dict[str, Any] = {
    "mimo": _mimo,
    "mimo_v2_flash": _mimo_v2,
    "exaone_moe": _exaone,
    "bailing_moe": _bailing,
    "deepseek_v32": lambda d: _sparse(d, "deepseek_v32"),
    "glm_moe_dsa": lambda d: _sparse(d, "glm_moe_dsa"),
}

TYPES = tuple(_WRITERS)
