"""EAGLE-3's drafter in the form in which it is trained: all places of a text at once, several guesses deep.

For the place of token t, the first guess is made from the model's hidden states up to t and from token t + 1; each
further guess from the drafter's own state instead of the model's, as when it drafts (EAGLE-3's training-time test, Li
et al. 2025, arXiv 2503.01840). ``outcore_drafters.eagle3`` computes the same with a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..drafter import DraftedModel
from ..eagle3 import Eagle3
from .products import Linear, log_sums, matmul

# Numbers of a piece of logits.
PIECE = 16 << 20

# Of the target: the model's likeliest token counts so much beside its probabilities, since greedy text follows it.
LIKELIEST = 0.4


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter. ``tapped``: the three layers of the model whose outputs it reads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tapped: tuple[int, int, int]

    @property
    def parameters(self) -> int:
        """Its weights, without embeddings and output head, which are the model's."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (heads + 2 * kv) + heads * self.hidden
        return attention + 3 * self.hidden * self.intermediate + 3 * self.hidden * self.hidden + 7 * self.hidden

    @property
    def config(self) -> dict[str, Any]:
        """The part of a published config that says how the drafter is built. Layers are counted from the embeddings
        there: the output of layer n is n + 1."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.vocabulary,
            "target_hidden_size": self.hidden,
            "tie_word_embeddings": True,
            "norm_before_fc": True,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [n + 1 for n in self.tapped],
            "transformer_layer_config": {
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "vocab_size": self.vocabulary,
                "tie_word_embeddings": True,
            },
        }


class Network(Eagle3):
    """The drafter, whose matrices are ``products.Linear``: ``coarsen`` comes before products.

    Args:
        norm: the weight (hidden,) of the model's final norm, from which the drafter's starts.
    """

    def __init__(self, shape: Shape, norm: mx.array) -> None:
        super().__init__(shape.config, shape.tapped, DraftedModel(shape.hidden, shape.vocabulary), own_head=False)
        self._shape = shape
        self.norm.weight = norm
        for module in self.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear

    def coarsen(self) -> None:
        for _, matrix in self.matrices:
            matrix.coarsen()

    @property
    def matrices(self) -> list[tuple[str, Linear]]:
        """By name."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Linear)]

    def guesses(
        self, tokens: mx.array, states: mx.array, table: mx.array, head: mx.array, first: int, depth: int, own: bool
    ) -> list[mx.array]:
        """Returns, for each of ``depth`` guesses, the states (texts, places, hidden) that the output head gets; after
        ``coarsen``.

        Args:
            tokens: int32 (texts, length).
            states: of the model's tapped layers, (texts, length - 1, 3 * hidden).
            table, head: the model's embeddings and output head, (vocabulary, hidden).
            first: the first place; the place of token t guesses token t + 2 first. Places end with the text.
            own: feed the drafter's likeliest tokens, as when it drafts; otherwise the text's own.
        """
        s, layer = self._shape, self.layers[0]
        texts, length = tokens.shape
        places = length - 1 - first
        state = self.joined(states)
        joined, keys, values = self._projected(table[tokens[:, 1:]].astype(state.dtype), state, 1)
        joined, state = joined[:, first:], state[:, first:]
        visible = mx.arange(first, length - 1)[:, None] >= mx.arange(length - 1)[None]
        mask = mx.where(visible, 0.0, -1e9).astype(state.dtype)
        later: list[tuple[mx.array, mx.array]] = []  # keys and values of the earlier guesses, for each place its own
        made: list[mx.array] = []
        groups, scale = (texts, s.kv_heads, s.heads // s.kv_heads, places), s.head_dim**-0.5
        for n in range(depth):
            queries = self._heads(layer.self_attn.q_proj(joined), s.heads, first + 1 + n)
            queries = queries.reshape(texts, s.kv_heads, -1, s.head_dim)
            scores = matmul(queries, keys.swapaxes(-1, -2)).reshape(*groups, length - 1) * scale + mask
            if later:
                grouped = queries.reshape(*groups, s.head_dim)
                own_scores = [(grouped * k[:, :, None]).sum(-1, keepdims=True) * scale for k, _ in later]
                scores = mx.concatenate([scores, *own_scores], axis=-1)
            weights = mx.softmax(scores, axis=-1)
            of_text = weights[..., : length - 1].reshape(texts, s.kv_heads, -1, length - 1)
            out = matmul(of_text, values).reshape(*groups, s.head_dim)
            for i, (_, v) in enumerate(later, length - 1):
                out = out + weights[..., i : i + 1] * v[:, :, None]
            out = out.reshape(texts, s.heads, places, s.head_dim).swapaxes(1, 2).reshape(texts, places, -1)
            state = state + layer.self_attn.o_proj(out)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            made.append(self.norm(state))
            if n + 1 < depth:
                following = _likeliest(made[-1], head) if own else _shifted(tokens[:, first + 2 :], n, places)
                joined, k, v = self._projected(table[following].astype(state.dtype), state, first + 2 + n)
                later.append((k, v))
        return made

    def _projected(self, embedded: mx.array, state: mx.array, position: int) -> tuple[mx.array, mx.array, mx.array]:
        """Returns the attention's input, keys and values; ``position``: of the first place."""
        s, layer = self._shape, self.layers[0]
        joined = mx.concatenate([layer.input_layernorm(embedded), layer.hidden_norm(state)], axis=-1)
        values = layer.self_attn.v_proj(joined).reshape(*joined.shape[:2], s.kv_heads, s.head_dim).swapaxes(1, 2)
        return joined, self._heads(layer.self_attn.k_proj(joined), s.kv_heads, position), values

    def _heads(self, x: mx.array, heads: int, position: int) -> mx.array:
        split = x.reshape(*x.shape[:2], heads, self._shape.head_dim).swapaxes(1, 2)
        rotated: mx.array = self.layers[0].self_attn.rope(split, offset=position)
        return rotated


def _shifted(tokens: mx.array, by: int, places: int) -> mx.array:
    """Returns tokens (texts, places) from ``by`` on; zeros where the text has ended."""
    part = tokens[:, by : by + places]
    return mx.pad(part, [(0, 0), (0, places - part.shape[1])])


def _likeliest(states: mx.array, head: mx.array) -> mx.array:
    """Returns the likeliest tokens int32 (...) of states (..., hidden), in pieces: their logits take memory."""
    flat, rows = states.reshape(-1, states.shape[-1]).astype(head.dtype), max(1, PIECE // head.shape[0])
    found = list[mx.array]()
    for at in range(0, flat.shape[0], rows):
        found.append(mx.argmax(matmul(flat[at : at + rows], head.T), axis=-1))
        mx.eval(found)
    return mx.concatenate(found).reshape(states.shape[:-1]).astype(mx.int32)


def _log_sums(states: mx.array, head: mx.array, offsets: mx.array, weights: mx.array) -> mx.array:
    """Returns the sum of ``log_sums``, weighted by ``weights`` (rows,).

    The gradient is made along with it, piece by piece, so that only a piece's logits are in memory.
    """
    fixed, rows = mx.stop_gradient(states), max(1, PIECE // head.shape[0])
    total, pulls = mx.array(0.0), list[mx.array]()
    for at in range(0, fixed.shape[0], rows):
        sums, pull = log_sums(fixed[at : at + rows], head, offsets)
        total = total + (sums * weights[at : at + rows]).sum()
        pulls.append(pull * weights[at : at + rows, None])
    linear = (states * mx.stop_gradient(mx.concatenate(pulls))).sum()
    return mx.stop_gradient(total - linear) + linear


def loss(net: Network, batch: dict[str, Any], table: mx.array, head: mx.array, depth: int) -> mx.array:
    """Returns the mean cross-entropy to the model's own predictions, in which its likeliest token has more weight; of
    deeper guesses less (by .9 for each).

    ``batch``: ``tokens`` and ``states`` as in ``guesses``; ``likely`` and ``chances`` (texts, length - 1, n): the
    model's likeliest next tokens and their probabilities, which add up to 1; ``counts`` (texts, length): 1 for tokens
    that count. ``columns`` and ``offsets`` (m,), if there: the tokens of which probabilities are computed, and what is
    added to their logits for those that are left out.
    """
    likely, chances, counts = batch["likely"], batch["chances"], batch["counts"]
    highest = mx.arange(chances.shape[-1]) == mx.argmax(chances, axis=-1, keepdims=True)
    chances = (1 - LIKELIEST) * chances + LIKELIEST * highest
    # Of the logits' weighted sum, all that depends on the head.
    aim = mx.array(0.0)
    for n in range(likely.shape[-1]):
        aim = aim + head[likely[..., n]] * chances[..., n : n + 1]
    part = head[batch["columns"]] if "columns" in batch else head
    offsets = batch.get("offsets", mx.zeros(head.shape[0]))
    total = weight = mx.array(0.0)
    for n, states in enumerate(net.guesses(batch["tokens"], batch["states"], table, head, 0, depth, own=False)):
        counting, wanted = counts[:, n + 2 :], aim[:, n + 1 :]
        states = states[:, : wanted.shape[1]]
        sums = _log_sums(states.reshape(-1, states.shape[-1]), part, offsets, counting.reshape(-1))
        total = total + 0.9**n * (sums - ((states * wanted).sum(axis=-1) * counting).sum())
        weight = weight + 0.9**n * counting.sum()
    return total / mx.maximum(weight, 1.0)


def gradients(
    net: Network, batch: dict[str, Any], table: mx.array, head: mx.array, depth: int
) -> tuple[mx.array, dict[str, Any]]:
    """Returns ``loss`` and its gradients, evaluated, a tree as that of the parameters. Arguments as there."""
    net.coarsen()
    value, tree = nn.value_and_grad(net, lambda: loss(net, batch, table, head, depth))()
    matrices = {f"{name}.weight": matrix for name, matrix in net.matrices}
    found = {name: a for name, a in tree_flatten(tree) if name not in matrices}
    mx.eval(value, found, [matrix.rows for matrix in matrices.values()])
    for matrix in matrices.values():
        matrix.free()
    for name, matrix in matrices.items():
        found[name] = matrix.gradient()
        mx.eval(found[name])
    made: dict[str, Any] = tree_unflatten([(name, found[name]) for name, _ in tree_flatten(tree)])
    return value, made


def accepted(net: Network, batch: dict[str, Any], table: mx.array, head: mx.array, first: int, depth: int) -> mx.array:
    """Returns int32 (texts, places): how many of ``depth`` guesses are right before the first that is not."""
    net.coarsen()
    tokens = mx.pad(batch["tokens"], [(0, 0), (0, depth)], constant_values=-1)
    made = net.guesses(batch["tokens"], batch["states"], table, head, first, depth, own=True)
    places = made[0].shape[1]
    right = [_likeliest(a, head) == tokens[:, first + 2 + n : first + 2 + n + places] for n, a in enumerate(made)]
    return mx.cumprod(mx.stack(right).astype(mx.int32), axis=0).sum(axis=0)
