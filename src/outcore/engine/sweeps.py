"""Several forward passes in one sweep: they are recorded, and then evaluated unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import mlx.core as mx

from ..errors import OutcoreError
from ..machine.interrupts import check
from .recorded_pass import Recorded, RecordedPass
from .streaming import Streaming
from .undo import Moved

Wanted = Collection[int] | None
"""Results of which passes, by their numbers; None: of all."""


class StreamedPasses(Streaming):
    """Streaming that runs several passes in a sweep, too."""

    def advance(self) -> None:
        """What a pass has built so far is about to be computed: caches that moved on are not taken back in part."""
        self._turns.reached(self._turns.moved())

    def sweep(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]:
        """Run forward passes one after the other in a single sweep: each unit's weights serve all of them.

        The graphs of all passes are built first, so each sees the caches as the passes before it leave them; then
        they are evaluated unit by unit. The results equal those of separate sweeps bit for bit. The model must not
        evaluate anything inside its forward pass.

        Args:
            tokens: of all passes together; None: many.
            wanted: results of which passes, by their numbers: a streamed head is not computed for the others. None: of
                all.

        Returns:
            What each of these passes returned, not necessarily evaluated.
        """
        recorded: list[RecordedPass] = []
        made: dict[int, list[mx.array | None]] = {}
        heads = {unit for t in self.tables if t.table.head for unit, _ in t.rows}
        if not self._transport.alone and len(passes) > 1:
            tokens = None  # what goes to pools goes pass by pass; all ranks have to go layer by layer
        outputs: list[mx.array] = []
        with self.exclusive, self.transaction(None, 0):
            self._begin_sweep(tokens)
            self._several = True
            try:
                if self._turns.pooled:
                    return self._pooled(passes, wanted)
                with self._transport.passes() as next_pass:
                    for number, run in enumerate(passes):
                        self._turns.recording = RecordedPass(made)
                        next_pass()
                        # A result that nobody wants would hold what it is made from, caches above all.
                        result = run()
                        outputs += [result] if wanted is None or number in wanted else []
                        del result
                        recorded.append(self._turns.recording)
                        check()
            finally:
                self._turns.recording, self._several = None, False
                made.clear()  # graphs have what they need
            for unit in in_turn(recorded, heads, self._turns.reached, wanted):
                self._evaluate(unit)
            if not self._transport.alone:
                self.drain()  # the head may wait for others
            for each in recorded:
                each.settle()
            self._end_sweep()
        return outputs

    def _pooled(self, passes: Sequence[Callable[[], mx.array]], wanted: Wanted) -> list[mx.array]:
        """One pass after the other, each to its end: what one has read, the next finds in the caches."""
        outputs: list[mx.array] = []
        for number, run in enumerate(passes):
            result = run()
            outputs += [result] if wanted is None or number in wanted else []
            del result
            assert self.experts is not None
            self.experts.settle()
            check()
        self._end_sweep()
        return outputs

    def leaves(self, array: mx.array) -> None:
        """Have this, which the pass just built put out behind the last unit, computed with what it leaves in the
        caches; where passes are not recorded, at once."""
        if self._turns.recording is not None:
            self._turns.recording.tail.append(array)
        else:
            mx.eval(array)

    def _evaluate(self, passes: list[Recorded]) -> None:
        """Compute what passes recorded of one unit, or of a layer in memory whose outputs go to other ranks, in its
        turn."""
        unit = passes[0].unit
        lease = None if unit is None else self.ring.take(unit)
        if lease is not None:
            self._turns.arrive(lease)
        for recorded in passes:
            if not all(each.ready for each in recorded.arriving):
                self.drain()
            for each in recorded.arriving:
                each.wait()
            self._turns.reached(recorded.moved)
            arrays, recorded.moved, recorded.arrays = recorded.arrays, [], []
            if recorded is passes[-1] and lease is not None:
                self._turns.hand_over(lease, arrays)
            else:
                # One at a time: MLX allocates when work is queued, and a pass's activations are freed only after it.
                with self._transport.working():
                    mx.eval(arrays)
                if recorded is passes[-1]:
                    for call in self.after_unit:
                        call()
                else:
                    self.drain()  # the unit before is computed too, and its slot may be read into
            del arrays
            self._transport.depart(recorded.leaving)
            recorded.leaving = []


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
