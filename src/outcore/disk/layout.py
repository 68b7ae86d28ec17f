"""The layout of units in slots: where each parameter lands, and which file ranges are read to put it there.

A unit's tensors may lie anywhere in one or more files. Neighbours in a file are read together as one extent. With
direct I/O an extent is placed so that its address in the slot agrees with its file offset modulo the block size: the
disk then writes straight into the slot, and data around the extent in its outer blocks lands in padding. Where the
device needs a stricter alignment than the file gives (a GPU loads 16 bytes at a time), each tensor gets a place of its
own and the reader copies it there from a bounce buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..sizes import BLOCK, GAP, round_up

GPU_ALIGN = 256  # Bytes. MLX aligns its own GPU allocations to this; kernels load up to 16 bytes at a time.

# Tokens in a pass. With at least as many, a GPU with memory of its own copies a weight to it once; with fewer, each
# product reads the weight over the bus.
COPY_ROWS = 128


@dataclass(frozen=True)
class Source:
    """One parameter of a unit on disk, stored as the model uses it.

    Attributes:
        path: dotted path from the unit, e.g. ``self_attn.q_proj.weight``.
        dtype: safetensors dtype name.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SlotField:
    path: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """A byte range of a file (``offset``, ``nbytes``) and the byte of the slot where it begins (``at``).

    ``in_place``: the range may be read straight into the slot in whole blocks: ``at`` and ``offset`` agree modulo
    ``BLOCK``, and its outer blocks in the slot have no other data.
    """

    file: Path
    offset: int
    nbytes: int
    at: int
    in_place: bool = False


@dataclass(frozen=True)
class SlotCopy:
    source: memoryview
    at: int


@dataclass(frozen=True)
class Unit:
    """A unit of streaming: its layout in a slot and the reads that fill it. Sizes in bytes."""

    name: str
    fields: tuple[SlotField, ...]
    extents: tuple[Extent, ...]
    slot_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes of the extents, without rounding to blocks."""
        return sum(e.nbytes for e in self.extents)


def place_unit(name: str, sources: Iterable[Source], *, direct: bool, align: int = 1) -> Unit:
    """Lay a unit's parameters out in a slot.

    Args:
        direct: the files are read with direct I/O, so addresses should agree with file offsets modulo ``BLOCK``.
        align: required alignment of every parameter in bytes; 1 if the device accepts any.
    """
    fields: list[SlotField] = []
    extents: list[Extent] = []
    cursor = 0
    for run in _runs(sources):
        start, end = run[0].offset, max(s.offset + s.nbytes for s in run)
        at = round_up(cursor, BLOCK) + start % BLOCK if direct else round_up(cursor, GPU_ALIGN)
        if all((at + s.offset - start) % align == 0 for s in run):
            extents.append(Extent(run[0].file, start, end - start, at, in_place=direct))
            fields += [SlotField(s.path, s.dtype, s.shape, at + s.offset - start, s.nbytes) for s in run]
            cursor = at + end - start
        else:
            for s in run:
                at = round_up(cursor, max(GPU_ALIGN, align))
                extents.append(Extent(s.file, s.offset, s.nbytes, at))
                fields.append(SlotField(s.path, s.dtype, s.shape, at, s.nbytes))
                cursor = at + s.nbytes
        if direct:
            # A direct read fills whole blocks: the next extent must not share this one's last block.
            cursor = round_up(cursor, BLOCK)
    return Unit(name, tuple(fields), tuple(extents), cursor)


def _runs(sources: Iterable[Source]) -> Sequence[list[Source]]:
    runs: list[list[Source]] = []
    end = 0
    for s in sorted(sources, key=lambda s: (str(s.file), s.offset)):
        if runs and runs[-1][0].file == s.file and s.offset - end <= GAP:
            runs[-1].append(s)
        else:
            runs.append([s])
            end = 0
        end = max(end, s.offset + s.nbytes)
    return runs
