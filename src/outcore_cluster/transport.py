"""A rank's ``Transport``: the layers' inputs and outputs (``stage``), what all ranks agree on (``agreement``), and the
room that all of them have (``room``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from outcore.decode.continuous import Continuous
from outcore.engine.session import Session
from outcore.engine.transport import Transport

from .foreign import hold_alike
from .leading import Leader
from .lookahead import look_ahead_on_ranks
from .resident_passes import ResidentPasses
from .room import RankRoom
from .stage import PipelineStage

if TYPE_CHECKING:
    from .rank_share import RankShare


class RankTransport(RankRoom, PipelineStage, Transport):
    """The other ranks of a model, as this one sees them (``engine.transport.Transport``).

    Args:
        share: what this rank holds of the model.
    """

    def __init__(self, share: RankShare, state: Session) -> None:
        RankRoom.__init__(self, share.link, state, share.forecast)
        PipelineStage.__init__(self, share, state.metrics)

    look_ahead = staticmethod(look_ahead_on_ranks)

    def leader(self, sequences: Continuous) -> Leader:
        """What other ranks' sequences follow."""
        return Leader(sequences, self)

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Caches of other ranks' layers hold nothing, or all of them are filled."""
        for of_layer in zip(*caches, strict=True):
            hold_alike(*of_layer)

    def sweeps(self) -> ResidentPasses | None:
        """What computes several passes layer by layer, where nothing is streamed here."""
        if self.eager:
            return None
        return ResidentPasses(self, self._running.size.graph(mx.default_device().type == mx.DeviceType.cpu))
