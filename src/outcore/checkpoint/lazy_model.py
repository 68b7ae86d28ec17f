"""Opening a model without reading its weights, and knowing which of its parameters lie on disk as they are used.

mlx-lm builds the model from lazy arrays; a model class handed to it records what enters ``sanitize``. A parameter of
the finished model that is the very object that was loaded lies unchanged at a known place of a file; any other was
made by ``sanitize`` (split, stacked, shifted, dequantized) and exists nowhere on disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils

from ..errors import CheckpointError, OutcoreError, UnsupportedModelError
from ..machine.random_state import random_state, random_state_kept
from ..modules.mlx_lm_compat import classes_of
from ..modules.module_tree import named_parameters
from ..text import one_line
from .checkpoint import ADAPTER, Checkpoint, TensorInfo, read_header
from .config import CONFIG, LiteralFolder, check_files, read_config

DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64,
    "I8": mx.int8, "I16": mx.int16, "I32": mx.int32, "I64": mx.int64, "C64": mx.complex64,
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""safetensors dtype names → the dtype in which MLX loads them."""


class Decoder(Protocol):
    """What knows how one tensor is put together that is stored in another form than it is used in."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds in memory."""

    def decode(self, stored: mx.array) -> mx.array:
        """The tensor, not evaluated."""


@dataclass(frozen=True)
class LazyModel:
    """A model none of whose weights has been read.

    Attributes:
        origins: parameter path → the tensor on disk that it is, for every parameter that ``sanitize`` left alone.
        loaded: paths of all parameters that came from the checkpoint (an adapter's did not).
        arguments: of ``open_lazily``. ``again``: opens the same model once more, with layers as they are on disk.
        coding: how its tensors are stored (``manifest``).
        decoders: of tensors that are stored in another form than they are used in, by their names.
        reshape: changes a model that was opened anew as what drafts for this one changed its layers; None: nothing did.
        random_after: the state that MLX's random numbers are in when mlx-lm has made the model, whose modules draw
            their first weights.
    """

    model: nn.Module
    config: dict[str, Any]
    checkpoint: Checkpoint
    origins: dict[str, TensorInfo]
    loaded: frozenset[str]
    arguments: dict[str, Any] = field(repr=False)
    again: Callable[[], LazyModel] = field(repr=False)
    coding: str = "plain"
    decoders: Mapping[str, Decoder] = field(default_factory=dict, repr=False)
    reshape: Callable[[LazyModel], LazyModel] | None = field(default=None, repr=False)
    random_after: int = field(default=0, repr=False)


def open_lazily(
    checkpoint: Checkpoint,
    *,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
    weights: dict[str, mx.array] | None = None,
) -> LazyModel:
    """Build the model with mlx-lm from lazy arrays. The caller's random state stays as it is.

    Args:
        weights: lazy arrays of the checkpoint's tensors, which are taken out; None: mlx-lm loads the folder's own.

    Raises:
        UnsupportedModelError: a model type that mlx-lm does not know, or remote code that is not allowed.
        CheckpointError: mlx-lm could not make the model from these files.
    """
    if model_config is not None and model_config.get("model_file") is not None:
        raise UnsupportedModelError("model_config: model_file is taken from the model's own config.json; put it there")
    folder = checkpoint.folder
    own_code = _own_code(folder, read_config(folder, len(checkpoint.tensors)), trust_remote_code)
    loaded: dict[int, tuple[str, mx.array]] = {}
    classes: list[type[nn.Module]] = []

    def get_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = _classes(folder, config, own_code)
        classes.append(model_class)
        return _recording(model_class, loaded, weights), args_class

    def load() -> Any:
        return mlx_lm.utils.load_model(
            LiteralFolder(folder),
            lazy=True,
            # A packed copy's files have other names than mlx-lm looks for; then `sanitize` is handed its weights.
            strict=weights is None,
            # mlx-lm would import a model's own code by itself, and then not ask for a class.
            model_config=model_config if own_code is None else {**(model_config or {}), "model_file": None},
            get_model_classes=get_classes,
            trust_remote_code=trust_remote_code,
        )

    with random_state_kept():
        model, config = _wrap(folder, load)
        model.__class__ = classes[0]
        parameters = named_parameters(model)
        names = {id(a): _name_on_disk(a, loaded.get(id(a)), checkpoint.tensors) for _, a in parameters}
        loaded.clear()
        if weights is not None:
            # The class that recorded them lives until garbage is collected; cut into planes, they would be there twice.
            weights.clear()
        if adapter_path is not None:
            _check_adapter(Path(adapter_path))
            model = _wrap(Path(adapter_path), lambda: mlx_lm.utils.load_adapters(model, adapter_path))
            model.eval()
        random_after = random_state()
    # Where adapters wrap a module, its parameters have moved to longer paths.
    found = {path: names[id(a)] for path, a in named_parameters(model) if id(a) in names}
    origins = {path: checkpoint.tensors[name] for path, name in found.items() if name is not None}
    arguments: dict[str, Any] = {
        "model_config": model_config, "trust_remote_code": trust_remote_code, "adapter_path": adapter_path,
    }  # fmt: skip
    again = partial(open_lazily, checkpoint, **arguments)
    return LazyModel(model, config, checkpoint, origins, frozenset(found), arguments, again, random_after=random_after)


def _check_adapter(folder: Path) -> None:
    """Refuse an adapter whose files mlx-lm cannot be let open."""
    if folder.is_dir():  # mlx-lm tells what is missing
        check_files(folder)
        if (folder / ADAPTER).exists():
            read_header(folder / ADAPTER)


def _own_code(folder: Path, config: dict[str, Any], trusted: bool) -> Path | None:
    """The Python file that config.json names as the model's own architecture, if it names one."""
    name = config.get("model_file")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder / CONFIG}: model_file {str(name)[:100]!r} is no plain file name")
    if not trusted:
        what = f"needs {name}, code of its own, to run; allow it with --trust-remote-code if you trust the model"
        raise UnsupportedModelError(f"{folder}: {what}")
    return folder / name


def _classes(folder: Path, config: dict[str, Any], file: Path | None) -> tuple[type[nn.Module], type]:
    """A model's class and that of its arguments: mlx-lm's, or those of its own code, which the config names then."""
    if file is None:
        try:
            return classes_of(config)
        except ValueError as e:
            raise UnsupportedModelError(f"{folder}: {one_line_of(e)}") from e
    config["model_file"] = file.name
    spec = importlib.util.spec_from_file_location("custom_model", file)
    if spec is None or spec.loader is None:
        raise CheckpointError(f"{file}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


def _recording(
    model_class: type[nn.Module], loaded: dict[int, tuple[str, mx.array]], weights: dict[str, mx.array] | None
) -> type[nn.Module]:
    original: Callable[..., dict[str, mx.array]] | None = getattr(model_class, "sanitize", None)

    def sanitize(self: nn.Module, found: dict[str, mx.array]) -> dict[str, mx.array]:
        found = found if weights is None else dict(weights)
        loaded.update({id(a): (name, a) for name, a in found.items()})
        return found if original is None else original(self, found)

    def load_weights(self: nn.Module, found: Any, strict: bool = True) -> nn.Module:
        # mlx-lm was told not to be strict, or it would miss its own files; what it is handed must still be complete.
        return model_class.load_weights(self, found, strict=True)

    members: dict[str, Any] = {"sanitize": sanitize, "__module__": model_class.__module__}
    if weights is not None:
        members["load_weights"] = load_weights
    return type(model_class.__name__, (model_class,), members)


def _name_on_disk(array: mx.array, entry: tuple[str, mx.array] | None, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The tensor that a parameter is, unchanged; None: ``sanitize`` made it."""
    if entry is None or entry[0] not in tensors:
        return None
    info = tensors[entry[0]]
    # The same object could have been assigned to in place; its shape and dtype are the least it must have kept.
    same = entry[1] is array and info.shape == tuple(array.shape) and DTYPES[info.dtype] == array.dtype
    return info.name if same else None


def _wrap(where: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except OutcoreError:
        raise
    except Exception as e:  # whatever a model's code raises on a configuration that it does not expect
        raise CheckpointError(f"{where}: mlx-lm could not make a model of it: {one_line_of(e)}") from e


def one_line_of(error: BaseException) -> str:
    known = isinstance(error, ValueError | RuntimeError | OSError | ImportError)
    return one_line(error) if known else f"{type(error).__name__} {one_line(error)}"
