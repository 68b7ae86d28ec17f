"""Several passes of a model whose layers are in memory here, and lie on several ranks: layer after layer, as ranks do
that stream theirs, so that what is sent and received comes in the same order, and every rank computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from outcore.engine.recorded_pass import Recorded, RecordedPass
from outcore.engine.sweeps import Wanted, in_turn
from outcore.engine.undo import Moved
from outcore.machine.interrupts import check

from .incoming import Rounds
from .stage import PipelineStage


class ResidentPasses:
    """What records passes where nothing is streamed."""

    def __init__(self, hops: PipelineStage) -> None:
        self.recording: RecordedPass | None = None
        self._hops = hops

    def moved(self) -> Moved:
        return self._hops.moved()

    def reached(self, moved: Moved) -> None:
        self._hops.reached(moved)

    def sweep(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]:
        """As ``sweeps.StreamedPasses.sweep``."""
        hops, recorded, outputs = self._hops, list[RecordedPass](), list[mx.array]()
        rounds = hops.rounds = Rounds()
        before, hops.recorder = hops.recorder, self
        try:
            for number, run in enumerate(passes):
                self.recording = RecordedPass()
                rounds.next_pass()
                result = run()
                outputs += [result] if wanted is None or number in wanted else []
                del result
                recorded.append(self.recording)
                check()
            self.recording = hops.rounds = None
            for turn in in_turn(recorded, (), self.reached, wanted):
                _evaluate(turn, hops)
            for each in recorded:
                each.settle()
        except BaseException:
            hops.abandon()
            raise
        finally:
            self.recording, hops.recorder = None, before
        return outputs


def _evaluate(passes: Sequence[Recorded], hops: PipelineStage) -> None:
    """Compute what passes recorded of layers whose outputs go to other ranks."""
    for recorded in passes:
        for each in recorded.arriving:
            each.wait()
        hops.reached(recorded.moved)
        recorded.moved = []
        with hops.link.working():
            mx.eval(recorded.arrays)
        hops.depart(recorded.leaving)
        recorded.arrays, recorded.leaving = [], []
        check()
