"""A small checkpoint of random weights, for who needs a model to stream and has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outcore.checkpoint.config import CONFIG
from outcore.machine.random_state import random_state_kept
from outcore.modules.mlx_lm_compat import classes_of

_LAYERS, _BITS, _GROUP = 8, 4, 64

_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 768,
    "num_hidden_layers": _LAYERS, "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
    },
}  # fmt: skip
"""Half of the demo model's layers, as it has them: three recurrent ones to one of attention."""


def save_random_checkpoint(folder: Path) -> Path:
    """Write such a checkpoint and return the folder: 10 MB, 4 bit, float32 scales, the same weights each time.

    Made on the CPU: a GPU would compile kernels that are needed for nothing else.

    Raises:
        OSError: it cannot be written.
    """
    config: dict[str, Any] = {"model_type": "qwen3_5", "text_config": _TEXT, "tie_word_embeddings": True}
    model_class, args_class = classes_of(config)
    with random_state_kept(), mx.stream(mx.cpu):
        mx.random.seed(0)
        # from_dict may write into what it is given.
        model = model_class(args_class.from_dict(json.loads(json.dumps(config))))  # type: ignore[attr-defined]
        nn.quantize(model, _GROUP, _BITS)
        weights = dict(tree_flatten(model.parameters()))
        mx.eval(weights)
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    except RuntimeError as e:  # MLX's word for a file that cannot be opened or written
        raise OSError(f"{folder}: {e}") from e
    (folder / CONFIG).write_text(json.dumps(config | {"quantization": {"group_size": _GROUP, "bits": _BITS}}))
    return folder
