"""Layouts of multi-token-prediction heads as data: the names of their tensors in original checkpoints (mlx-lm drops
them), and the mlx-lm class that the head's layer is made of.

The layouts were taken from vLLM and sglang; the files are named at each. All have a norm for the embedding and one for
the hidden state, a projection of both, a layer and a final norm. Embeddings and the output head are always the model's
own, even if a copy is stored with the head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from outcore.checkpoint.checkpoint import TensorInfo, read_header
from outcore.errors import MissingFileError

# A head's caches. No sliding windows, because guessed tokens must be trimmed from them.
Cache: TypeAlias = KVCache | CacheList


@dataclass(frozen=True)
class HeadLayer:
    """A head's layer, called as the model's layers are. ``caches``: its number of ``KVCache``; several are one
    ``CacheList``."""

    module: nn.Module
    caches: int = 1


def leaves(cache: Cache) -> list[KVCache]:
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def attending(layers: Any) -> int:
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


@dataclass(frozen=True)
class Layout:
    """How original checkpoints name a head's tensors.

    Attributes:
        name: for messages.
        place: a pattern for whole names, in which LAYERS is the model's number of layers. Its group is the name inside
            the head; the other attributes refer to that.
        sign: the start of a name that only this layout has.
        own: names of the embedding norm, the hidden-state norm, the projection and the final norm.
        kinds: mlx-lm's files that the model's layers may come from; empty: any.
        layer: prefix of the names inside the head's layer.
    """

    name: str
    place: str
    sign: str
    own: tuple[str, str, str, str]
    kinds: tuple[str, ...] = ()
    layer: str = ""


# Qwen3-Next and Qwen3.5 (``Qwen3_5MultiTokenPredictor`` of vLLM's ``qwen3_5_mtp.py``, ``Qwen3_5ForCausalLMMTP`` of
# sglang's).
QWEN = Layout(
    "Qwen's", r"(?:.+\.)?mtp\.(.+)", "fc.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ("qwen3_next", "qwen3_5", "qwen3_5_moe"), "layers.0.",
)  # fmt: skip
# DeepSeek V3 and V3.2, GLM-4.5 and later (``DeepSeekMultiTokenPredictorLayer`` of vLLM's ``deepseek_mtp.py``,
# ``DeepseekModelNextN`` of sglang's ``deepseek_nextn.py``): the head is stored as one layer more than the model has.
DEEPSEEK = Layout(
    "DeepSeek's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "enorm.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)

# Our names of the modules in ``Layout.own``, in the same order.
OWN = ("embedding_norm", "hidden_norm", "project", "norm")

_SHARED = ("embed_tokens.", "shared_head.head.")
_MTP = re.compile(r"(?:.+\.)?mtp[._].+")

_REFUSED = {"step3p5": "it has an output head of its own, which Outcore does not support"}


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors.

    Attributes:
        own: those outside of the head's layer, by path in the head (``project.weight``).
        layer: those of the head's layer (``self_attn.q_proj.weight``).
        converted: whether mlx-lm converted the checkpoint.
    """

    layout: Layout
    own: Mapping[str, TensorInfo]
    layer: Mapping[str, TensorInfo]
    converted: bool

    def make_layer(self, text: Any, layers: Any) -> HeadLayer:
        """Makes the head's layer, with random weights, as the model's last layer that attends to all tokens is made.
        ``text``: the model's part with ``args``.

        Raises:
            ValueError: the layer cannot be made, or needs caches that cannot be trimmed.
        """
        kind = file_of(layers)
        if kind in _REFUSED:
            raise ValueError(_REFUSED[kind])
        if self.layout.kinds and kind not in self.layout.kinds:
            raise ValueError(f"its tensors are named as {self.layout.name}, unexpected in a model of type {kind}")
        at = attending(layers)
        caches = text.make_cache()[at] if hasattr(text, "make_cache") else KVCache()
        if not all(type(c) is KVCache for c in leaves(caches)):
            raise ValueError(f"its layer would need a {type(caches).__name__}, from which guesses cannot be trimmed")
        try:
            layer = type(layers[at])(text.args, at)
        except TypeError as e:
            raise ValueError(f"mlx-lm's layers of type {kind} cannot be made from the model's arguments alone") from e
        return HeadLayer(layer, len(leaves(caches)))


def file_of(layers: Any) -> str:
    """Returns the name of the mlx-lm file that defines the model's layers; several model types may use one."""
    return type(layers[attending(layers)]).__module__.rpartition(".")[2]


def tensors_in(folder: Path) -> dict[str, TensorInfo]:
    """Returns every tensor of the folder's safetensors files, by name; the folder may have only the file with the head.
    Raises as ``read_header``."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MissingFileError(f"{folder}: no safetensors files here; give the folder of the original model")
    return {name: info for file in files for name, info in read_header(file).items()}


def find_mtp(tensors: Mapping[str, TensorInfo], layers: int) -> MtpTensors | None:
    """Returns the first head among a checkpoint's tensors; None if there is none in a known layout. ``layers``: the
    model's number of layers."""
    # mlx-lm's own test for converted checkpoints: in originals a convolution's kernel is the last dimension.
    converted = any("conv1d.weight" in name and info.shape[-1] == 1 for name, info in tensors.items())
    near = {name: info for name, info in tensors.items() if "mtp" in name or f"layers.{layers}." in name}
    for layout in (QWEN, DEEPSEEK):
        place = re.compile(layout.place.replace("LAYERS", str(layers)))
        inside = {m[1]: info for name, info in near.items() if (m := place.fullmatch(name))}
        if any(name.startswith(layout.sign) for name in inside):
            return _divided(inside, layout, converted)
    return None


def unknown_mtp(tensors: Mapping[str, TensorInfo]) -> str | None:
    """Returns the name of a tensor that seems to belong to a head, in whatever layout; None: there is none."""
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
            inside[path] = info
    return MtpTensors(layout, own, inside, converted)
