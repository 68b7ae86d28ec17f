"""What a conversion makes of a model: its jobs, without computing anything.

``mlx_lm.convert`` itself decides, on arrays that are never evaluated: it gets a model that was opened lazily, and where
it would save, the shapes of its arrays are looked at. A job makes some parameters from one source, some rows at a
time: casting and quantizing need no more at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from outcore.checkpoint.lazy_model import DTYPES, one_line_of, open_lazily
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.errors import CheckpointError, OutcoreError, UsageError


@dataclass(frozen=True)
class Source:
    """A parameter as mlx-lm loads it. ``held``: bytes in memory besides the rows; 0: read in parts. ``rows`` yields
    all rows in order, at most so many in one two-dimensional array, and can be called once."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    held: int
    rows: Callable[[int], Iterator[mx.array]]

    @property
    def row_bytes(self) -> int:
        return max(1, self.dtype.size * (self.shape[-1] if self.shape else 1))


def on_disk(info: TensorInfo) -> Source:
    return Source(DTYPES[info.dtype], info.shape, 0, partial(_read, info))


def computed(parts: list[mx.array], made: mx.array) -> Source:
    """An array that is computed, and stacked of ``parts``, one of which is in memory with what it is made of."""
    held = 2 * made.nbytes // max(1, len(parts))
    return Source(made.dtype, tuple(made.shape), held, partial(_compute, list(reversed(parts)), made.dtype))


def _read(info: TensorInfo, most: int) -> Iterator[mx.array]:
    columns, kind = info.shape[-1] if info.shape else 1, DTYPES[info.dtype]
    left, each = info.nbytes, most * columns * kind.size
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            while left:
                part = bytearray(min(each, left))
                view = memoryview(part)
                while view:
                    if not (found := file.readinto(view)):
                        raise CheckpointError(
                            f"{info.file}: {info.name!a}: {left} bytes are missing; download it again"
                        )
                    view = view[found:]
                left -= len(part)
                yield mx.array(np.frombuffer(part, np.uint8)).view(kind).reshape(-1, columns)
    except OSError as error:
        raise CheckpointError(f"{info.file}: {info.name!a}: cannot be read ({error.strerror})") from error


def _compute(parts: list[mx.array], kind: mx.Dtype, most: int) -> Iterator[mx.array]:
    while parts:
        part = parts.pop().astype(kind)
        mx.eval(part)
        yield from _split(part, most)


def _split(array: mx.array, most: int) -> Iterator[mx.array]:
    if array.ndim < 2:
        yield array.reshape(1, -1)
    elif (inside := prod(array.shape[1:-1])) > most:
        for i in range(array.shape[0]):
            yield from _split(array[i], most)
    else:
        count = max(1, most // max(1, inside))
        for i in range(0, array.shape[0], count):
            yield array[i : i + count].reshape(-1, array.shape[-1])


Stacks = dict[int, tuple[mx.array, list[mx.array]]]  # by id: what was stacked, and its parts


@contextmanager
def noting_stacks() -> Iterator[Stacks]:
    """Notes what ``mx.stack`` stacks along the first axis in this block, such as experts in ``sanitize``."""
    found: Stacks = {}
    stack = mx.stack

    def noting(arrays: Sequence[mx.array], *args: Any, **named: Any) -> mx.array:
        made = stack(parts := list(arrays), *args, **named)
        if (args[0] if args else named.get("axis", 0)) == 0 and made.ndim > 2:
            found[id(made)] = made, parts
        return made

    vars(mx)["stack"] = noting
    try:
        yield found
    finally:
        vars(mx)["stack"] = stack


def sources_of(
    parameters: Mapping[str, mx.array], origins: Mapping[str, TensorInfo], stacks: Stacks
) -> dict[str, Source]:
    def source(path: str, array: mx.array) -> Source:
        if path in origins:
            return on_disk(origins[path])
        return computed(stacks[id(array)][1] if id(array) in stacks else [array], array)

    return {path: source(path, array) for path, array in parameters.items()}


@dataclass(frozen=True)
class Settings:
    """Arguments of ``mlx_lm.convert`` by its own names."""

    quantize: bool = False
    q_group_size: int | None = None
    q_bits: int | None = None
    q_mode: str = "affine"
    dtype: str | None = None
    dequantize: bool = False
    quant_predicate: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.size * prod(self.shape)


@dataclass(frozen=True)
class Job:
    """Makes tensors, in the order of ``names``, from rows of its sources, which have equally many."""

    names: tuple[str, ...]
    sources: tuple[Source, ...]
    make: Callable[..., tuple[mx.array, ...]]

    def parts(self, nbytes: int) -> Iterator[tuple[mx.array, ...]]:
        most = max(1, nbytes // max(source.row_bytes for source in self.sources))
        for rows in zip(*(source.rows(most) for source in self.sources), strict=True):
            yield self.make(*rows)

    def needs(self, nbytes: int) -> int:
        """The bytes that it has in memory at most, with ``nbytes`` of each source's rows at a time."""
        return sum(source.held + 4 * max(nbytes, source.row_bytes) for source in self.sources)


@dataclass(frozen=True)
class Recipe:
    """All of a conversion: its tensors in mlx-lm's order, the number of parameters as mlx-lm counts, and config.json's
    content, in which ``vision_config`` may stay (``keep_vision``)."""

    tensors: list[Tensor]
    jobs: list[Job]
    parameters: int
    config: dict[str, Any]
    keep_vision: bool


@dataclass
class _Seen:
    """What is seen of a model on its way through ``mlx_lm.convert``, by path: where its parameters come from, their
    dtypes when quantizing or dequantizing began, and the modules that were quantized before."""

    sources: dict[str, Source] = field(default_factory=dict)
    kinds: dict[str, mx.Dtype] = field(default_factory=dict)
    packed: dict[str, nn.Module] = field(default_factory=dict)
    recipe: Recipe | None = None


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def recipe_of(checkpoint: Checkpoint, output: Path, settings: Settings) -> Recipe:
    """Finds what ``mlx_lm.convert`` would make of a model. Raises as ``convert`` does."""
    seen, trust = _Seen(), settings.trust_remote_code

    def load(*_: Any, **__: Any) -> tuple[nn.Module, None, dict[str, Any]]:
        load_tokenizer(checkpoint.folder, {"trust_remote_code": trust})  # refuses a bad one before any work
        with noting_stacks() as stacks:
            lazy = open_lazily(checkpoint, trust_remote_code=trust)
        seen.sources = sources_of(_parameters(lazy.model), lazy.origins, stacks)
        seen.packed = {path: module for path, module in lazy.model.named_modules() if "scales" in module}
        return lazy.model, None, lazy.config

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(model: nn.Module, *args: Any, **named: Any) -> Any:
            seen.kinds = {path: array.dtype for path, array in _parameters(model).items()}
            return function(model, *args, **named)

        return noting

    def save(_: Path, __: str, model: nn.Module, ___: None, config: dict[str, Any]) -> None:
        seen.recipe = _recipe(model, config, seen)
        # What a job computes must not stay in memory as another array's input.
        model.update(tree_map(lambda _: mx.array([]), model.parameters()))

    convert: Any = importlib.import_module("mlx_lm.convert")  # mlx_lm also has a function of that name
    quantizing = {name: noted(getattr(convert, name)) for name in ("quantize_model", "dequantize_model")}
    before = dict(vars(convert))
    vars(convert).update(load=load, save=save, **quantizing)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            convert.convert(str(checkpoint.folder), output, **vars(settings))
    except Exception as error:  # a model's code and MLX may raise anything
        if isinstance(error, OutcoreError):
            raise
        raise UsageError(f"{checkpoint.folder}: mlx-lm cannot convert it so: {one_line_of(error)}") from error
    finally:
        vars(convert).update(before)
    assert seen.recipe is not None
    gc.collect()
    return seen.recipe


def _recipe(model: nn.Module, config: dict[str, Any], seen: _Seen) -> Recipe:
    after, modules = _parameters(model), dict(model.named_modules())
    jobs: dict[str, Job] = {}
    for name, array in after.items():
        path, _, key = name.rpartition(".")
        if name not in jobs:
            found = None
            if key == "weight" and path in modules:
                found = _quantizing(path, modules[path], seen) or _dequantizing(path, modules[path], seen)
            job = found or _casting(name, array, seen.sources.get(name))
            jobs |= dict.fromkeys(job.names, job)
    tensors = [Tensor(name, array.dtype, tuple(array.shape)) for name, array in after.items()]
    each = list({id(job): job for job in jobs.values()}.values())
    keep_vision = "vision_tower" in getattr(model, "model", {})
    return Recipe(tensors, each, mlx_lm.utils.get_total_parameters(model), config, keep_vision)


_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)


def _quantizing(path: str, module: nn.Module, seen: _Seen) -> Job | None:
    """The job of a module that was quantized, if its class is one of those that quantize their weight as it is."""
    source = seen.sources.get(f"{path}.weight")
    if source is None or path in seen.packed or type(module) not in _QUANTIZED or "global_scale" in module:
        return None
    kind, names = (
        seen.kinds[f"{path}.weight"],
        [f"{path}.{key}" for key in ("weight", "scales", "biases") if key in module],
    )
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return Job(tuple(names), (source,), lambda rows: tuple(mx.quantize(rows.astype(kind), **how)))


def _dequantizing(path: str, after: nn.Module, seen: _Seen) -> Job | None:
    """The job of a module that was dequantized, if all of it lies on disk as it is used."""
    module = seen.packed.get(path)
    if module is None or "scales" in after:
        return None
    names = [f"{path}.{key}" for key in ("weight", "scales", "biases") if key in module]
    sources, kinds = tuple(seen.sources[name] for name in names), [seen.kinds[name] for name in names]
    how = module.group_size, module.bits, module.mode

    def make(*rows: mx.array) -> tuple[mx.array, ...]:
        weight, scales, *biases = (each.astype(kind) for each, kind in zip(rows, kinds, strict=True))
        return (mx.dequantize(weight, scales, biases[0] if biases else None, *how),)

    return Job((f"{path}.weight",), sources, make) if not any(source.held for source in sources) else None


def _casting(name: str, after: mx.array, source: Source | None) -> Job:
    """The job of a parameter that was copied or cast, or of which nothing is known but the array that computes it."""
    kind = after.dtype
    if source is None or source.shape != tuple(after.shape):
        source = computed([after], after)
    return Job((name,), (source,), lambda rows: (rows.astype(kind),))
