"""What the model is without what drafts for it: where memory is short the draft goes first. High bits of layers' codes,
which were in memory as a draft's, are read with the low ones from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import DTYPES
from ..machine.device import on_cuda
from ..modules.layers import Layer, Parameter
from ..modules.module_tree import named_modules
from ..modules.nested_linear import NestedLinear
from ..plan.draft_cost import Draft
from ..plan.model_size import ModelSize
from ..plan.partition import LayerSize
from ..sizes import held_bytes
from .layer_sizes import on_cuda_size, weighed
from .model_profile import LayerParts, ModelProfile

KEYS = ("weight", "scales")
"""What a draft's layer has of its own."""


Stamp = tuple[int, int, int]
"""A file's inode, bytes and time of the last change in nanoseconds."""


def file_stamps(tensors: Mapping[str, TensorInfo]) -> dict[Path, Stamp | None]:
    """What shows whether files of tensors were replaced or written to; None of one that is gone."""
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
    """The profile of the same model, whose layers' units have the high bits, too. Nothing is changed.

    Args:
        profile: of a model with nested layers that share a draft's high bits.
        where: the draft's tensors on disk, by their paths in the model.
    """
    place = replace(profile.place, where={**profile.place.where, **where})
    grown = [_grown(layer, parts, where) for layer, parts in zip(profile.layers, profile.parts, strict=True)]
    parts = (p if p.unit is None else replace(p, unit=place.unit(layer)) for layer, p in grown)
    profile = replace(profile, place=place, layers=tuple(layer for layer, _ in grown), parts=tuple(parts))
    sizes = tuple(_size(profile, i, size) for i, size in enumerate(profile.size.layers))
    return replace(profile, size=replace(profile.size, layers=sizes))


def _grown(layer: Layer, parts: LayerParts, where: Mapping[str, TensorInfo]) -> tuple[Layer, LayerParts]:
    """A layer with its modules' high bits as parameters of its own. What codes of nested modules are put together from
    is all in the slot then: each call does it, and nothing decodes them. Others are decoded as before."""
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
            # As the draft has them in memory.
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


@dataclass(frozen=True)
class DroppableDraft:
    """A model in memory that drafts.

    Attributes:
        draft: as it was planned, beside a context of so many tokens.
        kv_disk: whether keys and values may lie on disk without it.
        end: lets go of it, and of the guesses under way.
        high_bits: of a nested draft the tensors on disk that the model's layers share, by their paths in the model.
        stamps: of their files, as they were when they were read (``file_stamps``).
    """

    draft: Draft
    context: int
    kv_disk: str
    end: Callable[[], None]
    high_bits: Mapping[str, TensorInfo] = field(default_factory=dict)
    stamps: Mapping[Path, Stamp | None] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Whether the files of ``high_bits`` are there, and nobody has written to them since they were read."""
        return None not in self.stamps.values() and file_stamps(self.high_bits) == self.stamps

    def size_without(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """The model's size, which counts the draft, without it."""
        draft = self.draft
        states = draft.cache - held_bytes(draft.growing, self.context)
        return replace(
            size,
            non_layer=size.non_layer - draft.weights - (draft.head if head_streamed else 0),
            cache=size.cache - states - held_bytes(draft.growing, size.context),
            growing=size.growing[: len(size.growing) - len(draft.growing)],
            kv_disk=self.kv_disk,
            drafted=0,
        )

    def profile_without(self, profile: ModelProfile, head_streamed: bool) -> ModelProfile:
        """The profile of the model, which counts the draft, without it."""
        if self.high_bits:
            profile = high_bits_streamed(profile, self.high_bits)
        return replace(profile, size=self.size_without(profile.size, head_streamed))
