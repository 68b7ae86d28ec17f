"""Sizes of layers and their pieces, and how a streamed layer is cut into parts that fit a slot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from ..sizes import BLOCK, GAP


@dataclass(frozen=True)
class PieceSize:
    """Bytes of one piece of a layer, as in ``LayerSize``.

    Attributes:
        ranges: byte ranges on disk, each as file number, offset from the layer's first byte in that file (so that equal
            layers compare equal) and bytes; empty if unknown.
        out: bytes of its output per token.
        block: the part of the layer that the piece belongs to (its attention, its MLP). Only pieces of the same block
            use ``out``; a block passes on one hidden state.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    ranges: tuple[tuple[int, int, int], ...] = ()
    out: int = 0
    block: str = ""


class ExpertNumbers(Protocol):
    """A layer's routed experts that can be read one by one; ``expert_plan`` implements it.

    Attributes:
        count: number of experts.
        used: number of experts that a token uses.
        resident: bytes of one expert in memory.
        pieces: numbers of the layer's pieces that hold experts.
        on_demand: makes plans with expert caches (``prediction.ExpertPlans``).
    """

    @property
    def count(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def resident(self) -> int: ...

    @property
    def pieces(self) -> tuple[int, ...]: ...

    @property
    def on_demand(self) -> Any: ...


@dataclass(frozen=True)
class LayerSize:
    """Bytes of one layer: resident (in the dtype that it computes in), in a slot, and read from disk per pass.

    Attributes:
        cast: copies made while it computes, where its stored dtype differs.
        kind: layers of one kind take equally long: same class, shapes and dtypes.
        pieces: parts that can stay resident on their own; in call order where ``splittable``, and then streamable on
            their own too.
        experts: its routed experts, if they can be read one by one.
        joined: weights that every pass joins from their high and low bits, whether streamed or resident.
        decoded: weights that are stored encoded, in decoded bytes.
        to_cast: weights that are stored in another dtype, in bytes of the computing dtype.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    streamable: bool = True
    kind: str = ""
    pieces: tuple[PieceSize, ...] = ()
    splittable: bool = False
    experts: ExpertNumbers | None = None
    joined: int = 0
    decoded: int = 0
    to_cast: int = 0


@dataclass(frozen=True)
class StreamedPart:
    """One streamed unit: pieces of a layer, by index; the whole layer if ``pieces`` is empty. Sizes in bytes.
    ``experts``: nothing but experts, which passes that read single experts leave out."""

    layer: int
    pieces: tuple[int, ...]
    slot: int
    read: int
    cast: int = 0
    experts: bool = False


@dataclass(frozen=True)
class Cut:
    """A streamed layer in parts. Equal layers share one, so ``layer`` of its parts is 0.

    Attributes:
        slot, cast: most bytes of any part.
        read: bytes of all parts.
        between: bytes per token of outputs in memory between two parts; None if there is only one part.
    """

    parts: tuple[StreamedPart, ...]
    slot: int
    cast: int
    read: int
    between: int | None


@lru_cache(maxsize=4096)
def cut_layer(layer: LayerSize, kept: tuple[int, ...], unit: int, apart: bool = False) -> Cut:
    """Cuts a streamed layer, without its resident pieces, into parts of at most ``unit`` bytes if it can be split.

    Makes the fewest parts, and as equal as call order allows, since a ring of unequal units waits for the large ones. A
    piece larger than ``unit`` is a part of its own. ``apart``: experts and other pieces are in different parts, and
    parts without experts are half as large.
    """
    if apart and layer.experts is None:
        unit //= 2
    if not kept and (layer.slot <= unit or not layer.splittable) and (not apart or layer.experts is None):
        whole = StreamedPart(0, (), layer.slot, layer.read, layer.cast)
        return Cut((whole,), whole.slot, whole.cast, whole.read, None)
    left, parts = tuple([n for n in range(len(layer.pieces)) if n not in kept]), list[StreamedPart]()
    inside = set(layer.experts.pieces) if apart and layer.experts is not None else set[int]()
    for experts, run in groupby(left, inside.__contains__):
        parts += _parts(layer, tuple(run), unit if experts or not inside else unit // 2, experts)
    return Cut(
        tuple(parts),
        max(map(attrgetter("slot"), parts)),
        max(map(attrgetter("cast"), parts)),
        sum(map(attrgetter("read"), parts)),
        held_between([layer], parts),
    )


def _parts(layer: LayerSize, left: tuple[int, ...], unit: int, experts: bool) -> list[StreamedPart]:
    spans = _spans(layer, left)
    ends = [len(left)]
    if layer.splittable:
        largest = max(map(itemgetter(0), spans))
        limits = sorted(set(chain.from_iterable(spans)))
        limits = limits[bisect_left(limits, largest) :]
        fewest = len(_ends(spans, max(unit, largest)))
        ends = _ends(spans, limits[bisect_left(limits, True, key=lambda limit: len(_ends(spans, limit)) <= fewest)])
    parts, begin = list[StreamedPart](), 0
    for end in ends:
        group = left[begin:end]
        read, cast = sum(_between(layer, group)), 0
        for n in group:
            read, cast = read + layer.pieces[n].read, cast + layer.pieces[n].cast
        parts.append(StreamedPart(0, group, spans[begin][end - begin - 1], read, cast, experts))
        begin = end
    return parts


@lru_cache(maxsize=4096)
def _spans(layer: LayerSize, left: tuple[int, ...]) -> list[list[int]]:
    """Returns, for each piece, the slot bytes of parts that begin with it: of one, two and more pieces. Includes gaps
    between pieces that are read too, which are more than ``GAP`` where pieces' tensors are mixed in the file."""
    spans = []
    for begin in range(len(left)):
        row, slots = [], 0
        for end in range(begin, len(left)):
            slots += layer.pieces[left[end]].slot
            between = 0
            for gap in _between(layer, left[begin : end + 1]):
                between += -(-max(0, gap) // BLOCK) * BLOCK
            row.append(min(layer.slot, slots + max(GAP * (end - begin), between)))
        spans.append(row)
    return spans


def _ends(spans: list[list[int]], limit: int) -> list[int]:
    """Returns where consecutive parts end, each as long as the limit allows, and of at least one piece."""
    ends, begin = [], 0
    while begin < len(spans):
        row, count = spans[begin], 1
        while count < len(row) and row[count] <= limit:
            count += 1
        begin += count
        ends.append(begin)
    return ends


def _between(layer: LayerSize, pieces: Sequence[int]) -> list[int]:
    """Returns the bytes of each gap that is read with these pieces; a negative number where two ranges overlap."""
    if len(pieces) < 2:
        return []
    ranges = list[tuple[int, int, int]]()
    for n in pieces:
        if not layer.pieces[n].ranges:
            return []
        ranges += layer.pieces[n].ranges
    found, file, end = list[int](), -1, 0
    for of, begin, nbytes in sorted(ranges):
        if of == file and begin - end <= GAP:
            before, end = end, max(end, begin + nbytes)
            found.append(end - before - nbytes)
        else:
            file, end = of, begin + nbytes
    return found


def held_between(layers: Sequence[LayerSize], parts: Sequence[StreamedPart]) -> int | None:
    """Returns bytes per token of outputs that wait between two parts of a layer; None if no layer is in parts."""
    # Resident pieces between two parts are computed with the later one.
    found = [_held_before(layers[a.layer], a.pieces[-1] + 1) for a, b in pairwise(parts) if a.layer == b.layer]
    return max(found, default=None)


def _held_before(layer: LayerSize, piece: int) -> int:
    """Returns bytes per token of earlier pieces' outputs that this piece, or a later one of its block, may use."""
    blocks = [p.block for p in layer.pieces]
    begins = blocks.index(blocks[piece])
    if blocks[piece] in blocks[begins:piece] and len(set(blocks[begins : piece + 1])) > 1:
        begins = 0  # blocks alternate, so which outputs cross them is unknown
    # Of a switch only the last piece's output is used outside.
    experts = () if layer.experts is None else layer.experts.pieces
    done = experts[:-1] if experts and piece > experts[-1] else ()
    return sum([layer.pieces[n].out for n in range(begins, piece) if n not in done])


def smallest_slot(layer: LayerSize) -> int:
    """Returns bytes of the smallest slot that a layer can be streamed through."""
    if not layer.splittable or len(layer.pieces) < 2:
        return layer.slot
    return min(layer.slot, max(map(attrgetter("slot"), layer.pieces)))


def unit_sizes(layers: Iterable[LayerSize], most: int) -> list[int]:
    """Returns unit sizes worth comparing, in bytes: whole layers, then halves, thirds and so on.

    Args:
        most: bytes of the largest unit that the device has slots for. No streamable layer needs a larger one.
    """
    alike = {layer for layer in layers if layer.streamable}
    whole = max(map(attrgetter("slot"), alike), default=0)
    # Layers that cannot be split need slots of their size.
    least = max(map(smallest_slot, alike), default=0)

    def largest(limit: int) -> int:
        return max([cut_layer(layer, (), limit).slot for layer in alike], default=whole)

    sizes = [largest(most) if whole > most else whole]
    for limit in [*(max(least, -(-sizes[0] // parts)) for parts in range(2, 9)), least]:
        if sizes[-1] > least and (found := largest(limit)) < sizes[-1]:
            sizes.append(found)
    return sizes


def spread(count: int, of: int) -> list[int]:
    """Returns ``count`` evenly spaced indices out of ``range(of)``, none at the very start."""
    return [((2 * i + 1) * of) // (2 * count) for i in range(count)]
