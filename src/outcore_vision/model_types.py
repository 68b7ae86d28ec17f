"""Says which classes make a model of a type that mlx-lm lacks (the core's group ``model_types``).

mlx-vlm is an extra and takes seconds to import, so this module imports it only when such a model is opened.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

from outcore.checkpoint.positions import config_of
from outcore.errors import UnsupportedModelError
from outcore.modules.mlx_lm_compat import MODEL_TYPES
from outcore.options import LoadOptions

from .names import FOLDERS, RENAMED

Classes = tuple[type[nn.Module], type]

# The package's name at ``MODEL_TYPES``.
NAME = "vision"

NEEDS = "needs mlx-vlm: pip install 'outcore[vision]'"


def classes_of(config: dict[str, Any]) -> Classes | None:
    """Returns the classes of a model and of its arguments; None: mlx-vlm has no model of this type either.

    Raises:
        UnsupportedModelError: mlx-vlm has one, but is not installed or cannot be imported.
    """
    kind = str(config.get("model_type", "")).lower()
    folder = RENAMED.get(kind, kind)
    if not _has(folder) and (installed() or (folder not in FOLDERS and kind not in RENAMED)):
        return None
    return imported(kind, lambda: importlib.import_module("outcore_vision.text_model").text_classes(folder))


def imported(kind: str, make: Callable[[], Classes]) -> Classes:
    """Returns what ``make`` imports from mlx-vlm, for models of type ``kind``. Raises as ``classes_of``."""
    if not installed():
        raise UnsupportedModelError(f"model type {kind} {NEEDS}")
    try:
        return make()
    except (AttributeError, ImportError) as e:  # another version, or not all of it
        raise UnsupportedModelError(f"model type {kind} {NEEDS} (what is installed fails: {e})") from e


def load_options(folder: Path, o: LoadOptions) -> LoadOptions:
    """Returns the options with which a model that reads images is loaded if they are asked for; others as they are."""
    if not o.images or o.ranks is not None or MODEL_TYPES in (o.model_config or {}):
        return o
    config = config_of(folder)
    if not config.get("vision_config") or folder_of({**config, MODEL_TYPES: NAME}) is None:
        return o
    return replace(o, model_config={**(o.model_config or {}), MODEL_TYPES: NAME})


def folder_of(config: Mapping[str, Any]) -> str | None:
    """Returns mlx-vlm's folder of a model that is made by this package, without importing it; None: it is not."""
    kind = str(config.get("model_type", "")).lower()
    if not _has(folder := RENAMED.get(kind, kind)):
        return None
    own = config.get(MODEL_TYPES) is not None
    theirs = importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}") is not None
    return folder if own or not theirs else None


def installed() -> bool:
    return _models() is not None


def _has(folder: str) -> bool:
    models = _models()
    return models is not None and folder.isidentifier() and (models / folder / "__init__.py").exists()


def _models() -> Path | None:
    """Returns the folder of mlx-vlm's models without importing it; None: it is not installed."""
    spec = importlib.util.find_spec("mlx_vlm")
    where = None if spec is None else spec.submodule_search_locations
    models = Path(next(iter(where))) / "models" if where else None
    return models if models is not None and models.is_dir() else None
