"""A low-bit copy of a model's layers that stays in memory and drafts for the model. It needs no second model, and works
with any architecture.

The copy shares embeddings, norms and the head with the model; if the head is streamed, the copy has a low-bit one. If
the model is quantized already, the copy takes the high bits of its codes (``stored_planes``), which guess better than
codes that are quantized a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.identity import identity_of_adapter
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.manifest import DRAFT, is_packed
from outcore.checkpoint.pack import Progress, pack_files
from outcore.checkpoint.packed_bytes import PackedFile, Pieces, packed_file
from outcore.checkpoint.packed_store import NON_LAYER, cached, open_packed
from outcore.engine.model_profile import ModelProfile
from outcore.errors import StoreError
from outcore.machine.cache_folder import keep
from outcore.machine.device import on_cpu
from outcore.machine.random_state import random_state_kept
from outcore.modules.layers import find_layers, named_modules, named_parameters
from outcore.modules.split_linear import split_rows
from outcore_packs.stored_planes import high_plane

from .nested_layers import coarsen, high_planes, nested_modules

# Group size of the copy's quantization where the model itself is not quantized (affinely).
GROUP_SIZE = 64

# Fraction of a layer's weights below which a matrix (a router, a gate) keeps its own precision.
SMALL = 1 / 64


@dataclass(frozen=True)
class LowBitCopy:
    """A copy in the cache that exists or is still to be written.

    Attributes:
        folder: in the cache, or inside a packed copy of the model.
        files: one for each layer, and one for a streamed head. ``sizes``: bytes of memory that each takes.
        bits: of the copy's weights. ``heads``: paths of the head tables of which it has low-bit ones.
        elsewhere: weights of the copy that are read from the model's own files, by path.
    """

    folder: Path
    files: tuple[PackedFile, ...]
    sizes: tuple[int, ...]
    bits: int
    heads: tuple[str, ...]
    elsewhere: Mapping[str, TensorInfo] = field(default_factory=dict)

    def nbytes(self, head_streamed: bool) -> int:
        """Returns the bytes of memory that the copy takes in addition to the model."""
        sizes = zip(self.files, self.sizes, strict=True)
        return sum(nbytes for file, nbytes in sizes if head_streamed or file.unit != NON_LAYER)


def low_bit_copy(profile: ModelProfile, bits: int, plain: LazyModel | None = None) -> LowBitCopy:
    """Describes the copy with ``bits`` bits, without reading weights or writing anything. ``plain``: the model before
    its layers were nested; None: they are not."""
    heads = tuple(t.layer.path for t in profile.tables if t.multiplied)
    model = _shapes(profile.lazy, plain or profile.lazy, bits, heads)
    layers = find_layers(model)
    files, sizes, there = [], [], high_planes(profile.lazy)
    cut = {path: module.high for path, module in nested_modules(profile.lazy.model)}
    shared = tuple(f"{t.layer.path}." for t in profile.tables if t.looked_up and not t.multiplied)
    for i, layer in enumerate(layers):
        arrays = {f"{layer.path}.{path}": a for path, a in named_parameters(layer.module)}
        arrays = {path: a for path, a in arrays.items() if not path.startswith(shared)}
        # If codes are cut into high and low bits, the copy has only the high ones and shares the layer's other arrays.
        own = {p: a for p, a in arrays.items() if p.rpartition(".")[0] in cut and p.endswith((".weight", ".scales"))}
        name, wanted = f"layer_{i:04}.safetensors", own or arrays
        sizes.append(_in_memory(profile, packed_file(name, layer.path, wanted)))
        files.append(packed_file(name, layer.path, {p: a for p, a in wanted.items() if p not in there}))
    inside = tuple(f"{path}." for path in heads)
    rest = {path: a for path, a in named_parameters(model) if path.startswith(inside)} if heads else {}
    if rest:
        files.append(packed_file(f"{NON_LAYER}.safetensors", NON_LAYER, rest))
        sizes.append(_in_memory(profile, files[-1]))
    checkpoint, arguments = profile.lazy.checkpoint, profile.lazy.arguments
    folder = checkpoint.folder / f"{DRAFT}-{bits}bit"
    adapter = arguments.get("adapter_path")
    if not is_packed(checkpoint.folder) or adapter:
        adapted = identity_of_adapter(Path(adapter)) if adapter else None
        key = (
            arguments.get("model_config") or {},
            adapted,
            bits,
            GROUP_SIZE,
            "high bits, the model's biases",
            max(cut.values(), default=0),
        )
        folder = cached(DRAFT, checkpoint, *key)
    return LowBitCopy(folder, tuple(files), tuple(sizes), bits, heads, there)


def _in_memory(profile: ModelProfile, file: PackedFile) -> int:
    found = 0
    for path, dtype, shape in file.tensors:
        found += prod(shape) * (profile.cast.target(path, dtype) or dtype).size
    return found


def write_copy(profile: ModelProfile, draft: LowBitCopy, progress: Progress | None = None) -> None:
    """Writes the copy to the cache unless it is there completely; needs memory for about one layer.

    Raises:
        StoreSpaceError: the disk is too full; finished files stay.
        StoreError: the copy cannot be written.
    """

    def pieces() -> Pieces:
        return dict(tree_flatten(_low_bit(profile.lazy, draft.bits, draft.heads).parameters()))

    keep(draft.folder, profile.lazy.model)
    pack_files(DRAFT, draft.folder, profile.lazy.checkpoint, draft.files, draft.files, pieces, progress)


def load_copy(profile: ModelProfile, draft: LowBitCopy, head_streamed: bool, cpu_streams: int) -> nn.Module:
    """Returns the copy as a model with its weights in memory; arrays outside of layers are the base model's.

    Args:
        profile: of the base model, which is loaded.
        head_streamed: whether the base model's head is not in memory.
    """
    copy = _low_bit(profile.lazy, draft.bits, draft.heads if head_streamed else ())
    store = open_packed(draft.folder)
    weights: dict[str, mx.array] = {}
    for file in store.files:
        if head_streamed or file.stem != NON_LAYER:
            loaded: Any = mx.load(str(file))
            for path in loaded.keys() & store.tensors.keys():
                to = profile.cast.target(path, loaded[path].dtype)
                weights[path] = loaded[path] if to is None else loaded[path].astype(to)
    mx.eval(list(weights.values()))
    weights |= {path: _words(place) for path, place in draft.elsewhere.items()}
    copy.load_weights(list(weights.items()), strict=False)
    _share(profile, copy, weights, head_streamed)
    if on_cpu():
        split_rows(copy, cpu_streams)
    return copy


def _words(place: TensorInfo) -> mx.array:
    rows, words = place.shape
    try:
        return mx.array(np.fromfile(place.file, "<u4", rows * words, offset=place.offset).reshape(rows, words))
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise StoreError(f"{place.file}: {place.name!a} cannot be read ({error}); check the disk") from error


def _share(profile: ModelProfile, copy: nn.Module, own: Mapping[str, mx.array], head_streamed: bool) -> None:
    """Makes the copy use the model's arrays where it has none, and the model's modules that look up rows on disk."""
    for table in profile.tables:
        if table.looked_up and not table.multiplied:
            _replace(copy, table.layer.path, table.layer.module)
    places = dict(named_modules(copy))
    # Not in layers if ranks share the model: the copy has all their arrays, and the model none of other ranks' layers.
    layers = () if profile.share is None else tuple(f"{layer.path}." for layer in profile.share.layers)
    for path, module in named_modules(profile.lazy.model):
        for key, value in module.items():
            name = f"{path}.{key}" if path else key
            if name.startswith(layers):
                continue
            if isinstance(value, mx.array) and path in places and key in places[path] and name not in own:
                dict.__setitem__(places[path], key, value)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    *parents, key = path.split(".")
    at: Any = model
    for parent in parents:
        at = at[int(parent)] if isinstance(at, list) else at[parent]
    at[int(key) if isinstance(at, list) else key] = module


def copied(model: nn.Module) -> nn.Module:
    """Returns a copy of the model that shares its arrays. Replacing modules or arrays in the copy leaves the model
    unchanged."""
    copy: nn.Module = _copied(model, {})
    return copy


def _copied(value: Any, made: dict[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        if (new := made.get(id(value))) is None:
            new = made[id(value)] = dict.__new__(type(value))
            new.__dict__.update(value.__dict__)
            for key, inside in value.items():
                dict.__setitem__(new, key, _copied(inside, made))
        return new
    if isinstance(value, list):
        return [_copied(inside, made) for inside in value]
    return {key: _copied(inside, made) for key, inside in value.items()} if type(value) is dict else value


def _shapes(lazy: LazyModel, plain: LazyModel, bits: int, heads: Sequence[str]) -> nn.Module:
    """As ``_low_bit``, but only for shapes. Made from the lazy arrays of ``plain`` if possible, as opening the model
    again is slow."""
    if any(nested_modules(plain.model)) or hasattr(plain.model, "outcore"):
        return _low_bit(lazy, bits, heads)
    with random_state_kept():
        cut = {path for path, _ in nested_modules(lazy.model)}
        return _quantized_layers(copied(plain.model), bits, heads, cut)


def _low_bit(lazy: LazyModel, bits: int, heads: Sequence[str]) -> nn.Module:
    """Opens the model again and quantizes its layers and the tables ``heads`` lazily. Keeps the caller's random
    state."""
    with random_state_kept():
        cut = {path for path, _ in nested_modules(lazy.model)}
        return _quantized_layers(lazy.again().model, bits, heads, cut)


def _quantized_layers(model: nn.Module, bits: int, heads: Sequence[str], cut: Collection[str]) -> nn.Module:
    for layer in find_layers(model):
        nbytes = sum(a.nbytes for _, a in named_parameters(layer.module))
        inside = [m for path, m in named_modules(layer.module) if f"{layer.path}.{path}" in cut]
        for module in inside:
            coarsen(module, bits)
        if inside:
            continue
        modules = {path: m for path, m in named_modules(layer.module) if _nbytes(m) >= SMALL * nbytes}
        for path, module in modules.items():
            _replace(layer.module, path, _quantized(module, bits))
    modules = dict(named_modules(model))
    for path in heads:
        _replace(model, path, _quantized(modules[path], bits))
    return model


def _nbytes(module: nn.Module) -> int:
    if not hasattr(module, "to_quantized") and "scales" not in module:
        return 0
    return sum(a.nbytes for a in module.values() if isinstance(a, mx.array))


def _quantized(module: Any, bits: int) -> nn.Module:
    """Returns the module with ``bits`` bits; unchanged if it has no more, or if new groups do not fit its rows.

    Affine codes are cut to their high bits. With 2 of 4 bits (28M parameters), the model would have written 83 % of the
    drafted tokens in code and 76 % in prose; with codes that were quantized a second time, 76 and 67 %.
    """
    if hasattr(module, "to_quantized"):
        fits = module.weight.shape[-1] % GROUP_SIZE == 0
        return module.to_quantized(group_size=GROUP_SIZE, bits=bits) if fits else module
    if module.bits <= bits or "global_scale" in module:
        return module
    if module.mode == "affine":
        high = high_plane(module.weight, module.scales, module.biases, module.bits, bits)
        module.weight, module.scales, module.biases = high
        module.bits = bits
        return module
    weight = mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
    )
    if weight.shape[-1] % GROUP_SIZE:
        return module
    module.weight, module.scales, module.biases = mx.quantize(weight, GROUP_SIZE, bits)
    module.group_size, module.bits, module.mode = GROUP_SIZE, bits, "affine"
    return module
