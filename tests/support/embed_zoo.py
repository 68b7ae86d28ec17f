"""Tiny random embedding and reranking models of mlx-vlm's types, each with a tokenizer of 128 words."""

from __future__ import annotations

import copy
import importlib
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import vision_configs
import zoo
from outcore_embed.kinds import CLASSIFIERS, EMBED, RERANK, TOKEN_VECTORS, VECTORS

__all__ = ["KINDS", "RATING", "save_checkpoint", "texts"]

KINDS = sorted(VECTORS | TOKEN_VECTORS)
RATING = [*sorted(CLASSIFIERS), "qwen3"]

ENCODER = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "ministral3_embedding": {
        "rope_parameters": {
            "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64, "type": "yarn",
            "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        }
    },
    "modernbert": {"global_attn_every_n_layers": 3, "local_attention": 8},
    "lfm2_colbert": {"embedding_dim": 32},
}  # fmt: skip

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "yes", "no"]
TEMPLATE = "{% for m in messages %}[CLS] {{ m['content'] }} [SEP] {% endfor %}"


def config_of(kind: str) -> dict[str, Any]:
    if kind in CLASSIFIERS:
        ids = {"eos_token_id": 2, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
        return {"model_type": kind, **ENCODER, **ids, **OWN.get(kind, {})}
    config = vision_configs.config_of(kind) | {"tie_word_embeddings": True, "max_position_embeddings": 512}
    config |= {"num_hidden_layers": 6, "layer_types": ["full_attention", "sliding_attention"] * 3, "vocab_size": 128}
    if kind.startswith("lfm2"):
        config |= {"layer_types": ["conv", "full_attention"] * 3, "full_attn_idxs": [1, 3, 5]}
    config["text_config"] |= {k: config[k] for k in ("num_hidden_layers", "layer_types", "tie_word_embeddings")}
    if kind == "embedding_gemma2":
        config["audio_config"] = None
        rope = {"rope_type": "default", "rope_theta": 1e4}
        config["text_config"]["rope_parameters"] = {"sliding_attention": rope, "full_attention": rope}
    return config | OWN.get(kind, {})


def save_checkpoint(kind: str, folder: Path, task: str = EMBED, *, named: str | None = None, **more: Any) -> Path:
    """Writes a model of one of mlx-vlm's folders as it is published: ``named`` is then its type's name; ``more``:
    changes of its configuration."""
    config = config_of(kind) | more
    arch = importlib.import_module(f"mlx_vlm.models.{kind}")
    theirs = arch.SequenceClassificationModel if task == RERANK and kind in CLASSIFIERS else arch.Model
    model = theirs(_arguments(arch, config))
    model.eval()
    zoo.make_weights(model, 1)
    weights = dict(tree_flatten(model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "lfm2_colbert":
        _dense(folder, "1_Dense", weights.pop("projection.weight"))
    if kind == "gemma3_embedding":
        for n in (0, 1):
            _dense(folder, f"{n + 2}_Dense", weights.pop(f"dense.{n}.weight"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    if task == RERANK and kind in CLASSIFIERS:
        config["architectures"] = ["ForSequenceClassification"]
    config["model_type"] = named or {"lfm2_colbert": "lfm2"}.get(kind, kind)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, left=kind in ("qwen3", "qwen3_embedding"))
    return folder


def _arguments(arch: Any, config: dict[str, Any]) -> Any:
    from mlx_vlm.utils import update_module_configs

    config = copy.deepcopy(config)
    made = arch.ModelConfig.from_dict(config)
    return update_module_configs(made, arch, config, ["text", "vision", "perceiver", "projector", "audio"])


def _dense(folder: Path, name: str, weight: mx.array) -> None:
    (folder / name).mkdir()
    mx.save_safetensors(str(folder / name / "model.safetensors"), {"linear.weight": weight})
    (folder / name / "config.json").write_text(json.dumps({"out_features": weight.shape[0]}))


def save_tokenizer(folder: Path, *, left: bool = False) -> None:
    words = SPECIAL + [f"w{n}" for n in range(128 - len(SPECIAL))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "eos_token": "[SEP]", "padding_side": "left" if left else "right", "model_max_length": 500,
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def texts(count: int, longest: int = 24, seed: int = 0) -> list[str]:
    """Texts of 1 to ``longest`` words."""
    drawn = random.Random(seed)
    return [" ".join(f"w{drawn.randrange(100)}" for _ in range(drawn.randint(1, longest))) for _ in range(count)]
