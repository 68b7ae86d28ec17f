"""Where a multi-token-prediction head's tensors lie: in original checkpoints, from which mlx-lm drops them.

The layouts were read in vLLM and sglang, whose files are named beside them. All have a norm for the embedding and one
for the hidden state, what projects both together, one layer or two, and a norm behind them; embeddings and what makes
logits are the model's own, also where they lie beside the head once more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MissingFileError
from .checkpoint import TensorInfo, read_header


@dataclass(frozen=True)
class Layout:
    """How originals name a head's tensors.

    Attributes:
        name: for people. ``place``: a pattern of whole names, with the number of the model's layers put in; its group
            is what the other attributes are about.
        sign: what a name begins with that no other layout in the same place has.
        own: modules of a head outside of its layer, to those of ``mtp_head.MtpHead``.
        layer: what names inside of its layer begin with; ``renamed``: of those, what mlx-lm calls otherwise.
        hidden_first: the hidden state lies in front of the embedding where both are projected, not behind it.
    """

    name: str
    place: str
    sign: str
    own: Mapping[str, str]
    layer: str
    renamed: Mapping[str, str]
    hidden_first: bool = False


def _own(embedding: str, hidden: str, project: str, norm: str) -> dict[str, str]:
    return {embedding: "embedding_norm", hidden: "hidden_norm", project: "project", norm: "norm"}


QWEN = Layout(
    "Qwen's", r"(?:.+\.)?mtp\.(.+)", "fc.",
    _own("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.", {},
)  # fmt: skip
"""Qwen3-Next and Qwen3.5 (``Qwen3_5MultiTokenPredictor`` of vLLM's ``qwen3_5_mtp.py``, ``Qwen3_5ForCausalLMMTP`` of
sglang's), K-EXAONE (``ExaoneMoeMultiTokenPredictor`` of vLLM's ``exaone_moe_mtp.py``)."""

MIMO_V2 = Layout(
    "MiMo V2's", r"(?:.+\.)?mtp\.(.+)", "layers.0.enorm.weight",
    _own("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.0.final_layernorm"),
    "layers.0.", {"pre_mlp_layernorm.": "post_attention_layernorm."},
)  # fmt: skip
"""MiMo-V2-Flash (``MiMoV2MTPLayer`` of vLLM's ``mimo_v2_mtp.py``, ``MiMoV2ModelNextN`` of sglang's
``mimo_v2_flash_nextn.py``)."""

NEMOTRON = Layout(
    "Nemotron-H's", r"(?:.+\.)?mtp\.layers\.(\d{1,3}\..+)", "0.mixer.",
    _own("0.enorm", "0.hnorm", "0.eh_proj", "LAST.final_layernorm"), "", {},
)  # fmt: skip
"""Nemotron 3 (``NemotronHMultiTokenPredictor`` of vLLM's ``nemotron_h_mtp.py``): a layer of the model is half of what
others call one, so the head has several, and what it begins and ends with lies in the first and the last of them."""

LONGCAT = Layout(
    "LongCat's", r"(?:.+\.)?mtp\.(.+)", "layers.0.enorm.m.",
    _own("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm"),
    "layers.0.", {"transformer_layer.mlp.": "mlp."},
)  # fmt: skip
"""LongCat-Flash (``LongCatMultiTokenPredictorLayer`` of vLLM's ``longcat_flash_mtp.py``, ``LongcatFlashModelNextN`` of
sglang's ``longcat_flash_nextn.py``)."""

MIMO = Layout(
    "MiMo's", r"(?:.+\.)?mtp_layers\.0\.(.+)", "input_proj.",
    _own("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "", {}, hidden_first=True,
)  # fmt: skip
"""MiMo 7B (``MiMoMultiTokenPredictorLayer`` of vLLM's ``mimo_mtp.py`` and of sglang's)."""

BAILING = Layout(
    "Ling's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "final_layernorm.",
    _own("enorm", "hnorm", "eh_proj", "final_layernorm"), "", {},
)  # fmt: skip
"""Ling and Ring 2 (``BailingMoEModelNextN`` of sglang's ``bailing_moe_nextn.py``)."""

DEEPSEEK = Layout(
    "DeepSeek's", r"(?:.+\.)?layers\.LAYERS\.(.+)", "enorm.",
    _own("enorm", "hnorm", "eh_proj", "shared_head.norm"), "", {},
)  # fmt: skip
"""DeepSeek V3 and V3.2, GLM-4.5 and those after it (``DeepSeekMultiTokenPredictorLayer`` of vLLM's ``deepseek_mtp.py``,
``DeepseekModelNextN`` of sglang's ``deepseek_nextn.py``): one layer more than the model has."""

LAYOUTS = (QWEN, LONGCAT, NEMOTRON, MIMO_V2, MIMO, BAILING, DEEPSEEK)

_SHARED = ("embed_tokens.", "word_embeddings.", "shared_head.head.")
_MTP = re.compile(r"(?:.+\.)?mtp[._].+")


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors.

    Attributes:
        layout: that they lie in.
        own: of the head but for its layer, by their paths in it (``project.weight``); ``layer``: of its layer, as
            mlx-lm's ``sanitize`` takes them (``self_attn.q_proj.weight``; of several, ``0.mixer.q_proj.weight``).
        converted: by mlx-lm, which beside them says so.
    """

    layout: Layout
    own: Mapping[str, TensorInfo]
    layer: Mapping[str, TensorInfo]
    converted: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that they lie in."""
        return tuple(sorted({t.file for t in (*self.own.values(), *self.layer.values())}))


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
    last = _last(tensors)
    names = {theirs.replace("LAST", str(last)): ours for theirs, ours in layout.own.items()}
    own, inside = {}, {}
    for name, info in tensors.items():
        module, _, key = name.rpartition(".")
        if module in names:
            own[f"{names[module]}.{key}"] = info
            continue
        path = name.removeprefix(layout.layer)
        beyond = layout is NEMOTRON and int(name.partition(".")[0]) > last
        if name.startswith(layout.layer) and not path.startswith(_SHARED) and "rotary_emb" not in path and not beyond:
            inside[_renamed(path, layout)] = info
    return MtpTensors(layout, own, inside, converted)


def _last(tensors: Mapping[str, TensorInfo]) -> int:
    """The layer that the first head ends with, where its layers are numbered."""
    ends = [int(m[1]) for name in tensors if (m := re.fullmatch(r"(\d{1,3})\.final_layernorm\.weight", name))]
    return min(ends, default=0)


def _renamed(path: str, layout: Layout) -> str:
    for theirs, ours in layout.renamed.items():
        if path.startswith(theirs):
            return ours + path.removeprefix(theirs)
    return path
