"""The seam between decoding and other machines that hold layers of it; ``seams.Stage`` is the engine's part.

A model whose layers lie on several machines is run by one process on each of them, a rank. All ranks run the same code
over the same tokens, each with its own layers. Whatever the engine and the decoding loops need of the other ranks they
ask their ``Transport``. A model that is all here has this class itself, which asks no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from ..modules.layers import Layer
from .seams import Stage

if TYPE_CHECKING:
    from .recorded_pass import Wanted
    from .session import Session
    from .streaming import Streaming

HasRoom = Callable[[], tuple[int, int]]
"""Says how many tokens an answer may have (-1: any number), and how many of its prompt are computed at a time."""

Fit = Callable[[Sequence[int], Sequence[int], Sequence[int]], int]
"""Makes room for sequences on this rank, as ``SequenceRoom.fit``; returns the tokens that the longest has room for."""


class Forecast(Protocol):
    """What all ranks together are predicted to take.

    Attributes:
        token_s, ttft_s: seconds for a token, and to the first one. ``calibrated``: all ranks were measured.
    """

    @property
    def token_s(self) -> float: ...

    @property
    def ttft_s(self) -> float: ...

    @property
    def calibrated(self) -> bool: ...

    @property
    def line(self) -> str:
        """In words."""

    def record(self) -> dict[str, Any]:
        """For JSON; one entry of ``ranks`` for each."""


class PassRunner(Protocol):
    """What computes several passes layer by layer (``Streaming.sweep``)."""

    def run_passes(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]: ...


class Leader(Protocol):
    """``decode.scheduler.Scheduler`` on the first rank, whose steps all other ranks take, too."""

    ends: Collection[int]

    @property
    def running(self) -> int: ...

    def add(self, request: Any) -> None: ...

    def remove(self, uids: Iterable[int]) -> None: ...

    def step(self) -> Any: ...

    def close(self) -> None: ...

    def rest(self) -> None:
        """Nobody asks for anything now. Raises ``LinkError`` where another rank is gone."""

    def fail(self, reason: str) -> None:
        """This rank cannot go on, so none can."""


class Agreement:
    """What ranks agree on. What all ranks ask has to be asked by all of them, in the same order. Of this class itself:
    there are no others.

    Attributes:
        alone: there are none. ``chooses``: this rank has the logits, so it chooses tokens.
    """

    alone = chooses = True

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Whole numbers that the first rank chooses; all ranks ask."""
        return list(choose())

    def text(self, tell: Callable[[], str]) -> str:
        """A text that the first rank has; all ranks ask."""
        return tell()

    def leasts(self, values: Sequence[int]) -> list[int]:
        """Of each value, the least that any rank has; all ranks ask."""
        return list(values)

    def give_up(self, error: Exception) -> None:
        """What this rank alone does, and others wait for, has failed: end the run on all ranks."""


class Share(Protocol):
    """What this rank holds of a model that lies on several; ``ModelProfile.share``."""

    @property
    def forecast(self) -> Forecast | None:
        """What all ranks together are predicted to take."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Those of the whole model."""

    def install(self, engine: Session) -> Transport:
        """Have calls of other ranks' layers go to those ranks, and let go of these layers' weights."""


class Transport(Agreement, Stage):
    """The other ranks of a model, as this one sees them.

    Attributes:
        forecast: what all ranks together are predicted to take (``Forecast``); None where that is not known.
    """

    forecast: Any = None

    # Room

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        """What ``has_room`` returns, as all ranks have room for it; all ranks ask.

        Args:
            text: whatever has to be the same on all ranks. asked: the caller chose the chunks' length.

        Raises:
            PromptError, BudgetError: a rank has no room. UsageError: ranks were given different texts.
        """
        return has_room()

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        """Make room by ``here`` on all ranks, which all ask; tokens of a prompt at a time, where ranks have agreed.

        Raises:
            BudgetError: a rank has no room.
        """
        here(lengths, joining, begun)
        return None

    def rest(self) -> None:
        """Sequences gave back the room that they had."""

    # Decoding

    def leader(self, sequences: Any) -> Leader | None:
        """What a server asks in place of ``sequences`` (``Scheduler``), so that other ranks follow; None: there are
        none."""
        return None

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Caches of several sequences, of each one for every layer, are about to be merged."""

    def passes_together(self) -> PassRunner | None:
        """What computes several passes layer by layer, where nothing is streamed; None: they follow each other."""
        return None


def pass_runner(streaming: Streaming | None, transport: Transport) -> PassRunner | None:
    """What computes several passes layer by layer; None: they follow each other."""
    if streaming is None:
        return transport.passes_together()
    return None if streaming.evaluates else streaming
