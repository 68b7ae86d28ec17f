"""Layouts of multi-token-prediction heads as data: the names of their tensors in original checkpoints (mlx-lm drops
them), and the model's class of the head's layer.

The layouts were read in vLLM and sglang, whose files are named at each. All have a norm for the embedding and one for
the hidden state, a projection of both, a layer and a final norm; embeddings and the output head are the model's own,
even where a copy is stored with the head.
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

# Keys and values of a head. No sliding windows: guessed tokens have to be trimmed.
Cache: TypeAlias = KVCache | CacheList


@dataclass(frozen=True)
class HeadLayer:
    """A head's layer, called as the model's layers are; ``caches``: how many keys-and-values caches it takes, as one
    list if several."""

    module: nn.Module
    caches: int = 1


def leaves(cache: Cache) -> list[KVCache]:
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def attending(layers: Any) -> int:
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


@dataclass(frozen=True)
class Layout:
    """How originals name a head's tensors.

    Attributes:
        name: for people.
        place: a pattern of whole names, with the number of the model's layers put in; the other attributes refer to its
            group.
        sign: the start of a name that no other layout in the same place has.
        own: their names of the embedding norm, the hidden-state norm, the projection and the final norm.
        kinds: mlx-lm's files that the model's layers may come from; empty: any.
        layer: prefix of names inside its layer.
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
# DeepSeek V3 and V3.2, GLM-4.5 and those after it (``DeepSeekMultiTokenPredictorLayer`` of vLLM's ``deepseek_mtp.py``,
# ``DeepseekModelNextN`` of sglang's ``deepseek_nextn.py``): one layer more than the model has.
DEEPSEEK = Layout(
    "DeepSeek's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "enorm.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)

# The modules of a head outside of its layer, in the order of ``Layout.own``.
OWN = ("embedding_norm", "hidden_norm", "project", "norm")

_SHARED = ("embed_tokens.", "shared_head.head.")
_MTP = re.compile(r"(?:.+\.)?mtp[._].+")

_REFUSED = {"step3p5": "it drafts with a head of its own for logits, which is not at hand here"}


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors.

    Attributes:
        own: those outside of its layer, by path in the head (``project.weight``).
        layer: those of its layer (``self_attn.q_proj.weight``).
        converted: by mlx-lm, as the model's other tensors show.
    """

    layout: Layout
    own: Mapping[str, TensorInfo]
    layer: Mapping[str, TensorInfo]
    converted: bool

    def make_layer(self, text: Any, layers: Any) -> HeadLayer:
        """The layer, of the class of the model's last layer that attends to all tokens, with random weights. ``text``:
        the model's part with ``args``.

        Raises:
            ValueError: it cannot be made so.
        """
        kind = file_of(layers)
        if kind in _REFUSED:
            raise ValueError(_REFUSED[kind])
        if self.layout.kinds and kind not in self.layout.kinds:
            raise ValueError(f"it is laid out as {self.layout.name}, which is not known of models of the type {kind}")
        at = attending(layers)
        caches = text.make_cache()[at] if hasattr(text, "make_cache") else KVCache()
        if not all(type(c) is KVCache for c in leaves(caches)):
            raise ValueError(f"its layer would keep a {type(caches).__name__}, from which guesses cannot be taken back")
        try:
            layer = type(layers[at])(text.args, at)
        except TypeError as e:
            raise ValueError(f"layers of the type {kind} are made in another way") from e
        return HeadLayer(layer, len(leaves(caches)))


def file_of(layers: Any) -> str:
    """The mlx-lm file of a model's layers, which says more than the model type's name."""
    return type(layers[attending(layers)]).__module__.rpartition(".")[2]


def tensors_in(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder's safetensors files, which may be only those with the head; errors as of
    ``read_header``."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MissingFileError(f"{folder}: no safetensors files here; give the folder of the original model")
    return {name: info for file in files for name, info in read_header(file).items()}


def find_mtp(tensors: Mapping[str, TensorInfo], layers: int) -> MtpTensors | None:
    """The head among a checkpoint's tensors, the first of several; None if there is none in a known layout. ``layers``:
    of the model."""
    # mlx-lm's own test for converted checkpoints: a convolution's kernel comes last in originals only.
    converted = any("conv1d.weight" in name and info.shape[-1] == 1 for name, info in tensors.items())
    near = {name: info for name, info in tensors.items() if "mtp" in name or f"layers.{layers}." in name}
    for layout in (QWEN, DEEPSEEK):
        place = re.compile(layout.place.replace("LAYERS", str(layers)))
        inside = {m[1]: info for name, info in near.items() if (m := place.fullmatch(name))}
        if any(name.startswith(layout.sign) for name in inside):
            return _divided(inside, layout, converted)
    return None


def unknown_mtp(tensors: Mapping[str, TensorInfo]) -> str | None:
    """A tensor that belongs to a head by its name, for where ``find_mtp`` finds none; None if there is none either."""
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
