"""Records forward passes so that several of them can be evaluated together, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from ..disk.ring import Lease
from ..errors import OutcoreError
from ..modules.call_values import caches_in, handles
from .undo import Moved


class Awaited(Protocol):
    @property
    def ready(self) -> bool: ...
    def wait(self) -> None: ...


# The numbers of the passes whose results the caller needs; None: all of them.
Wanted = Collection[int] | None

# Ranks, and the array that goes to them.
Leaving = list[tuple[tuple[int, ...], mx.array]]


@dataclass
class Recorded:
    """The work of one unit in one pass. A recorded pass has no ``lease`` of the unit's slot yet.

    Attributes:
        unit: None for a resident layer whose outputs other ranks need.
        arrays: everything derived from the unit's weights.
        moved: caches that changed meanwhile, with their arrays.
        arriving, leaving: inputs from and outputs to other ranks.
    """

    unit: int | None
    arrays: list[mx.array]
    moved: Moved = field(default_factory=list)
    arriving: list[Awaited] = field(default_factory=list)
    leaving: Leaving = field(default_factory=list)
    lease: Lease | None = None


@dataclass
class RecordedPass:
    """A forward pass whose graph is built but not evaluated.

    Attributes:
        made: decoded or cast weights by turn; all passes that share a reading use the same dictionary.
        seen: ids of the caches that streamed layers were given.
        tail: arrays of later caches, left by resident layers after the last streamed one.
        moved: caches that changed after the last unit, with their arrays.
        incoming: data from other ranks for the part that is built next.
    """

    made: dict[int, list[mx.array | None]] = field(default_factory=dict)
    units: list[Recorded] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    tail: list[mx.array] = field(default_factory=list)
    moved: Moved = field(default_factory=list)
    incoming: list[Awaited] = field(default_factory=list)

    def arriving(self) -> list[Awaited]:
        """Returns and clears the data that other ranks send for what was built since the last call."""
        found, self.incoming = self.incoming, []
        return found

    @property
    def turns(self) -> int:
        return sum(r.unit is not None for r in self.units)

    def settle(self) -> None:
        for each in self.arriving():
            each.wait()

    def see(self, *values: Any) -> None:
        self.seen.update(map(id, caches_in(*values)))

    def end(self, *values: Any) -> None:
        caches = caches_in(*values)
        last = max((i for i, c in enumerate(caches) if id(c) in self.seen), default=-1)
        self.tail += handles(caches[last + 1 :])


def in_turn(
    passes: Sequence[RecordedPass], heads: Collection[int], reached: Callable[[Moved], None], wanted: Wanted
) -> Iterator[list[Recorded]]:
    """Yields each unit's work, in order, as a list with an entry per pass.

    Args:
        heads: units that only results are made from; they are skipped for passes whose results are not ``wanted``.
        reached: called with caches that are about to be computed after the last unit.
    """
    if any([r.unit for r in p.units] != [r.unit for r in passes[0].units] for p in passes):
        raise OutcoreError("this model calls its layers in a different order in each pass: run one pass at a time")
    alone = heads if wanted is not None else ()
    kept = [p for n, p in enumerate(passes) if _is(n, wanted)]
    for unwanted in (r for n, p in enumerate(passes) if not _is(n, wanted) for r in p.units if r.unit in alone):
        unwanted.arrays = []
    for turn, first in enumerate(passes[0].units):
        if first.unit in alone:
            # The inputs of resident layers after the last streamed one were recorded with the head.
            for awaited in (a for p in passes for a in p.units[turn].arriving):
                awaited.wait()
            _finish(passes, reached, wanted)
        # The head takes its slot even if no result is wanted, with nothing to compute.
        yield [p.units[turn] for p in (kept or passes[-1:] if first.unit in alone else passes)]
    if wanted is not None:
        _finish(passes, reached, wanted)


def _is(number: int, wanted: Wanted) -> bool:
    return wanted is None or number in wanted


def _finish(passes: Sequence[RecordedPass], reached: Callable[[Moved], None], wanted: Wanted) -> None:
    """Computes what resident layers after the last streamed one leave in their caches, pass by pass to save memory."""
    for number, each in enumerate(passes):
        each.settle()
        reached(each.moved)
        if not _is(number, wanted):
            mx.eval(each.tail)
        each.tail, each.moved = [], []
