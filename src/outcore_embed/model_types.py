"""Says which classes make a model of an embedding or reranking type (the core's group ``model_types``), and how it is
loaded.

mlx-vlm is an extra and takes seconds to import, so it is imported only when such a model is opened.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from outcore.modules.mlx_lm_compat import MODEL_TYPES
from outcore.options import LoadOptions
from outcore_vision.model_types import imported

from .kinds import DENSE, EMBED, FOLDER, RENAMED, TASK, WORDS, kind_of, task_of

# This package's name in a model's configuration.
NAME = "embed"

# Tokens of the longest text that memory is reserved for at first, and of the texts that share a pass.
LONGEST, PASS = 512, 512


def classes_of(config: dict[str, Any]) -> tuple[type[nn.Module], type] | None:
    """Returns the classes of a model and of its arguments; None: it is a language model, or of another type.

    Raises:
        UnsupportedModelError: mlx-vlm has one, but is not installed or cannot be imported.
    """
    if config.get(MODEL_TYPES) != NAME and str(config.get("model_type", "")).lower() in RENAMED:
        return None
    task = str(config.get(TASK, EMBED))
    if (kind := kind_of(config, task)) is None:
        return None
    if kind == "lfm2_embedding" and (Path(config.get(FOLDER, "")) / DENSE).is_file():
        kind = "lfm2_colbert"  # as mlx-vlm's loader tells them apart
    return imported(kind, lambda: importlib.import_module("outcore_embed.vector_model").vector_classes(kind, task))


def load_options(folder: Path, o: LoadOptions) -> LoadOptions:
    """Returns the options with which a model that writes no text is loaded; other models' as they are."""
    asked = (o.model_config or {}).get(TASK)
    if (task := asked or task_of(folder)) is None:
        return o
    known = {MODEL_TYPES: NAME, TASK: task, FOLDER: str(folder.resolve())}
    context = o.context or LONGEST
    return replace(
        o,
        model_config={**(o.model_config or {}), **known},
        draft="none",
        prefix_cache="off",
        kv_disk="off",
        sequences=1,
        priority="context",
        context=context,
        prompt=context,
        prefill_step_size=max(context, PASS if o.prefill_step_size is None else o.prefill_step_size),
    )


def no_text(folder: Path) -> str:
    """Returns what a model does instead of writing text; empty if it writes text."""
    return WORDS.get(task_of(folder) or "", "")
