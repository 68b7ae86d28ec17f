"""Layers and their pieces in bytes, and how a streamed layer is cut into parts that a slot holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..disk.layout import BLOCK, GAP, round_up
from .expert_size import ExpertSize


@dataclass(frozen=True)
class PieceSize:
    """Bytes of one piece of a layer, as in ``LayerSize``.

    Attributes:
        ranges: that are read of it: the number of a file, where they begin there (from where the layer does, so that
            layers that lie alike are equal), and bytes; none where that is not known.
        out: what it puts out for one token. ``block``: the layer's part that it belongs to (its attention, its MLP),
            beyond which no other piece uses that: a block gives on no more than a hidden state.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    ranges: tuple[tuple[int, int, int], ...] = ()
    out: int = 0
    block: str = ""


@dataclass(frozen=True)
class LayerSize:
    """Bytes of one layer: resident (in the dtype that it is computed in), in a slot, and read from disk a sweep.

    ``cast`` are bytes of copies made on the way, when it is computed in another dtype than it is stored in. Layers of
    one ``kind`` take equally long: same class, same shapes, same dtypes. ``pieces`` are its parts that can stay in
    memory by themselves; where the layer is ``splittable`` they are in the order of their calls, and can be streamed by
    themselves too. ``experts``: those that can be read one by one. ``joined``: bytes of weights that are put together
    for each pass, of what is streamed and of what stays in memory anyway. ``decoded``: bytes of those that are read in
    another form, as they are used. ``to_cast``: bytes of those that are read in another dtype, in the one that they are
    computed in.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    streamable: bool = True
    kind: str = ""
    pieces: tuple[PieceSize, ...] = ()
    splittable: bool = False
    experts: ExpertSize | None = None
    joined: int = 0
    decoded: int = 0
    to_cast: int = 0


@dataclass(frozen=True)
class StreamedPart:
    """What is streamed as one piece: pieces of a layer, by their numbers; none stands for the whole layer. Bytes."""

    layer: int
    pieces: tuple[int, ...]
    slot: int
    read: int
    cast: int = 0


@lru_cache(maxsize=4096)
def split_layer(layer: LayerSize, kept: tuple[int, ...], unit: int) -> tuple[StreamedPart, ...]:
    """A streamed layer without the pieces that stay in memory, in parts of at most ``unit`` bytes if it can be split.

    The fewest parts that do, and those as equal as their order allows: a ring of unequal units waits for the large
    ones. A piece larger than ``unit`` is a part of its own.
    """
    left = [n for n in range(len(layer.pieces)) if n not in kept]
    if not kept and (layer.slot <= unit or not layer.splittable):
        return (StreamedPart(0, (), layer.slot, layer.read, layer.cast),)
    groups = [left]
    if layer.splittable:
        limits = sorted({_joined(layer, left[a:b]) for a in range(len(left)) for b in range(a + 1, len(left) + 1)})
        largest = max(_joined(layer, [n]) for n in left)
        fewest = len(_pack(layer, left, max(unit, largest)))
        groups = next(g for limit in limits if limit >= largest and len(g := _pack(layer, left, limit)) <= fewest)
    return tuple(
        StreamedPart(
            0,
            tuple(g),
            _joined(layer, g),
            _read_together(layer, g),
            sum(layer.pieces[n].cast for n in g),
        )
        for g in groups
    )


def _joined(layer: LayerSize, pieces: Sequence[int]) -> int:
    """Bytes in a slot of some pieces together, at most: what lies between them in a file may be read too, which is more
    than a gap for each where their tensors are mixed."""
    between = max(GAP * (len(pieces) - 1), sum(round_up(max(0, gap), BLOCK) for gap in _between(layer, pieces)))
    return min(layer.slot, sum(layer.pieces[n].slot for n in pieces) + between)


def _read_together(layer: LayerSize, pieces: Sequence[int]) -> int:
    """Bytes that are read of some pieces together, with what lies between them in a file and is read too."""
    return sum(layer.pieces[n].read for n in pieces) + sum(_between(layer, pieces))


def _between(layer: LayerSize, pieces: Sequence[int]) -> list[int]:
    """Bytes that lie between some pieces and are read with them, gap by gap; less than none where two have the same
    bytes. None where they are not known."""
    if len(pieces) < 2 or not all(layer.pieces[n].ranges for n in pieces):
        return []
    found, file, end = list[int](), -1, 0
    for of, begin, nbytes in sorted(r for n in pieces for r in layer.pieces[n].ranges):
        if of == file and begin - end <= GAP:
            before, end = end, max(end, begin + nbytes)
            found.append(end - before - nbytes)
        else:
            file, end = of, begin + nbytes
    return found


def _pack(layer: LayerSize, pieces: Sequence[int], limit: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for n in pieces:
        if groups[-1] and _joined(layer, [*groups[-1], n]) > limit:
            groups.append([])
        groups[-1].append(n)
    return groups


def held_between(layers: Sequence[LayerSize], parts: Sequence[StreamedPart]) -> int | None:
    """Bytes for each token of what pieces put out that is there between two parts of a layer, for those that come after
    both; None where no layer is streamed in several parts."""
    # What stays in memory between the two is computed in its turn, with the later one.
    found = [_held_before(layers[a.layer], a.pieces[-1] + 1) for a, b in pairwise(parts) if a.layer == b.layer]
    return max(found, default=None)


@lru_cache(maxsize=4096)
def _held_before(layer: LayerSize, piece: int) -> int:
    blocks = [p.block for p in layer.pieces]
    begins = blocks.index(blocks[piece])
    if blocks[piece] in blocks[begins:piece] and len(set(blocks[begins : piece + 1])) > 1:
        begins = 0  # blocks take turns, so nothing is known of what goes from one to another
    return sum(p.out for p in layer.pieces[begins:piece])


def smallest_slot(layer: LayerSize) -> int:
    """Bytes of the smallest slot that a layer can be streamed through: its largest piece's, or its own if it cannot be
    split."""
    if not layer.splittable or len(layer.pieces) < 2:
        return layer.slot
    return max(_joined(layer, [n]) for n in range(len(layer.pieces)))


def unit_sizes(layers: Iterable[LayerSize], most: int) -> list[int]:
    """Sizes of units that are worth looking at, in bytes: whole layers, then their halves, thirds and so on.

    Args:
        most: bytes of the largest unit that the device has slots for. No streamable layer needs a larger one.
    """
    layers = {layer for layer in layers if layer.streamable}
    whole = max((layer.slot for layer in layers), default=0)
    # What cannot be split needs slots of its size, if it is streamed.
    least = max((smallest_slot(layer) for layer in layers), default=0)
    if whole > most:
        whole = max(p.slot for x in layers for p in split_layer(x, (), most))
    sizes = [whole]
    for parts in range(2, 9):
        limit = max(least, -(-whole // parts))
        found = max((p.slot for x in layers for p in split_layer(x, (), limit)), default=whole)
        if found < sizes[-1]:
            sizes.append(found)
    if sizes[-1] > least:
        sizes.append(max((p.slot for x in layers for p in split_layer(x, (), least)), default=whole))
    return sizes


def spread(count: int, of: int) -> list[int]:
    """``count`` indices out of ``range(of)``, as evenly spaced as whole numbers allow, none at the very start."""
    return [((2 * i + 1) * of) // (2 * count) for i in range(count)]
