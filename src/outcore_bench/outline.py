"""A model with a ``config.json`` only: gives it files as ``mlx_lm.convert`` writes them, but no weights, to plan it."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from outcore.checkpoint.checkpoint import CONFIG, read_object
from outcore.checkpoint.lazy_model import one_line_of
from outcore.errors import UnsupportedModelError
from outcore.machine.random_state import random_state_kept
from outcore.machine.small_files import CONFIG_BYTES
from outcore.modules.mlx_lm_compat import classes_of
from outcore_convert.convert import shards_of
from outcore_convert.recipe import Tensor


def only_config(repo: str, revision: str | None) -> Path:
    """Downloads the small files of a model of the Hub. Raises as ``huggingface_hub`` does."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, allow_patterns=["*.json", "*.py"]))


@contextlib.contextmanager
def with_files(folder: Path) -> Iterator[Path]:
    """Gives the folder itself if it has weights, or one in which files say where weights would be; they take no room.

    Raises:
        UnsupportedModelError: mlx-lm cannot make a model of the config.
    """
    if any(folder.glob("model*.safetensors")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="outcore-plan-") as parent:
        made = Path(parent) / folder.name
        made.mkdir()
        for file in (folder / CONFIG, *folder.glob("*.py")):
            shutil.copy(file, made)
        for shard in shards_of([Tensor(name, a.dtype, tuple(a.shape)) for name, a in _parameters(folder)]):
            with (made / shard.name).open("wb") as out:
                out.write(shard.head)
                out.truncate(shard.nbytes)
        yield made


def _parameters(folder: Path) -> list[tuple[str, mx.array]]:
    _, config = read_object(folder / CONFIG, CONFIG_BYTES)
    text = config.get("text_config") or config
    named = next((str(text[key]) for key in ("dtype", "torch_dtype") if key in text), "")
    dtype = {"float32": mx.float32, "float16": mx.float16}.get(named, mx.bfloat16)
    stored = config.get("quantization")
    if stored is None and "quantization_config" in config:
        raise UnsupportedModelError(f"{folder}: weights in another program's form; give its MLX version's config.json")
    try:
        with random_state_kept():
            return _built(copy.deepcopy(config), dtype, stored)
    except Exception as e:  # a model's code may raise anything on an unexpected configuration
        raise UnsupportedModelError(f"{folder}: mlx-lm makes no model of its config.json: {one_line_of(e)}") from e


def _built(config: dict[str, Any], dtype: mx.Dtype, stored: dict[str, Any] | None) -> list[tuple[str, mx.array]]:
    model_class, args_class = classes_of(config)
    arguments: Any = args_class
    model = model_class(arguments.from_dict(config))
    keeps = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if keeps(path) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if stored is not None:
        usual = getattr(model, "quant_predicate", None) or (lambda path, module: True)

        def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if path in stored:
                found: bool | dict[str, Any] = stored[path]
                return found
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % stored["group_size"]:
                return False
            chosen: bool | dict[str, Any] = usual(path, module)
            return chosen

        mode = stored.get("mode", "affine")
        nn.quantize(model, stored["group_size"], stored["bits"], mode=mode, class_predicate=how)
    return list(tree_flatten(model.parameters()))
