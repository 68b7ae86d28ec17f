"""Where a multi-token-prediction head's tensors lie: in original checkpoints, from which mlx-lm drops them.

Two layouts are known. Both were read in vLLM and sglang:

- Qwen3-Next, Qwen3.5 (``Qwen3_5MultiTokenPredictor`` of vLLM's ``qwen3_5_mtp.py``, ``Qwen3_5ForCausalLMMTP`` of
  sglang's): ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden``, ``mtp.fc``, ``mtp.layers.0``, ``mtp.norm``.
- DeepSeek V3 and GLM-4.5 (``DeepSeekMultiTokenPredictorLayer`` of vLLM's ``deepseek_mtp.py``, ``DeepseekModelNextN`` of
  sglang's ``deepseek_nextn.py``): one layer more than the model has, with ``enorm``, ``hnorm``, ``eh_proj`` and
  ``shared_head.norm`` beside what a layer has. Its ``embed_tokens`` and ``shared_head.head`` are the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MissingFileError
from .checkpoint import TensorInfo, read_header

NORMS = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "project", "shared_head.norm": "norm"}
"""Modules of a head: DeepSeek's names to those of ``mtp_head.MtpHead``."""

QWEN_NORMS = {
    "pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "project", "norm": "norm",
}  # fmt: skip
"""And Qwen's."""

_QWEN = re.compile(r"(?:.+\.)?mtp\.(.+)")
_SHARED = ("embed_tokens.", "shared_head.head.")


@dataclass(frozen=True)
class MtpTensors:
    """A head's tensors.

    Attributes:
        own: of the head but for its layer, by their paths in it (``project.weight``); ``layer``: of its layer, as the
            original names them (``self_attn.q_proj.weight``).
        zero_centred: norms are stored less one, as Qwen's originals have them.
    """

    own: Mapping[str, TensorInfo]
    layer: Mapping[str, TensorInfo]
    zero_centred: bool

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
    """The head among a checkpoint's tensors; None if it has none. Of several heads the first.

    Args:
        layers: that the model has.
    """
    qwen = {m[1]: info for name, info in tensors.items() if (m := _QWEN.fullmatch(name))}
    if qwen:
        # mlx-lm's own rule for what was converted: a convolution's kernel comes last in originals only.
        converted = any("conv1d.weight" in name and info.shape[-1] == 1 for name, info in tensors.items())
        return _divided(qwen, QWEN_NORMS, "layers.0.", zero_centred=not converted)
    beyond = re.compile(rf"(?:.+\.)?layers\.{layers}\.(.+)")
    deepseek = {m[1]: info for name, info in tensors.items() if (m := beyond.fullmatch(name))}
    found = _divided(deepseek, NORMS, "", zero_centred=False)
    return found if found.own else None


def _divided(tensors: Mapping[str, TensorInfo], names: Mapping[str, str], layer: str, zero_centred: bool) -> MtpTensors:
    own, inside = {}, {}
    for name, info in tensors.items():
        module, _, key = name.rpartition(".")
        if module in names:
            own[f"{names[module]}.{key}"] = info
        elif name.startswith(layer) and not name.startswith(_SHARED) and "rotary_emb" not in name:
            inside[name.removeprefix(layer)] = info
    return MtpTensors(own, inside, zero_centred)
