"""Layouts of multi-token-prediction heads as data: where originals have the tensors, which mlx-lm drops, and
of which of the model's own classes the head's layer is.

The layouts were read in vLLM and sglang, whose files are named beside them. All have a norm for the embedding and one
for the hidden state, what projects both together, a layer, and a norm behind them; embeddings and what makes
logits are the model's own, also where they lie beside the head once more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from outcore.checkpoint.checkpoint import TensorInfo, read_header
from outcore.errors import MissingFileError

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


Maker = Callable[[Any, Any, Iterable[str], Mapping[str, Any]], HeadLayer]
"""Makes a head's layer, of random weights, from the model's part with its ``args``, the model's layers, the paths of
the layer's tensors and the model's config."""


def attending(layers: Any) -> int:
    """The last layer that has keys and values."""
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


def _like_the_last(text: Any, layers: Any, paths: Iterable[str], config: Mapping[str, Any]) -> HeadLayer:
    """As the last of the model's that attends to all tokens."""
    at = attending(layers)
    caches = text.make_cache()[at] if hasattr(text, "make_cache") else KVCache()
    if not all(type(c) is KVCache for c in leaves(caches)):
        raise ValueError(f"its layer would keep a {type(caches).__name__}, from which guesses cannot be taken back")
    return HeadLayer(type(layers[at])(text.args, at), len(leaves(caches)))


def _mimo(text: Any, layers: Any, paths: Iterable[str], config: Mapping[str, Any]) -> HeadLayer:
    return HeadLayer(type(layers[-1])(text.args))


def _mimo_v2(text: Any, layers: Any, paths: Iterable[str], config: Mapping[str, Any]) -> HeadLayer:
    """Dense, with the window, heads, sinks and rotation of the layers that have one."""
    layer = type(layers[-1])(text.args, is_moe=False, is_sliding_window=True)
    return HeadLayer(layer, window=text.args.sliding_window_size)


def _exaone(text: Any, layers: Any, paths: Iterable[str], config: Mapping[str, Any]) -> HeadLayer:
    """Dense. Which attention it has K-EXAONE 2 says in its config; where nothing does, all tokens and no rotation."""
    kind = (config.get("mtp_layer_types") or [FULL])[0]
    window = (config.get("mtp_sliding_windows") or [text.args.sliding_window])[0] if kind == SLIDING else None
    if kind not in (FULL, SLIDING) or not (window is None or (isinstance(window, int) and window > 0)):
        raise ValueError(f"its config says of its attention {kind!r}, with a window of {window!r}")
    like = {"layer_types": [*text.args.layer_types, kind], "is_moe_layer": [*text.args.is_moe_layer, False]}
    args = replace(text.args, **like)
    return HeadLayer(type(layers[-1])(args, len(args.layer_types) - 1), window=window)


def _bailing(text: Any, layers: Any, paths: Iterable[str], config: Mapping[str, Any]) -> HeadLayer:
    """With experts where there are tensors of them, as sglang's layer 0 or the model's last."""
    experts = any(path.startswith("mlp.gate.") for path in paths)
    return HeadLayer(type(layers[-1])(text.args, len(layers) - 1 if experts else 0))


@dataclass(frozen=True)
class Layout:
    """How originals name a head's tensors.

    Attributes:
        name: for people. ``place``: a pattern of whole names, with the number of the model's layers put in; its group
            is what the other attributes are about.
        sign: what a name begins with that no other layout in the same place has.
        own: what they call the norms of the embedding and of the hidden state, what projects both, and the last norm.
        makers: of its layer, by the file of mlx-lm's that the model's layers are of; "": of any other.
        layer: what names inside of its layer begin with; ``renamed``: what one of those begins with, and ours instead.
        hidden_first: the hidden state lies in front of the embedding where both are projected, not behind it.
    """

    name: str
    place: str
    sign: str
    own: tuple[str, str, str, str]
    makers: Mapping[str, Maker]
    layer: str = ""
    renamed: tuple[str, str] = ("", "")
    hidden_first: bool = False


# Qwen3-Next and Qwen3.5 (``Qwen3_5MultiTokenPredictor`` of vLLM's ``qwen3_5_mtp.py``, ``Qwen3_5ForCausalLMMTP`` of
# sglang's), K-EXAONE (``ExaoneMoeMultiTokenPredictor`` of vLLM's ``exaone_moe_mtp.py``).
QWEN = Layout(
    "Qwen's", r"(?:.+\.)?mtp\.(.+)", "fc.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    {**dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _like_the_last), "exaone_moe": _exaone}, "layers.0.",
)  # fmt: skip
# MiMo-V2-Flash (``MiMoV2MTPLayer`` of vLLM's ``mimo_v2_mtp.py``, ``MiMoV2ModelNextN`` of sglang's
# ``mimo_v2_flash_nextn.py``).
MIMO_V2 = Layout(
    "MiMo V2's", r"(?:.+\.)?mtp\.(.+)", "layers.0.enorm.weight",
    ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.0.final_layernorm"), {"mimo_v2_flash": _mimo_v2},
    "layers.0.", ("pre_mlp_layernorm.", "post_attention_layernorm."),
)  # fmt: skip
# MiMo 7B (``MiMoMultiTokenPredictorLayer`` of vLLM's ``mimo_mtp.py`` and of sglang's).
MIMO = Layout(
    "MiMo's", r"(?:.+\.)?mtp_layers\.0\.(.+)", "input_proj.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), {"mimo": _mimo}, hidden_first=True,
)  # fmt: skip
# Ling and Ring 2 (``BailingMoEModelNextN`` of sglang's ``bailing_moe_nextn.py``).
BAILING = Layout(
    "Ling's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "final_layernorm.", ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    {"bailing_moe": _bailing},
)  # fmt: skip
# DeepSeek V3 and V3.2, GLM-4.5 and those after it (``DeepSeekMultiTokenPredictorLayer`` of vLLM's ``deepseek_mtp.py``,
# ``DeepseekModelNextN`` of sglang's ``deepseek_nextn.py``): one layer more than the model has.
DEEPSEEK = Layout(
    "DeepSeek's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "enorm.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    {"": _like_the_last},
)  # fmt: skip

LAYOUTS = (QWEN, MIMO_V2, MIMO, BAILING, DEEPSEEK)

OWN = ("embedding_norm", "hidden_norm", "project", "norm")
"""The modules of a head outside of its layer, in the order of ``Layout.own``."""

_SHARED = ("embed_tokens.", "word_embeddings.", "shared_head.head.")
_MTP = re.compile(r"(?:.+\.)?mtp[._].+")

_REFUSED = {"step3p5": "it drafts with a head of its own for logits, which is not at hand here"}


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors.

    Attributes:
        layout: that they lie in.
        own: of the head but for its layer, by their paths in it (``project.weight``); ``layer``: of its layer
            (``self_attn.q_proj.weight``).
        converted: by mlx-lm, which beside them says so.
    """

    layout: Layout
    own: Mapping[str, TensorInfo]
    layer: Mapping[str, TensorInfo]
    converted: bool

    def make_layer(self, text: Any, layers: Any, config: Mapping[str, Any]) -> HeadLayer:
        """The layer, for a model's part with its ``args``, its layers and its config. Weights are random.

        Raises:
            ValueError: nothing says how it would be made.
        """
        kind = file_of(layers)
        if kind in _REFUSED:
            raise ValueError(_REFUSED[kind])
        make = self.layout.makers.get(kind, self.layout.makers.get(""))
        if make is None:
            raise ValueError(f"it is laid out as {self.layout.name}, which is not known of models of the type {kind}")
        return make(text, layers, self.layer, config)


def file_of(layers: Any) -> str:
    """The file of mlx-lm's that a model's layers are of, which says more than the name of the model's type."""
    return type(layers[attending(layers)]).__module__.rpartition(".")[2]


def tensors_in(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder's safetensors files, which need not be all of a model: those with the head do.

    Raises:
        MissingFileError: there are none. HeaderError, CheckpointError: as ``read_header``.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MissingFileError(f"{folder}: no safetensors files here; give the folder of the original model")
    return {name: info for file in files for name, info in read_header(file).items()}


def find_mtp(tensors: Mapping[str, TensorInfo], layers: int) -> MtpTensors | None:
    """The head among a checkpoint's tensors; None if it has none in a layout that is known. Of several the first.

    Args:
        layers: that the model has.
    """
    # mlx-lm's own rule for what was converted: a convolution's kernel comes last in originals only.
    converted = any("conv1d.weight" in name and info.shape[-1] == 1 for name, info in tensors.items())
    near = {name: info for name, info in tensors.items() if "mtp" in name or f"layers.{layers}." in name}
    for layout in LAYOUTS:
        place = re.compile(layout.place.replace("LAYERS", str(layers)))
        inside = {m[1]: info for name, info in near.items() if (m := place.fullmatch(name))}
        if any(name.startswith(layout.sign) for name in inside):
            return _divided(inside, layout, converted)
    return None


def unknown_mtp(tensors: Mapping[str, TensorInfo]) -> str | None:
    """A tensor that belongs to a head by its name, where ``find_mtp`` knows none; None if there is none either."""
    return next((name for name in tensors if "mtp" in name and _MTP.fullmatch(name)), None)


def _divided(tensors: Mapping[str, TensorInfo], layout: Layout, converted: bool) -> MtpTensors:
    names = dict(zip(layout.own, OWN, strict=True))
    own, inside = {}, {}
    for name, info in tensors.items():
        module, _, key = name.rpartition(".")
        path = name.removeprefix(layout.layer)
        if module in names:
            own[f"{names[module]}.{key}"] = info
        elif name.startswith(layout.layer) and not path.startswith(_SHARED) and "rotary_emb" not in path:
            theirs, ours = layout.renamed
            inside[ours + path.removeprefix(theirs) if theirs and path.startswith(theirs) else path] = info
    return MtpTensors(layout, own, inside, converted)
