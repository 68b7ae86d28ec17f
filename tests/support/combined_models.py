"""Tiny models of every kind, in every form of weights and with every kind of adapter, with a tokenizer of 16 words.

What is made here is read by Outcore and by mlx-lm alike. A text's tokens are its words: ``w5 w7`` is 5, 7.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, models, pre_tokenizers

import mtp_heads
import zoo

VOCABULARY = 16
"""Tokens: few, so that a text's own repetitions are many."""

LONG = {"max_position_embeddings": 2048, "vocab_size": VOCABULARY}
THREE = LONG | {"num_hidden_layers": 3}

# A latent head's widths, which may be no less than a group of keys: twice as fast as the zoo's.
NARROW = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_attention_heads": 2}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("mimo", THREE | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "sliding": ("gemma3_text", THREE),
    "hybrid": ("qwen3_5", {"text_config": LONG, "vocab_size": VOCABULARY}),
    "mla": ("deepseek_v3", THREE | NARROW | {"first_k_dense_replace": 3, "qk_rope_head_dim": 32}),
    "moe": ("glm4_moe", LONG | {"n_routed_experts": 8}),
}
"""mlx-lm's type of each kind, and what differs from the zoo's configuration: heads as wide as a group of keys that
mlx-lm quantizes, and positions for a block of the prefix cache."""

AFFINE = (2, 3, 4, 5, 6, 8)
WEIGHTS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "bfloat16": None,
    **{f"{bits}bit": {"bits": bits, "group_size": 32} for bits in AFFINE},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4", "global_scale": True},
}
"""How each form is quantized; a global scale is of experts alone, as in mlx-lm."""


@contextlib.contextmanager
def configured(kind: str) -> Iterator[str]:
    """The zoo's type of the kind, with the configuration changed meanwhile."""
    name, changes = KINDS[kind]
    before = zoo.CONFIGS[name]
    config = copy.deepcopy(before)
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    zoo.CONFIGS[name] = config
    try:
        yield name
    finally:
        zoo.CONFIGS[name] = before


@dataclass(frozen=True)
class Shelf:
    """Models, adapters and heads below one folder, each made when it is first asked for. Several processes may share
    it."""

    root: Path

    def model(self, kind: str, weights: str) -> Path:
        """A checkpoint as ``mlx_lm.convert`` writes it, with a tokenizer."""

        def make(folder: Path) -> None:
            dtype = mx.bfloat16 if weights == "bfloat16" else mx.float32
            with configured(kind) as name:
                zoo.save_checkpoint(name, folder, dtype=dtype, quantize=WEIGHTS[weights])
            save_tokenizer(folder)

        return self._made(f"{kind}-{weights}", make)

    def head(self, kind: str) -> Path:
        """A multi-token-prediction head for the kind."""

        def make(folder: Path) -> None:
            with configured(kind) as name:
                mtp_heads.save_head(name, folder)

        return self._made(f"{kind}-head", make)

    def adapter(self, kind: str, weights: str, how: str) -> Path | None:
        """Trained weights for a model; None for ``none``."""
        if how == "none":
            return None
        model = self.model(kind, weights)
        return self._made(f"{kind}-{weights}-{how}", lambda folder: save_adapter(model, how, folder))

    def _made(self, name: str, make: Any) -> Path:
        folder = self.root / name
        if not folder.exists():
            partial = self.root / f"{name}.{os.getpid()}"
            partial.mkdir(parents=True)
            make(partial)
            with contextlib.suppress(OSError):  # another process was faster
                partial.rename(folder)
        return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are its tokens' numbers."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": False}))


def tokens_of(text: str) -> list[int]:
    """The tokens of a text; some types' tokenizers leave the spaces out."""
    return [int(number) for number in re.findall(r"w(\d+)", text)]


def save_adapter(model_folder: Path, how: str, folder: Path) -> None:
    """An adapter as mlx-lm's training leaves it, of random weights that change what is said."""
    model, _ = mlx_lm.utils.load_model(model_folder)
    layers = len(model.layers)
    parameters: dict[str, Any] = {"rank": 4, "scale": 4.0, "dropout": 0.0}
    if how == "attention":
        parameters["keys"] = sorted(_linears(model, "attn"))
    elif how == "dora":
        parameters["keys"] = sorted(_linears(model, ""))
    kind = {"dora": "dora", "full": "full"}.get(how, "lora")
    before = {} if kind == "full" else dict(tree_flatten(model.parameters()))
    if kind == "full":
        model.freeze()
        for layer in model.layers[-(layers // 2) :]:  # two of the others are a rank's each
            layer.unfreeze()
        trained = dict(tree_flatten(model.trainable_parameters()))
    else:
        linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
        leaves = ("lora_a", "lora_b", "m")
        trained = {
            k: v for k, v in tree_flatten(model.parameters()) if k.rpartition(".")[2] in leaves and k not in before
        }
    keys = mx.random.split(mx.random.key(5), len(trained))
    changed = {
        name: array + (0.05 * mx.random.normal(array.shape, key=key)).astype(array.dtype)
        for (name, array), key in zip(sorted(trained.items()), keys, strict=True)
        if mx.issubdtype(array.dtype, mx.floating)
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), changed)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _linears(model: Any, within: str) -> set[str]:
    """Paths within a layer of the linear layers, but those of experts, whose path has this word."""
    found: set[str] = set()
    for layer in model.layers:
        for path, module in layer.named_modules():
            linear = isinstance(module, nn.Linear | nn.QuantizedLinear)
            if linear and not isinstance(module, SwitchLinear | QuantizedSwitchLinear) and within in path:
                found.add(path)
    return found
