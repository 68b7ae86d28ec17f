"""Layouts of multi-token-prediction heads as data: where originals have the tensors, which mlx-lm drops, and
of which of the model's own classes the head's layer is.

The layouts were read in vLLM and sglang, whose files are named beside them. All have a norm for the embedding and one
for the hidden state, what projects both together, a layer, and a norm behind them; embeddings and what makes
logits are the model's own, also where they lie beside the head once more.
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

Cache: TypeAlias = KVCache | CacheList
"""What a head keeps of the tokens before. Nothing of a window goes: guessed tokens are to be trimmed."""


@dataclass(frozen=True)
class HeadLayer:
    """A head's layer, called as the model's layers are; ``caches``: of keys and values that it is given, as one if
    several."""

    module: nn.Module
    caches: int = 1


def leaves(cache: Cache) -> list[KVCache]:
    """The caches that one is made of."""
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def attending(layers: Any) -> int:
    """The last layer that has keys and values."""
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


@dataclass(frozen=True)
class Layout:
    """How originals name a head's tensors.

    Attributes:
        name: for people. ``place``: a pattern of whole names, with the number of the model's layers put in; its group
            is what the other attributes are about.
        sign: what a name begins with that no other layout in the same place has.
        own: what they call the norms of the embedding and of the hidden state, what projects both, and the last norm.
        kinds: files of mlx-lm's that the model's layers may be of; none: any.
        layer: what names inside of its layer begin with.
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

OWN = ("embedding_norm", "hidden_norm", "project", "norm")
"""The modules of a head outside of its layer, in the order of ``Layout.own``."""

_SHARED = ("embed_tokens.", "shared_head.head.")
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

    def make_layer(self, text: Any, layers: Any) -> HeadLayer:
        """The layer, as the last of the model's that attends to all tokens, with random weights.

        Args:
            text: the model's part with its ``args``.

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
    for layout in (QWEN, DEEPSEEK):
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
            inside[path] = info
    return MtpTensors(layout, own, inside, converted)
