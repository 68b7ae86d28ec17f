"""EAGLE-3: one decoder layer whose attention reads a token's embedding beside the states of three of the model's layers
(Li et al. 2025, arXiv 2503.01840), as speculators and SpecForge publish it.

The layer's own output stands in for the model's states from the second guess on. The output head may know a part of the
model's tokens: row n is of token n + d2t[n].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from .drafter import MOST_LAYERS, BlockDrafter, Config, DraftedModel, Shapes, Shared

# SpecForge's name for the first layer.
MIDDLE = "midlayer."


class Attention(nn.Module):
    def __init__(self, inner: Config, inputs: int) -> None:
        super().__init__()
        hidden, bias = inner["hidden_size"], bool(inner.get("attention_bias", False))
        self.heads = inner["num_attention_heads"]
        self.kv_heads = inner.get("num_key_value_heads") or self.heads
        dim = inner.get("head_dim") or hidden // self.heads
        self.scale = dim**-0.5
        self.q_proj = nn.Linear(inputs, self.heads * dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(inputs, self.kv_heads * dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=bias)
        scaling = inner.get("rope_parameters") or inner.get("rope_scaling")
        theta = (scaling or {}).get("rope_theta") or inner.get("rope_theta", 10000.0)
        self.rope = initialize_rope(dim, float(theta), False, scaling, inner.get("max_position_embeddings"))

    def __call__(self, x: mx.array, mask: Any, cache: KVCache) -> mx.array:
        def split(projected: mx.array, heads: int) -> mx.array:
            return projected.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

        queries, values = split(self.q_proj(x), self.heads), split(self.v_proj(x), self.kv_heads)
        # A row has the position of the token whose embedding it reads; the text's first token is never read.
        place = cache.offset + 1
        keys = self.rope(split(self.k_proj(x), self.kv_heads), offset=place)
        keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(
            self.rope(queries, offset=place), keys, values, cache=cache, scale=self.scale, mask=mask
        )
        made: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))
        return made


class Layer(nn.Module):
    """A decoder layer. The first one reads embeddings, too; its residual is the state before or after ``hidden_norm``
    (``normed_residual``)."""

    def __init__(self, inner: Config, first: bool, normed_residual: bool) -> None:
        super().__init__()
        hidden, eps = inner["hidden_size"], inner.get("rms_norm_eps", 1e-6)
        self._normed_residual = normed_residual
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(hidden, eps) for _ in range(2))
        if first:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(inner, 2 * hidden if first else hidden)
        self.mlp = MLP(hidden, inner["intermediate_size"])

    def __call__(self, embedded: mx.array, state: mx.array, mask: Any, cache: KVCache) -> mx.array:
        if "hidden_norm" in self:
            normed = self.hidden_norm(state)
            x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
            state = normed if self._normed_residual else state
        else:
            x = self.input_layernorm(state)
        state = state + self.self_attn(x, mask, cache)
        made: mx.array = state + self.mlp(self.post_attention_layernorm(state))
        return made


class Eagle3(BlockDrafter):
    kind = "EAGLE-3"

    def __init__(self, config: Config, taps: tuple[int, ...], target: DraftedModel, own_head: bool) -> None:
        super().__init__()
        inner = _layer_config(config)
        hidden, eps = inner["hidden_size"], inner.get("rms_norm_eps", 1e-6)
        assert target.vocabulary is not None
        self.taps, self.borrows_head, self._vocabulary = taps, not own_head, target.vocabulary
        width = len(taps) * (target.hidden or hidden)
        if config.get("norm_before_fc", False):
            self.input_norm = nn.RMSNorm(width, eps)
        self.fc = nn.Linear(width, hidden, bias=False)
        residual, count = bool(config.get("norm_before_residual", False)), inner.get("num_hidden_layers", 1)
        if not 0 < count <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {count}")
        self.layers = [Layer(inner, n == 0, residual) for n in range(count)]
        self.norm = nn.RMSNorm(hidden, eps)
        known = config.get("draft_vocab_size") or self._vocabulary
        if own_head:
            self.lm_head = nn.Linear(hidden, known, bias=False)
        if known != self._vocabulary:
            self.d2t = mx.zeros((known,), mx.int32)
        attention = self.layers[0].self_attn
        each = 2 * 2 * attention.kv_heads * (attention.o_proj.weight.shape[1] // attention.heads)
        self.growing = ((each * len(self.layers), None),)

    @classmethod
    def claims(cls, config: Config) -> bool:
        names = [config.get("speculators_model_type"), config.get("model_type"), *(config.get("architectures") or [])]
        return any("eagle3" in str(name).lower() for name in names)

    @classmethod
    def made_for(cls, config: Config) -> DraftedModel:
        inner = _layer_config(config)
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        return DraftedModel(
            config.get("target_hidden_size") or inner["hidden_size"],
            inner["vocab_size"],
            verifier.get("num_hidden_layers"),
            verifier.get("model_type"),
        )

    @classmethod
    def made(cls, config: Config, shapes: Shapes | None, target: DraftedModel) -> Eagle3:
        layers, hidden, vocabulary = target.layers or 0, target.hidden or 1, target.vocabulary
        if shapes is None:
            shapes = {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (), "d2t": ()}
        reduced = (config.get("draft_vocab_size") or vocabulary) != vocabulary
        if reduced and ("lm_head.weight" not in shapes or "d2t" not in shapes):
            raise ValueError("lm_head.weight or d2t is missing")
        numbers = _aux_layers(config) or [2, layers // 2, layers - 3]
        if "fc.scales" not in shapes:
            # The model's last state may be listed for training, behind those that are read.
            numbers = numbers[: shapes["fc.weight"][1] // hidden]
        own_head = "lm_head.weight" in shapes and (reduced or not config.get("tie_word_embeddings", False))
        return cls(config, tuple(max(int(n) - 1, 0) for n in numbers), target, own_head)

    @classmethod
    def renamed(cls, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        made = {}
        for name, a in weights.items():
            name = name.removeprefix("model.")
            name = f"layers.0.{name.removeprefix(MIDDLE)}" if name.startswith(MIDDLE) else name
            made[name] = a.astype(mx.int32) if name == "d2t" else a
        return made

    def check(self) -> None:
        if "d2t" in self:
            known = np.arange(self.d2t.size) + np.array(self.d2t)
            if known.min() < 0 or known.max() >= self._vocabulary:
                raise ValueError(f"d2t names tokens that are not among the model's {self._vocabulary}")

    def text(self, shared: Shared) -> EagleText:
        return EagleText(self, shared)

    def joined(self, states: mx.array) -> mx.array:
        """Returns what the first layer reads in place of the tapped states."""
        made: mx.array = self.fc(self.input_norm(states) if "input_norm" in self else states)
        return made

    def __call__(self, embedded: mx.array, state: mx.array, caches: Sequence[KVCache]) -> mx.array:
        mask = create_attention_mask(state, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            state = layer(embedded, state, mask, cache)
        return state

    def logits(self, state: mx.array, shared: Shared) -> mx.array:
        """Returns logits (vocabulary,) of the model's tokens for the state (1, 1, hidden)."""
        normed = self.norm(state)
        made: mx.array = (self.lm_head(normed) if "lm_head" in self else shared.logits(normed))[0, -1]
        if "d2t" not in self:
            return made
        known = mx.arange(self.d2t.size, dtype=mx.int32) + self.d2t
        return mx.full((self._vocabulary,), -mx.inf, made.dtype).at[known].maximum(made)


class EagleText:
    """A text in an EAGLE-3 drafter's caches."""

    def __init__(self, network: Eagle3, shared: Shared) -> None:
        self._network, self._shared = network, shared
        self._caches = [KVCache() for _ in network.layers]
        self._state: mx.array | None = None  # (1, 1, hidden): of the text's last token
        self._chain: list[mx.array] = []  # of the tokens drafted after it

    @property
    def arrays(self) -> list[mx.array]:
        held = [a for c in self._caches for a in (c.keys, c.values)]
        return [a for a in (*held, self._state) if a is not None]

    def begin(self, states: mx.array, following: mx.array) -> None:
        network = self._network
        out = self._computed(following, network.joined(states.astype(network.norm.weight.dtype)))
        self._state = out[:, -1:]

    def logits(self, drafted: Sequence[int]) -> mx.array | None:
        if self._state is None:
            return None
        for token in drafted[len(self._chain) :]:
            self._chain.append(self._computed(mx.array([token], dtype=mx.int32), self._latest))
        return self._network.logits(self._latest, self._shared)

    def cut(self) -> None:
        for cache in self._caches:
            cache.trim(len(self._chain))
        self._chain = []

    @property
    def _latest(self) -> mx.array:
        assert self._state is not None
        return self._chain[-1] if self._chain else self._state

    def _computed(self, ids: mx.array, state: mx.array) -> mx.array:
        return self._network(self._shared.embedded(ids).astype(state.dtype), state, self._caches)


def _layer_config(config: Config) -> Config:
    """Returns the config of the drafter's layers: a part of it, or all."""
    inner: Config = config.get("transformer_layer_config") or config
    return inner


def _aux_layers(config: Config) -> list[int] | None:
    """Returns the numbers of the layers that are read, counted from the embeddings (0), if the config has them."""
    for place in (config, config.get("eagle_config") or {}):
        if found := place.get("eagle_aux_hidden_state_layer_ids"):
            return list(found)
    return None
