"""The layer of a multi-token-prediction head: of the classes that its model's own layers are of.

Which of a model's layers a head's is like (with experts or not, a window or not) is from the files of vLLM and sglang
that ``mtp_tensors`` names; what they do not say is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from .mtp_tensors import BAILING, DEEPSEEK, LONGCAT, MIMO, MIMO_V2, NEMOTRON, QWEN, Layout, MtpTensors

FULL, SLIDING = "full_attention", "sliding_attention"

Cache: TypeAlias = KVCache | CacheList
"""What a head keeps of the tokens before. Nothing of a window goes: guessed tokens are to be trimmed."""


@dataclass(frozen=True)
class HeadLayer:
    """A head's layer.

    Attributes:
        module: called as the model's layers are. ``caches``: of keys and values that it is given, as one if several.
        window: tokens that it attends to at most; None: all.
    """

    module: nn.Module
    caches: int = 1
    window: int | None = None


def leaves(cache: Cache) -> list[KVCache]:
    """The caches that one is made of."""
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


class NemotronBlocks(nn.Module):
    """Nemotron-H's: attention (``*``) and experts (``E``), each of which is a layer there.

    Args:
        kind: the class of the model's. ``pattern``: what each of them is.
    """

    def __init__(self, kind: Callable[..., nn.Module], args: Any, pattern: str) -> None:
        super().__init__()
        self.blocks = [kind(args, block) for block in pattern]

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Cache | None) -> mx.array:
        caches = iter([None] * len(self.blocks) if cache is None else leaves(cache))
        for block in self.blocks:
            x = block(x, mask, next(caches) if block.block_type == "*" else None)
        return x


class Dense(nn.Module):
    """LongCat's: one attention and one MLP, where a layer of the model has two of both, and experts."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Cache | None) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


def _like_the_last(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    """DeepSeek's, GLM's and Qwen's: as the last of the model's that attends to all tokens."""
    at = attending(layers)
    caches = text.make_cache()[at] if hasattr(text, "make_cache") else KVCache()
    inside = leaves(caches)
    if not all(type(c) is KVCache for c in inside):
        raise ValueError(f"its layer would keep a {type(caches).__name__}, from which guesses cannot be taken back")
    return HeadLayer(type(layers[at])(text.args, at), len(inside))


def attending(layers: Any) -> int:
    """The last layer that has keys and values."""
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


def _mimo(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    return HeadLayer(type(layers[-1])(text.args))


def _mimo_v2(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    """Dense, with the window, heads, sinks and rotation of the layers that have one."""
    layer = type(layers[-1])(text.args, is_moe=False, is_sliding_window=True)
    return HeadLayer(layer, window=text.args.sliding_window_size)


def _nemotron(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    signs = {"q_proj.": "*", "gate.": "E", "in_proj.": "M", "up_proj.": "-"}
    blocks: dict[int, str] = {}
    for path in found.layer:
        if match := re.fullmatch(r"(\d+)\.mixer\.(.+)", path):
            blocks.update({int(match[1]): kind for sign, kind in signs.items() if match[2].startswith(sign)})
    pattern = "".join(blocks.get(i, "?") for i in range(len(blocks)))
    if "*" not in pattern or set(pattern) - {"*", "E"}:
        raise ValueError(f"its layers are {pattern or 'none'}; only attention (*) and experts (E) are known of heads")
    return HeadLayer(NemotronBlocks(type(layers[0]), text.args, pattern), pattern.count("*"))


def _exaone(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    """Dense. Which attention it has K-EXAONE 2 says in its config; where nothing does, all tokens and no rotation."""
    kind = (config.get("mtp_layer_types") or [FULL])[0]
    window = (config.get("mtp_sliding_windows") or [text.args.sliding_window])[0] if kind == SLIDING else None
    if kind not in (FULL, SLIDING) or not (window is None or (isinstance(window, int) and window > 0)):
        raise ValueError(f"its config says of its attention {kind!r}, with a window of {window!r}")
    like = {"layer_types": [*text.args.layer_types, kind], "is_moe_layer": [*text.args.is_moe_layer, False]}
    args = replace(text.args, **like)
    layer = type(layers[-1])(args, len(args.layer_types) - 1)
    return HeadLayer(layer, window=window)


def _longcat(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    args, model = text.args, layers[-1]
    attention, mlp = type(model.self_attn[0])(args), type(model.mlps[0])(args)
    return HeadLayer(Dense(attention, mlp, args.hidden_size, args.rms_norm_eps))


def _bailing(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    """With experts where there are tensors of them, as sglang's layer 0 or the model's last."""
    experts = any(path.startswith("mlp.gate.") for path in found.layer)
    return HeadLayer(type(layers[-1])(text.args, len(layers) - 1 if experts else 0))


Maker = Callable[[Any, Any, MtpTensors, Mapping[str, Any]], HeadLayer]

_MAKERS: dict[tuple[str, str], Maker] = {
    **{(QWEN.name, kind): _like_the_last for kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    (QWEN.name, "exaone_moe"): _exaone,
    (MIMO.name, "mimo"): _mimo,
    (MIMO_V2.name, "mimo_v2_flash"): _mimo_v2,
    (NEMOTRON.name, "nemotron_h"): _nemotron,
    (LONGCAT.name, "longcat_flash"): _longcat,
    (BAILING.name, "bailing_moe"): _bailing,
}
"""By layout, and by the file of mlx-lm's that the model's layers are of."""

_REFUSED = {
    "step3p5": "it drafts with a head of its own for logits and from states before the model's last norm, and neither "
    "is at hand here",
}


def head_layer(text: Any, layers: Any, found: MtpTensors, config: Mapping[str, Any]) -> HeadLayer:
    """A head's layer, for a model's part with its ``args``, its layers and its config. Weights are random.

    Raises:
        ValueError: nothing says how it would be made.
    """
    kind = file_of(layers)
    if kind in _REFUSED:
        raise ValueError(_REFUSED[kind])
    made = _MAKERS.get((found.layout.name, kind), _like_the_last if found.layout is DEEPSEEK else None)
    if made is None:
        raise ValueError(f"it is laid out as {found.layout.name}, which is not known of models of the type {kind}")
    return made(text, layers, found, config)


def file_of(layers: Any) -> str:
    """The file of mlx-lm's that a model's layers are of, which says more than the name of the model's type."""
    return type(layers[attending(layers)]).__module__.rpartition(".")[2]


def zero_centred(found: MtpTensors, layers: Any) -> bool:
    """Whether norms are stored less one: as Qwen's originals have them, until mlx-lm converts them."""
    return found.layout is QWEN and file_of(layers).startswith("qwen3") and not found.converted


def in_model(layout: Layout, path: str) -> str:
    """A path of a head's layer as the model's ``sanitize`` knows it."""
    return path.replace("self_attn.", "self_attn.0.", 1) if layout is LONGCAT else path


def in_head(layout: Layout, path: str) -> str:
    """And the other way."""
    return path.replace("self_attn.0.", "self_attn.", 1) if layout is LONGCAT else path
