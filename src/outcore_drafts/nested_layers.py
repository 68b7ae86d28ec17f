"""Models that read only the low bits of their weights, as a draft has the high bits in memory, until it is given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import DTYPES, LazyModel
from outcore.checkpoint.manifest import PLANES
from outcore.checkpoint.packed_store import open_again, open_copy
from outcore.decode.opening import Opening
from outcore.engine.layer_sizes import on_cuda_size, weighed
from outcore.engine.model_profile import LayerParts, ModelProfile
from outcore.errors import UnsupportedModelError
from outcore.machine.device import on_cuda
from outcore.modules.layers import Layer, Parameter, find_layers, named_modules
from outcore.plan.partition import LayerSize
from outcore_packs.stored_planes import Planes, cut_modules, high_plane, joined, low_plane, middle

# The parameter that is read from disk.
LOW = "low"

# Bytes of codes that are cut at a time when memory is short; meanwhile cutting takes 7 to 24 times as many bytes.
CUT_BYTES = 1 << 17


class CoarseLinear(nn.QuantizedLinear):
    """A draft's linear layer: has the high bits of a model's codes, or all bits if the model's layer stays in memory.

    ``weight`` and ``scales`` (the model's times 2 ** number of low bits) are its own. ``biases`` are the model's; those
    of the high bits are computed from them in each call, so that nothing is in memory twice.

    Attributes:
        all_bits: bits of the model's codes.
    """

    all_bits: int

    def __call__(self, x: mx.array) -> mx.array:
        rows: Any = self.__dict__.get("_outcore_rows")
        out = self._part(x, None) if rows is None else rows.product(self["biases"].shape[0], lambda s: self._part(x, s))
        return out + self["bias"] if "bias" in self else out

    def _part(self, x: mx.array, rows: slice | None) -> mx.array:
        arrays = self.whole(rows)
        return mx.quantized_matmul(
            x, *arrays, transpose=True, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    @property
    def outcore_split(self) -> tuple[int, int]:
        """Numbers of rows and of weights, for ``split_rows``."""
        return self["biases"].shape[0], self["biases"].size * self.group_size

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Returns the words, scales and biases to multiply with, of all rows or some; not evaluated."""
        words, scales, biases = self._own(rows)
        low = self.all_bits - self.bits
        return words, scales, middle(scales, biases, low) if low else biases

    def _own(self, rows: slice | None) -> list[mx.array]:
        arrays = [self["weight"], self["scales"], self["biases"]]
        return arrays if rows is None else [a[rows] for a in arrays]


class NestedLinear(CoarseLinear):
    """A ``QuantizedLinear`` that reads only low bits; codes are joined in each call, or once if they stay in memory.

    Its parameters are ``low``, uint32 (rows, n * low / 32), the low bits of the codes, ``biases``, and ``bias`` if any.
    The high bits and scales are in ``coarse``, the draft's module; until that is shared the output is NaN. Once all
    codes stay in memory (``settle``) they are the draft's weight, too, and ``low`` is empty.

    Attributes:
        high: bits of each code that the draft has in memory.
        nbytes: as in ``Decoder``; this module is the decoder of its low bits.
    """

    outcore_streamed = (LOW,)
    high: int
    nbytes = 0

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Returns words, scales and biases as the original ``QuantizedLinear`` has them."""
        low, biases, coarse = self[LOW], self["biases"], self.coarse
        if rows is not None:
            biases, low = biases[rows], low if self.settled else low[rows]
        if coarse is None:
            shape = (*low.shape[:-1], low.shape[-1] // (self.bits - self.high) * self.bits)
            return mx.broadcast_to(low[..., :1], shape), biases * mx.nan, biases
        words, scales, _ = coarse._own(rows)
        if self.settled:
            return words, scales, biases
        # ``low`` may hold all bits already (``decode``).
        if low.shape[-1] * 32 != biases.shape[-1] * self.group_size * self.bits:
            low = joined(words, low, self.bits, self.high)
        # Dividing by the power of two that the draft's scales were multiplied with is exact.
        return low, scales * 2 ** (self.high - self.bits), biases

    def decode(self, low: mx.array) -> mx.array:
        """As in ``Decoder``: joins the low bits in a slot to whole codes, once for all calls that use the slot."""
        coarse, rows = self.coarse, self.__dict__.get("_outcore_rows")
        if coarse is None or self.settled:
            return low
        words = coarse["weight"]
        if rows is None:
            return joined(words, low, self.bits, self.high)
        whole: mx.array = rows.product(low.shape[0], lambda s: joined(words[s], low[s], self.bits, self.high), axis=0)
        return whole

    @property
    def settled(self) -> bool:
        return self.coarse is not None and self.coarse.bits == self.bits

    def settle(self) -> None:
        """Joins the codes once, because ``low`` stays in memory. The whole codes become the draft's weights, too."""
        if (coarse := self.coarse) is None or self.settled or not self[LOW].size:
            return
        words, scales, _ = self.whole()
        mx.eval(words, scales)
        coarse.weight, coarse.scales, coarse.bits = words, scales, self.bits
        self[LOW] = mx.zeros((0,), mx.uint32)

    def unsettle(self) -> None:
        """Cuts the draft's weights to the high bits again; from then on ``low`` is read from disk."""
        if (coarse := self.coarse) is None or not self.settled:
            return
        arrays = coarse._own(None)
        step = max(1, CUT_BYTES // (arrays[0].shape[-1] * 4))
        parts: list[tuple[mx.array, mx.array]] = []
        for begin in range(0, arrays[0].shape[0], step):
            words, scales, biases = (a[begin : begin + step] for a in arrays)
            parts.append(high_plane(words, scales, biases, self.bits, self.high)[:2])
            mx.eval(parts[-1])
        words, scales = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
        mx.eval(words, scales)
        coarse.weight, coarse.scales, coarse.bits = words, scales, self.high

    def _extra_repr(self) -> str:
        rows, groups = self["biases"].shape
        sizes = f"input_dims={groups * self.group_size}, output_dims={rows}, group_size={self.group_size}"
        return f"{sizes}, bits={self.bits}, of them high={self.high}"

    @property
    def coarse(self) -> CoarseLinear | None:
        """The draft's module, which has this layer's high bits; None until ``share``. It is not in the module tree."""
        found: CoarseLinear | None = self.__dict__.get("_outcore_coarse")
        return found

    def share(self, coarse: CoarseLinear) -> None:
        self.__dict__["_outcore_coarse"] = coarse

    @property
    def joined_bytes(self) -> int:
        return int(self["biases"].size * self.group_size * self.bits // 8)


def nest(module: nn.QuantizedLinear, high: int) -> None:
    """Turns a quantized layer into a ``NestedLinear`` without the ``high`` highest bits of its codes."""
    low = low_plane(module.weight, module.bits, high)
    dict.__delitem__(module, "weight")
    dict.__delitem__(module, "scales")
    module[LOW] = low
    module.__dict__.update(high=high, all_bits=module.bits)
    module.__class__ = NestedLinear


def coarsen(module: nn.QuantizedLinear, high: int) -> None:
    """Turns a quantized layer into a ``CoarseLinear`` with the ``high`` highest bits of its codes."""
    module.__dict__["all_bits"] = module.bits
    module.weight, module.scales, _ = high_plane(module.weight, module.scales, module.biases, module.bits, high)
    module.bits = high
    module.__class__ = CoarseLinear


# The parameters of a draft's module that are not the model's.
KEYS = ("weight", "scales")


def nested(profile: ModelProfile, high: int, opening: Opening) -> ModelProfile:
    """Returns the model's profile with layers that read only low bits; the ``high`` high bits are the draft's. Returns
    ``profile`` itself if experts can be read one by one, if a layer's codes are used from outside, and in float16. Uses
    a cached copy that stores high and low bits apart, if there is one (not with mirrors of the original folder)."""
    o, size = opening.options, profile.size
    streamable = [each.streamable for each in size.layers]
    # In float16 a draft's scales could be denormal and round differently from the model's.
    if o.dtype == "float16" or not any(streamable) or profile.trace.evaluates:
        return profile
    if any(each.experts is not None for each in size.layers):
        return profile
    if not _to_cut(profile.lazy, high):  # checked first, as opening the model again is slow
        return profile
    apart = None if o.mirrors else open_copy(opening.folder, f"{PLANES}:{high}", **profile.lazy.arguments)
    lazy = with_nested_layers(apart or open_again(profile.lazy), high)
    try:
        found = opening.measured(lazy)
    except UnsupportedModelError:  # an adapter's module (DoRA) uses the weights of the module that it wraps
        return profile
    if [each.streamable for each in found.size.layers] != streamable:
        return profile
    layers = tuple(replace(n, kind=p.kind) for n, p in zip(found.size.layers, size.layers, strict=True))
    return replace(found, size=replace(found.size, layers=layers))


def _to_cut(lazy: LazyModel, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """Returns the layers' modules whose codes can be cut into high and low bits, by path; none of an adapter's."""
    found = [(f"{layer.path}.{path}", m) for layer in find_layers(lazy.model) for path, m in cut_modules(layer, high)]
    return [(path, m) for path, m in found if f"{path}.weight" in lazy.loaded]


def with_nested_layers(lazy: LazyModel, high: int) -> LazyModel:
    """Changes the model's layers so that they read only low bits. Returns ``lazy`` itself if no module can be cut."""
    loaded, origins = set(lazy.loaded), dict(lazy.origins)
    modules = _to_cut(lazy, high)
    for path, module in modules:
        bits = module.bits
        nest(module, high)
        loaded -= {f"{path}.weight", f"{path}.scales"}
        loaded.add(f"{path}.low")
        there = origins.pop(f"{path}.weight", None)
        origins.pop(f"{path}.scales", None)
        apart = lazy.decoders.get(there.name) if there is not None else None
        if there is not None and isinstance(apart, Planes) and (apart.bits, apart.high) == (bits, high):
            origins[f"{path}.low"], _ = apart.places(there)
    if not modules:
        return lazy
    reshape = partial(with_nested_layers, high=high)
    return replace(lazy, origins=origins, loaded=frozenset(loaded), reshape=reshape)


def nested_modules(model: nn.Module) -> Iterator[tuple[str, NestedLinear]]:
    return ((path, m) for path, m in named_modules(model) if isinstance(m, NestedLinear))


def high_planes(lazy: LazyModel) -> dict[str, TensorInfo]:
    """Returns, by weight path, where on disk the high bits of nested layers are stored separately."""
    found = {}
    for path, _ in nested_modules(lazy.model):
        if (low := lazy.origins.get(f"{path}.low")) is not None:
            name = low.name.removesuffix(".low")
            planes = lazy.decoders[name]
            assert isinstance(planes, Planes)
            _, found[f"{path}.weight"] = planes.places(lazy.checkpoint.tensors[name])
    return found


def share_high_bits(model: nn.Module, draft: nn.Module) -> None:
    """Makes the model's nested layers use the high bits that the draft has in memory. In layers that stay in memory,
    codes are joined once, and the draft uses all their bits."""
    drafting = dict(named_modules(draft))
    for path, module in nested_modules(model):
        module.share(drafting[path])
        module.settle()


# A file's inode, size in bytes, and time of the last change in nanoseconds.
Stamp = tuple[int, int, int]


def file_stamps(tensors: Mapping[str, TensorInfo]) -> dict[Path, Stamp | None]:
    """Returns a stamp of each tensor's file, which changes if the file is replaced or written to; None: no file."""
    stamps: dict[Path, Stamp | None] = {}
    for file in {tensor.file for tensor in tensors.values()}:
        try:
            found = file.stat()
        except OSError:
            stamps[file] = None
        else:
            stamps[file] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return stamps


def high_bits_streamed(profile: ModelProfile, where: Mapping[str, TensorInfo]) -> ModelProfile:
    """Returns a profile of the same model that also reads the high bits, for after the draft was given up. Changes
    nothing.

    Args:
        profile: of a model with nested layers that share a draft's high bits.
        where: the draft's tensors on disk, by path in the model.
    """
    place = replace(profile.place, where={**profile.place.where, **where})
    grown = [_grown(layer, parts, where) for layer, parts in zip(profile.layers, profile.parts, strict=True)]
    parts = (p if p.unit is None else replace(p, unit=place.unit(layer)) for layer, p in grown)
    profile = replace(profile, place=place, layers=tuple(layer for layer, _ in grown), parts=tuple(parts))
    sizes = tuple(_size(profile, i, size) for i, size in enumerate(profile.size.layers))
    return replace(profile, size=replace(profile.size, layers=sizes))


def _grown(layer: Layer, parts: LayerParts, where: Mapping[str, TensorInfo]) -> tuple[Layer, LayerParts]:
    """Adds the high bits to a layer's parameters. The slot then has all bits of nested modules' codes: each call joins
    them, and no decoder does. Other parameters are decoded as before."""
    parameters, casts = list(layer.parameters), list(parts.casts)
    owners = {id(p.module): n for n, p in enumerate(parameters)}
    numbers = [list(piece.parameters) for piece in parts.pieces]
    for path, module in named_modules(layer.module):
        if not isinstance(module, NestedLinear) or module.coarse is None or id(module) not in owners:
            continue
        mine = next((own for own in numbers if owners[id(module)] in own), None)
        for key in KEYS:
            if mine is not None:
                mine.append(len(parameters))
            parameters.append(Parameter(f"{path}.{key}", module.coarse, key))
            # The same cast as when the draft was loaded.
            dtype, stored = module.coarse[key].dtype, DTYPES[where[f"{layer.path}.{path}.{key}"].dtype]
            casts.append(None if dtype == stored else dtype)
    pieces = tuple(replace(p, parameters=tuple(n)) for p, n in zip(parts.pieces, numbers, strict=True))
    kept = (None if isinstance(d, NestedLinear) else d for d in parts.decoders)
    decoders = (*kept, *(None,) * (len(parameters) - len(layer.parameters)))
    parts = replace(parts, pieces=pieces, casts=tuple(casts), decoders=decoders)
    return Layer(layer.path, layer.module, tuple(parameters)), parts


def _size(profile: ModelProfile, i: int, size: LayerSize) -> LayerSize:
    whole, parts = weighed(profile.layers[i], profile.parts[i].pieces, profile.parts[i].casts, profile.place)
    pieces = tuple(replace(p, out=b.out, block=b.block) for p, b in zip(parts, size.pieces, strict=True))
    size = replace(size, resident=whole.resident, slot=whole.slot, read=whole.read, cast=whole.cast, pieces=pieces)
    return on_cuda_size(size, profile.copies) if on_cuda() else size
