"""Opens a model without reading its weights, and finds which parameters lie on disk exactly as they are used.

mlx-lm builds the model from lazy arrays, with a model class that records what enters ``sanitize``. A parameter of the
finished model that is the same object as a loaded array lies unchanged at a known place of a file. Every other one was
made by ``sanitize`` (split, stacked, shifted, dequantized) and exists nowhere on disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils

from ..errors import CheckpointError, OutcoreError, UnsupportedModelError
from ..machine.random_state import random_state, random_state_kept
from ..modules.layers import named_parameters
from ..modules.mlx_lm_compat import MODEL_TYPES, classes_of
from ..packages import modules
from ..text import one_line
from .checkpoint import ADAPTER, CONFIG, Checkpoint, LiteralFolder, TensorInfo, check_files, read_config, read_header

# safetensors dtype names → the dtypes in which MLX loads them
DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64,
    "I8": mx.int8, "I16": mx.int16, "I32": mx.int32, "I64": mx.int64, "C64": mx.complex64,
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip


class Decoder(Protocol):
    """Decodes one tensor of a packed copy. ``nbytes``: bytes of its side table, which is in memory."""

    @property
    def nbytes(self) -> int: ...

    def decode(self, stored: mx.array) -> mx.array: ...


@dataclass(frozen=True)
class LazyModel:
    """A model whose weights have not been read.

    Attributes:
        origins: parameter path → tensor on disk, for every parameter that ``sanitize`` left unchanged.
        loaded: paths of all parameters that come from the checkpoint (not from an adapter).
        arguments: those of ``open_lazily``.
        again: opens the same model once more, without ``reshape``.
        coding: ``plain``, or the packed copy's (``manifest.CODING``).
        decoders: by parameter path, for tensors that a packed copy stores encoded.
        reshape: makes the changes to a newly opened model that a draft source made to this one's layers; None: none.
        random_after: MLX's random state after mlx-lm has built the model: modules draw their initial weights.
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
        weights: lazy arrays of the checkpoint's tensors; the call empties the dict. None: mlx-lm loads the folder's.

    Raises:
        UnsupportedModelError: mlx-lm does not know the model type, or remote code is not allowed.
        CheckpointError: mlx-lm could not build the model from these files.
    """
    if model_config is not None and model_config.get("model_file") is not None:
        raise UnsupportedModelError("model_config: model_file is taken from the model's own config.json; put it there")
    folder = checkpoint.folder
    own_code = _own_code(folder, read_config(folder, len(checkpoint.tensors)), trust_remote_code)
    loaded: dict[int, tuple[str, mx.array]] = {}
    classes: list[type[nn.Module]] = []

    def get_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = _classes(folder, config, own_code)
        classes[:] = [model_class]
        return _recording(model_class, loaded, weights), args_class

    def load(model_config: dict[str, Any] | None) -> Any:
        return mlx_lm.utils.load_model(
            LiteralFolder(folder),
            lazy=True,
            # mlx-lm does not find a packed copy's files by their names; `sanitize` receives their weights instead.
            strict=weights is None,
            # With model_file, mlx-lm would import the model's own code itself and not call get_classes.
            model_config=model_config if own_code is None else {**(model_config or {}), "model_file": None},
            get_model_classes=get_classes,
            trust_remote_code=trust_remote_code,
        )

    with random_state_kept():
        (model, config), model_config = _by_either(folder, load, model_config, own_code)
        model.__class__ = classes[0]
        parameters = named_parameters(model)
        names = {id(a): _name_on_disk(a, loaded.get(id(a)), checkpoint.tensors) for _, a in parameters}
        loaded.clear()
        if weights is not None:
            # The recording class lives until garbage collection and would keep the undecoded arrays in memory.
            weights.clear()
        if adapter_path is not None:
            if (adapter := Path(adapter_path)).is_dir():  # if not, mlx-lm says what is missing
                check_files(adapter)
                if (adapter / ADAPTER).exists():
                    read_header(adapter / ADAPTER)
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


def _by_either(
    folder: Path, load: Callable[[Any], Any], model_config: dict[str, Any] | None, own_code: Path | None
) -> tuple[Any, dict[str, Any] | None]:
    """Return what ``load`` makes of the configuration, and the latter. A package's library may have written weights of
    a type that mlx-lm knows by other names: unless it is fixed who makes the model, packages try after mlx-lm."""
    try:
        return _wrap(folder, partial(load, model_config)), model_config
    except CheckpointError:
        fixed = own_code is not None or MODEL_TYPES in (model_config or {})
        for name in [] if fixed else modules("model_types"):
            named = {**(model_config or {}), MODEL_TYPES: name}
            with suppress(OutcoreError):
                return _wrap(folder, partial(load, named)), named
        raise


def _own_code(folder: Path, config: dict[str, Any], trusted: bool) -> Path | None:
    """Return the Python file that config.json names as the model's own architecture, or None."""
    name = config.get("model_file")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder / CONFIG}: model_file {str(name)[:100]!r} must be a file name without a folder")
    if not trusted:
        what = f"needs {name}, code of its own, to run; allow it with --trust-remote-code if you trust the model"
        raise UnsupportedModelError(f"{folder}: {what}")
    return folder / name


def _classes(folder: Path, config: dict[str, Any], file: Path | None) -> tuple[type[nn.Module], type]:
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
        # mlx-lm runs with strict=False so that it does not look for its own files; the weights must still be complete.
        return model_class.load_weights(self, found, strict=True)

    members: dict[str, Any] = {"sanitize": sanitize, "__module__": model_class.__module__}
    if weights is not None:
        members["load_weights"] = load_weights
    return type(model_class.__name__, (model_class,), members)


def _name_on_disk(array: mx.array, entry: tuple[str, mx.array] | None, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the name on disk of the tensor that ``array`` was loaded from; None if ``sanitize`` made or changed it."""
    if entry is None or entry[0] not in tensors:
        return None
    info = tensors[entry[0]]
    # ``sanitize`` may have assigned to the array in place, so at least its shape and dtype must match.
    same = entry[1] is array and info.shape == tuple(array.shape) and DTYPES[info.dtype] == array.dtype
    return info.name if same else None


def _wrap(where: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except OutcoreError:
        raise
    except Exception as e:  # a model's code may raise anything on an unexpected configuration
        raise CheckpointError(f"{where}: mlx-lm could not make a model from it: {one_line_of(e)}") from e


def one_line_of(error: BaseException) -> str:
    known = isinstance(error, ValueError | RuntimeError | OSError | ImportError)
    return one_line(error) if known else f"{type(error).__name__} {one_line(error)}"
