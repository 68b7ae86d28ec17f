"""Tiny random models of every architecture in mlx-lm, to test against.

``CONFIGS`` has one ``config.json`` dictionary for each module of ``mlx_lm.models`` that has a ``Model``. The models
have a few hundred thousand parameters, yet every kind of layer their architecture knows (full, sliding and linear
attention, dense and expert MLPs, recurrent blocks, layers sharing keys and values) occurs, and the windows are shorter
than a short prompt. Dimensions that a matrix multiplication sums over are multiples of 64 where the architecture
permits, so that the models can be quantized with groups of 64.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model, save_config

from zoo_configs import CONFIGS, NOT_CONSTRUCTIBLE, NOT_ON_CPU, RUNNABLE

__all__ = ["CONFIGS", "NOT_CONSTRUCTIBLE", "NOT_ON_CPU", "RUNNABLE", "build", "make_weights", "save_checkpoint"]


def build(model_type: str, seed: int | None = 0) -> nn.Module:
    """A tiny model of the type, with random weights; without a seed with mlx-lm's own, which are not computed."""
    config = copy.deepcopy(CONFIGS[model_type])
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.eval()
    if seed is None:
        return model
    make_weights(model, seed)
    if hasattr(model, "sanitize"):  # as at loading: some normalize the output layer there
        model.load_weights(list(model.sanitize(dict(tree_flatten(model.parameters()))).items()))
    return model


def make_weights(model: nn.Module, seed: int = 0) -> None:
    """Give the model random parameters at which no layer saturates: equal ones for equal seeds, float32 but for packs.

    Matrices keep the variance of what they multiply; norms are near one and biases near zero.
    """
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = [(path, _draw(path, old, key)) for (path, old), key in zip(parameters, keys, strict=True)]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())


def _draw(path: str, old: mx.array, key: mx.array) -> mx.array:
    """A random parameter of the shape and type of the old one."""
    name = path.rpartition(".")[2]
    if not mx.issubdtype(old.dtype, mx.floating):  # packed integers
        return mx.random.randint(0, 256, (*old.shape[:-1], old.shape[-1] * old.itemsize), mx.uint8, key).view(old.dtype)
    if name == "A_log":
        return mx.log(mx.random.uniform(1.0, 16.0, old.shape, key=key))
    noise = mx.random.normal(old.shape, key=key)
    if name == "signs":
        return mx.where(noise < 0, -1.0, 1.0)
    if name in ("scales", "biases"):
        return (0.03 * noise).astype(old.dtype)
    if old.ndim < 2:
        return 0.1 * noise + (1.0 if (old.mean() > 0.5).item() else 0.0)
    fan_in = old[0].size if "conv" in path else old.shape[-1]
    return noise * fan_in**-0.5


def save_checkpoint(
    model_type: str,
    folder: Path,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    quantize: dict[str, Any] | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Write what ``mlx_lm.convert`` would have written for ``build(model_type, seed)``, and return the folder.

    With ``KEPT`` it is made once in a run and then copied, and MLX's random state goes on as if it had been made again.

    ``quantize`` has the ``bits``, ``group_size``, ``mode`` and ``global_scale``; as in mlx-lm, layers whose width the
    group size does not divide stay as they are, and models may want other bits for some layers. With ``shard_bytes``
    the weights are spread over files of about that size.
    """
    if KEPT is None:
        return _save(model_type, folder, seed, dtype, quantize, shard_bytes)
    key = repr((model_type, CONFIGS[model_type], seed, dtype, quantize, shard_bytes, mx.default_device()))
    kept = KEPT / hashlib.sha256(key.encode()).hexdigest()[:32]
    if kept.exists():
        for _ in range(int((kept / DRAWS).read_text())):
            mx.random.uniform()
    else:
        made, before = Path(tempfile.mkdtemp(dir=KEPT)), cast(Any, mx.random.state)[0]
        _save(model_type, made, seed, dtype, quantize, shard_bytes)
        (made / DRAWS).write_text(str(_draws(before, cast(Any, mx.random.state)[0])))
        with contextlib.suppress(OSError):  # another process was first
            made.rename(kept)
    folder.mkdir(parents=True, exist_ok=True)
    for file in kept.iterdir():
        if file.name != DRAWS:
            shutil.copyfile(file, folder / file.name)
    return folder


KEPT: Path | None = None
"""A folder for what ``save_checkpoint`` has made, in any process of a run."""

DRAWS = "draws"
"""A file beside a checkpoint: how often making it draws from MLX's random state."""


def _draws(before: mx.array, after: mx.array) -> int:
    """How often random numbers were drawn between two states."""
    for count in range(10_000):
        if mx.array_equal(before, after).item():
            return count
        before = mx.random.split(before)[0]
    raise AssertionError("a seed was set")


def _save(
    model_type: str,
    folder: Path,
    seed: int,
    dtype: mx.Dtype,
    quantize: dict[str, Any] | None,
    shard_bytes: int | None,
) -> Path:
    model = build(model_type, seed)
    config = copy.deepcopy(CONFIGS[model_type])
    to_cast = getattr(model, "cast_predicate", lambda _: True)
    weights = tree_flatten(model.parameters())
    model.update(tree_unflatten([(k, v.astype(dtype)) for k, v in weights if v.dtype == mx.float32 and to_cast(k)]))
    if quantize is not None:
        wanted = getattr(model, "quant_predicate", None) or (lambda path, module: True)
        with contextlib.redirect_stdout(None):
            model, config = quantize_model(
                model,
                config,
                quantize.get("group_size"),
                quantize.get("bits"),
                quantize.get("mode", "affine"),
                quantize.get("global_scale", False),
                quant_predicate=lambda path, module: _takes_mode(module) and wanted(path, module),
            )

    shards: list[dict[str, mx.array]] = [{}]
    for path, array in tree_flatten(model.parameters()):
        if shard_bytes is not None and shards[-1] and array.nbytes + _nbytes(shards[-1]) > shard_bytes:
            shards.append({})
        shards[-1][path] = array
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
        files.update(dict.fromkeys(shard, name))
    index = {"metadata": {"total_size": sum(map(_nbytes, shards))}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    save_config(config, folder / "config.json")
    return folder


def _takes_mode(module: nn.Module) -> bool:
    """Whether nn.quantize can quantize the module: it passes a mode, which the fused layers of afm7 do not take."""
    return "mode" in inspect.signature(module.to_quantized).parameters


def _nbytes(shard: dict[str, mx.array]) -> int:
    return sum(array.nbytes for array in shard.values())
