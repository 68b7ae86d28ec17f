"""Forward passes that are recorded, so that several can be evaluated unit by unit in one sweep."""

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
    """What another rank sends."""

    @property
    def ready(self) -> bool:
        """Whether it is there."""

    def wait(self) -> None:
        """Return when it is there."""


Wanted = Collection[int] | None
"""The numbers of the passes whose results the caller needs; None: all of them."""

Leaving = list[tuple[tuple[int, ...], mx.array]]
"""Ranks, and the bytes that go to them."""


@dataclass
class Recorded:
    """What is derived from one unit's weights in one pass, and what caches hold by then that moved on meanwhile.

    Attributes:
        unit: None: no unit's, but of a layer in memory whose outputs other ranks need.
        lease: of its slot; None where passes are recorded.
        arriving: what other ranks send that it is made from; ``leaving``: what of it goes to others.
    """

    unit: int | None
    arrays: list[mx.array]
    moved: Moved = field(default_factory=list)
    arriving: list[Awaited] = field(default_factory=list)
    leaving: Leaving = field(default_factory=list)
    lease: Lease | None = None


@dataclass
class RecordedPass:
    """A forward pass of which the graph is built and nothing evaluated.

    Attributes:
        units: what was called, in order.
        seen: caches that streamed layers were given, by id.
        tail: arrays of the caches after those, which resident layers behind the last streamed one leave behind.
        moved: what caches hold that moved on behind the last unit.
        incoming: what comes from other ranks for what is built next.
        made: by turns, weights that are decoded or cast in them: once for all passes of a sweep, that share this
            dictionary.
    """

    made: dict[int, list[mx.array | None]] = field(default_factory=dict)
    units: list[Recorded] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    tail: list[mx.array] = field(default_factory=list)
    moved: Moved = field(default_factory=list)
    incoming: list[Awaited] = field(default_factory=list)

    def arriving(self) -> list[Awaited]:
        """What comes from other ranks for what was built since this was asked last."""
        found, self.incoming = self.incoming, []
        return found

    @property
    def turns(self) -> int:
        """Units that were called so far."""
        return sum(r.unit is not None for r in self.units)

    def settle(self) -> None:
        """Return when what comes from other ranks behind the last unit is there."""
        for each in self.arriving():
            each.wait()

    def see(self, *values: Any) -> None:
        """Note the caches that a streamed layer was given."""
        self.seen.update(map(id, caches_in(*values)))

    def end(self, *values: Any) -> None:
        """The whole pass is recorded; ``values`` are what the model was called with."""
        caches = caches_in(*values)
        last = max((i for i, c in enumerate(caches) if id(c) in self.seen), default=-1)
        self.tail += handles(caches[last + 1 :])


def in_turn(
    passes: Sequence[RecordedPass], heads: Collection[int], reached: Callable[[Moved], None], wanted: Wanted
) -> Iterator[list[Recorded]]:
    """Each unit in order, as what is to be evaluated of it pass by pass.

    Args:
        heads: units that only results are made from: they are left out of passes whose results are not ``wanted``.
        reached: called with caches that are about to be computed behind the last unit.

    Raises:
        OutcoreError: the passes call units in different orders.
    """
    if any([r.unit for r in p.units] != [r.unit for r in passes[0].units] for p in passes):
        raise OutcoreError("this model runs its layers in another order from pass to pass; use one pass a sweep")
    alone = heads if wanted is not None else ()
    kept = [p for n, p in enumerate(passes) if _is(n, wanted)]
    for unwanted in (r for n, p in enumerate(passes) if not _is(n, wanted) for r in p.units if r.unit in alone):
        unwanted.arrays = []
    for turn, first in enumerate(passes[0].units):
        if first.unit in alone:
            # What resident layers behind the last streamed one wait for was noted with the head.
            for awaited in (a for p in passes for a in p.units[turn].arriving):
                awaited.wait()
            _finish(passes, reached, wanted)
        # Where nobody wants a result the head's turn comes all the same, with nothing to compute.
        yield [p.units[turn] for p in (kept or passes[-1:] if first.unit in alone else passes)]
    if wanted is not None:
        _finish(passes, reached, wanted)


def _is(number: int, wanted: Wanted) -> bool:
    return wanted is None or number in wanted


def _finish(passes: Sequence[RecordedPass], reached: Callable[[Moved], None], wanted: Wanted) -> None:
    """Compute what resident layers after the last streamed one leave in their caches, pass by pass: with results alone
    all of it would be under way at once."""
    for number, each in enumerate(passes):
        each.settle()
        reached(each.moved)
        if not _is(number, wanted):
            mx.eval(each.tail)
        each.tail, each.moved = [], []
