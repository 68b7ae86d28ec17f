"""Layers and their pieces in bytes, and how a streamed layer is cut into parts that a slot holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from ..sizes import BLOCK, GAP


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


class ExpertNumbers(Protocol):
    """Routed experts of a layer, which can be read one by one: the seam to ``expert_plan``.

    Attributes:
        count: how many there are; ``used``: by a token. ``resident``: bytes of one in memory.
        on_demand: makes plans with caches of them (``prediction.ExpertPlans``).
    """

    @property
    def count(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def resident(self) -> int: ...

    @property
    def on_demand(self) -> Any: ...


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
    experts: ExpertNumbers | None = None
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


@dataclass(frozen=True)
class Cut:
    """A streamed layer in parts. ``layer`` of its parts is 0.

    Attributes:
        slot, cast: of the largest part. ``read``: of all.
        between: bytes for each token of what pieces put out that is there between two parts, for those that come after
            both; None where it is one part.
    """

    parts: tuple[StreamedPart, ...]
    slot: int
    cast: int
    read: int
    between: int | None


@lru_cache(maxsize=4096)
def cut_layer(layer: LayerSize, kept: tuple[int, ...], unit: int) -> Cut:
    """A streamed layer without the pieces that stay in memory, in parts of at most ``unit`` bytes if it can be split.

    The fewest parts that do, and those as equal as their order allows: a ring of unequal units waits for the large
    ones. A piece larger than ``unit`` is a part of its own.
    """
    if not kept and (layer.slot <= unit or not layer.splittable):
        whole = StreamedPart(0, (), layer.slot, layer.read, layer.cast)
        return Cut((whole,), whole.slot, whole.cast, whole.read, None)
    left = tuple([n for n in range(len(layer.pieces)) if n not in kept])
    spans = _spans(layer, left)
    ends = [len(left)]
    if layer.splittable:
        largest = max(map(itemgetter(0), spans))
        limits = sorted(set(chain.from_iterable(spans)))
        limits = limits[bisect_left(limits, largest) :]
        fewest = len(_ends(spans, max(unit, largest)))
        ends = _ends(spans, limits[bisect_left(limits, True, key=lambda limit: len(_ends(spans, limit)) <= fewest)])
    parts, begin = [], 0
    for end in ends:
        group = left[begin:end]
        read, cast = sum(_between(layer, group)), 0
        for n in group:
            read, cast = read + layer.pieces[n].read, cast + layer.pieces[n].cast
        parts.append(StreamedPart(0, group, spans[begin][end - begin - 1], read, cast))
        begin = end
    return Cut(
        tuple(parts),
        max(map(attrgetter("slot"), parts)),
        max(map(attrgetter("cast"), parts)),
        sum(map(attrgetter("read"), parts)),
        held_between([layer], parts),
    )


@lru_cache(maxsize=4096)
def _spans(layer: LayerSize, left: tuple[int, ...]) -> list[list[int]]:
    """Bytes in a slot of these pieces from each on: of one, of two, and so on, at most. What lies between them in a
    file may be read too, which is more than a gap for each where their tensors are mixed."""
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
    """Where parts end that follow each other, each as long as its bytes are no more than the limit, or of one piece."""
    ends, begin = [], 0
    while begin < len(spans):
        row, count = spans[begin], 1
        while count < len(row) and row[count] <= limit:
            count += 1
        begin += count
        ends.append(begin)
    return ends


def _between(layer: LayerSize, pieces: Sequence[int]) -> list[int]:
    """Bytes that lie between some pieces and are read with them, gap by gap; less than none where two have the same
    bytes. None where they are not known."""
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
    """Bytes for each token of what pieces put out that is there between two parts of a layer, for those that come after
    both; None where no layer is streamed in several parts."""
    # What stays in memory between the two is computed in its turn, with the later one.
    found = [_held_before(layers[a.layer], a.pieces[-1] + 1) for a, b in pairwise(parts) if a.layer == b.layer]
    return max(found, default=None)


def _held_before(layer: LayerSize, piece: int) -> int:
    """Bytes for each token of what pieces before this one put out that it, or a later one of its block, may use."""
    blocks = [p.block for p in layer.pieces]
    begins = blocks.index(blocks[piece])
    if blocks[piece] in blocks[begins:piece] and len(set(blocks[begins : piece + 1])) > 1:
        begins = 0  # blocks take turns, so nothing is known of what goes from one to another
    return sum(map(attrgetter("out"), layer.pieces[begins:piece]))


def smallest_slot(layer: LayerSize) -> int:
    """Bytes of the smallest slot that a layer can be streamed through: its largest piece's, or its own if it cannot be
    split."""
    if not layer.splittable or len(layer.pieces) < 2:
        return layer.slot
    return min(layer.slot, max(map(attrgetter("slot"), layer.pieces)))


def unit_sizes(layers: Iterable[LayerSize], most: int) -> list[int]:
    """Sizes of units that are worth looking at, in bytes: whole layers, then their halves, thirds and so on.

    Args:
        most: bytes of the largest unit that the device has slots for. No streamable layer needs a larger one.
    """
    alike = {layer for layer in layers if layer.streamable}
    whole = max(map(attrgetter("slot"), alike), default=0)
    # What cannot be split needs slots of its size, if it is streamed.
    least = max(map(smallest_slot, alike), default=0)

    def largest(limit: int) -> int:
        return max([cut_layer(layer, (), limit).slot for layer in alike], default=whole)

    sizes = [largest(most) if whole > most else whole]
    for limit in [*(max(least, -(-sizes[0] // parts)) for parts in range(2, 9)), least]:
        if sizes[-1] > least and (found := largest(limit)) < sizes[-1]:
            sizes.append(found)
    return sizes


def spread(count: int, of: int) -> list[int]:
    """``count`` indices out of ``range(of)``, as evenly spaced as whole numbers allow, none at the very start."""
    return [((2 * i + 1) * of) // (2 * count) for i in range(count)]
