"""What a model is told that lies on several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ..agreement import Agreement
from .link import Link


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share a model.

    Attributes:
        link: this rank's, to all others. Whoever made it closes it.
        owners: the rank of each layer, in the order of calls; None: as is fastest.
        host: what users call this one's; empty: it has no name.
    """

    link: Link
    owners: tuple[int, ...] | None = None
    host: str = ""

    @property
    def agreement(self) -> Agreement:
        """What they agree on before there is a model."""
        return Agreement(self.link)
