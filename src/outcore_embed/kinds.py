"""Says from a model's folder whether it makes vectors, rates documents, or writes text. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from outcore.machine.small_files import CONFIG_BYTES, parse_json, read_small

# mlx-vlm's folders of models that make one vector of a text, and those that make one of each token.
VECTORS = {
    "bert", "embedding_gemma2", "gemma3_embedding", "lfm2_embedding", "llama_bidirec", "llama_nemotron_vl_embedding",
    "ministral3_embedding", "modernbert", "qwen3_embedding", "qwen3_vl_embedding", "xlm_roberta",
}  # fmt: skip
TOKEN_VECTORS = {"colidefics3", "colqwen2_5", "lfm2_colbert"}

# Types whose checkpoints of embedding models bear a language model's name (mlx-vlm's ``embedding_loader``).
RENAMED = {
    "gemma3_text": "gemma3_embedding",
    "lfm2": "lfm2_embedding",
    "ministral3": "ministral3_embedding",
    "qwen3": "qwen3_embedding",
    "xlm-roberta": "xlm_roberta",
}

# Folders with a class for sequence classification; and language models that rate by the probability of "yes".
CLASSIFIERS, GENERATIVE = {"bert", "modernbert", "xlm_roberta"}, {"qwen3"}

EMBED, RERANK = "embed", "rerank"

# Keys that the package puts into a model's configuration: what the model is for, and its folder.
TASK, FOLDER = "outcore_task", "outcore_folder"

POOLING, DENSE = Path("1_Pooling", "config.json"), Path("1_Dense", "config.json")

WORDS = {
    EMBED: "makes vectors, no text: use outcore embed, or /v1/embeddings of outcore serve",
    RERANK: "rates documents, and writes no text: use outcore embed --rerank, or /v1/rerank of outcore serve",
}


def kind_of(config: Mapping[str, Any], task: str) -> str | None:
    """Returns mlx-vlm's folder for a model with this use; None: it has no such model."""
    given = str(config.get("model_type", "")).lower()
    kind = RENAMED.get(given, given)
    if task == RERANK:
        names = [str(name) for name in config.get("architectures") or ()]
        if kind in CLASSIFIERS:
            return kind if any(name.endswith("ForSequenceClassification") for name in names) else None
        return given if given in GENERATIVE else None
    return kind if kind in VECTORS | TOKEN_VECTORS else None


@cache
def task_of(folder: Path) -> str | None:
    """Returns what the model is for: ``EMBED``, ``RERANK``; None: to write text, or it is unknown.

    A checkpoint that bears a language model's type is known by the files of sentence-transformers, or else by its name.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    if config is None:
        return None
    name = "/".join(folder.parts[-3:]).lower() if "snapshots" in folder.parts else folder.name.lower()
    if kind_of(config, RERANK) in CLASSIFIERS or (kind_of(config, RERANK) is not None and "rerank" in name):
        return RERANK
    if kind_of(config, EMBED) is None:
        return None
    language = str(config.get("model_type", "")).lower() in RENAMED.keys() - {"xlm-roberta"}
    told = any((folder / file).is_file() for file in (POOLING, DENSE)) or "embed" in name
    return EMBED if told or not language else None


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns a small file's JSON object; None: there is no such file, or it holds another value.

    Raises:
        OSError, ValueError: it cannot be read, or is not JSON.
    """
    if not file.is_file():
        return None
    found = parse_json(read_small(file, CONFIG_BYTES))
    return found if isinstance(found, dict) else None
