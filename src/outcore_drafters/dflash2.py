"""DFlash2: DFlash with convolutions around attention and MLP, and a choice among each row's best tokens by the token
before. The convolutions' kernels depend on what they convolve."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .dflash import Block, DFlash, Layer, Shape, names_of, required, setting
from .drafter import Config, DraftedModel


class Convolution(nn.Module):
    """Two causal convolutions over a block's tokens, before and after what they stand around. Channels of a group share
    the part of the kernel that is made from the input."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        if hidden % group:
            raise ValueError("hidden_size is not a multiple of conv_group_size")
        self._groups = hidden // group
        self.base_kernel = mx.zeros((2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self._groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """Returns what the input adds to the kernels: (2, 1, tokens, taps, groups)."""
        made = self.kernel_projection(x).reshape(*x.shape[:2], 2, -1, self._groups)
        return mx.moveaxis(made, 2, 0)

    def __call__(self, x: mx.array, added: mx.array, which: int) -> mx.array:
        grouped = x.reshape(*x.shape[:2], self._groups, -1)
        out = mx.zeros_like(grouped)
        for back in range(self.base_kernel.shape[1]):
            earlier = grouped
            if back:
                # Before the block there is nothing.
                earlier = mx.concatenate([mx.zeros_like(grouped[:, :back]), grouped[:, :-back]], axis=1)
            base = self.base_kernel[which, back].reshape(1, 1, self._groups, -1).astype(x.dtype)
            out = out + (base + added[:, :, back, :, None]) * earlier
        return out.reshape(x.shape)


class ConvolvedLayer(Layer):
    def __init__(self, config: Config, shape: Shape, window: int | None) -> None:
        super().__init__(shape, window)
        sizes = (shape.hidden, required(config, "conv_kernel_size"), required(config, "conv_group_size"))
        self.attention_conv, self.mlp_conv = Convolution(*sizes), Convolution(*sizes)

    def __call__(self, x: mx.array, rope: Any, cache: Any) -> mx.array:
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(normed)
        x = x + self.attention_conv(self.self_attn(self.attention_conv(normed, before, 0), rope, cache), after, 1)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(normed)
        made: mx.array = x + self.mlp_conv(self.mlp(self.mlp_conv(normed, before, 0)), after, 1)
        return made


class Selector(nn.Module):
    """Scores pairs of tokens that follow each other, by the state of the second one's row."""

    def __init__(self, config: Config, hidden: int, vocabulary: int) -> None:
        super().__init__()
        rank = required(config, "selector_rank")
        self.predecessor_codebook, self.successor_codebook = (nn.Embedding(vocabulary, rank) for _ in range(2))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def __call__(self, before: mx.array, state: mx.array, candidates: mx.array) -> mx.array:
        """Returns scores (1, candidates), after the token ``before`` (1,), of candidates (1, n)."""
        pairs = self.predecessor_codebook(before)[:, None] * state[:, None] * self.successor_codebook(candidates)
        return mx.sum(pairs, axis=-1)


class DFlash2(DFlash):
    kind = "DFlash2"
    longest = 5

    def __init__(self, config: Config, target: DraftedModel) -> None:
        super().__init__(config, target)
        vocabulary = int(required(config, "vocab_size"))
        if self._shape.causal:
            raise ValueError("blocks of DFlash2 whose tokens see only those before them are unknown")
        self._top = int(required(config, "selector_top_k"))
        if not 0 < self._top <= vocabulary:
            raise ValueError("selector_top_k is not within the vocabulary")
        self._scales = tuple(float(setting(config, k, 1.0)) for k in ("input_embedding_scale", "output_multiplier"))
        self.candidate_selector = Selector(config, self._shape.hidden, vocabulary)

    def layer(self, config: Config, shape: Shape, window: int | None) -> Any:
        return ConvolvedLayer(config, shape, window)

    @classmethod
    def claims(cls, config: Config) -> bool:
        return bool({"dflash2draftmodel", "dflash2"}.intersection(names_of(config)))

    @classmethod
    def renamed(cls, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        made = super().renamed(weights)
        return {f"{name}.weight" if name.endswith("_codebook") else name: a for name, a in made.items()}

    def entering(self, embedded: mx.array) -> mx.array:
        return embedded * self._scales[0]

    def leaving(self, logits: mx.array) -> mx.array:
        return super().leaving(logits * self._scales[1])

    def chosen(self, block: Block, row: int, before: mx.array) -> mx.array:
        """Returns logits that are -inf but for the row's ``selector_top_k`` best tokens."""
        logits = block.logits[:, row]
        best = mx.argpartition(logits, -self._top, axis=-1)[:, -self._top :]
        state = self.candidate_selector.hidden_projection(block.states)[:, row]
        scores = mx.take_along_axis(logits, best, axis=-1) + self.candidate_selector(before, state, best)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), best, scores, axis=-1)[0]
