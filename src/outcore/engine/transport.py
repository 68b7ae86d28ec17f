"""What decoding needs of other ranks; ``seams.Stage`` is the engine's part.

A model whose layers lie on several machines is run by one process on each, a rank. All ranks run the same code over the
same tokens, each with its own layers. The engine and the decoding loops reach the others by a ``Transport``; that class
itself stands for a model without other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from .seams import Stage

if TYPE_CHECKING:
    from .executor import Wanted
    from .streaming import Streaming

# Returns the most tokens of an answer (-1: any number) and the tokens of the prompt to compute at a time.
HasRoom = Callable[[], tuple[int, int]]

# Makes room for sequences on this rank, as ``SequenceRoom.fit``; returns the tokens that the longest one has
# room for.
Fit = Callable[[Sequence[int], Sequence[int], Sequence[int]], int]


class Forecast(Protocol):
    """Predicted speed of all ranks together: seconds per token and to the first token; ``line`` says it in words."""

    token_s: float
    ttft_s: float
    calibrated: bool
    line: str

    def record(self) -> dict[str, Any]:
        """Returns the JSON form, with an entry in ``ranks`` for each rank."""


class PassRunner(Protocol):
    """Runs several passes layer by layer (``Streaming.run_passes``)."""

    def run_passes(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]: ...


class Leader(Protocol):
    """``decode.continuous.Continuous`` on the first rank, whose steps all other ranks follow."""

    ends: Collection[int]

    @property
    def running(self) -> int: ...
    def add(self, request: Any) -> None: ...
    def remove(self, uids: Iterable[int]) -> None: ...
    def step(self) -> Any: ...
    def close(self) -> None: ...

    def rest(self) -> None:
        """Called when there are no requests. Raises LinkError if another rank is gone."""

    def fail(self, reason: str) -> None: ...


class Agreement:
    """Values that all ranks agree on. Every rank makes the same calls in the same order. This class itself stands for
    one rank, which ``chooses``: it has the logits and samples tokens."""

    alone = chooses = True

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Returns the integers that the first rank chooses."""
        return list(choose())

    def text(self, tell: Callable[[], str]) -> str:
        """Returns the text that the first rank has."""
        return tell()

    def leasts(self, values: Sequence[int]) -> list[int]:
        """Returns the smallest of each value over all ranks."""
        return list(values)

    def give_up(self, error: Exception) -> None:
        """Ends the run on all ranks after something failed that only this rank does."""


class Transport(Agreement, Stage):
    """The other ranks of a model, as this one sees them; this class itself stands for none."""

    forecast: Any = None  # a Forecast

    # Room

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        """Returns what ``has_room`` returns, limited to what all ranks have room for.

        Args:
            text: values that must be the same on all ranks.
            asked: the caller chose the chunk length.
        """
        return has_room()

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        """Makes room by ``here`` on all ranks. Returns the chunk length that they agreed on; None for a single rank."""
        here(lengths, joining, begun)
        return None

    def rest(self) -> None: ...

    # Decoding

    def leader(self, sequences: Any) -> Leader | None:
        """Returns the scheduler a server uses in place of ``sequences``, so that other ranks follow; None: a single
        rank."""
        return None

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Called before caches of several sequences are merged, each a list with a cache per layer."""

    def passes_together(self) -> PassRunner | None:
        """Returns an object that runs several passes layer by layer if nothing is streamed; None: they run one after
        the other."""
        return None


def pass_runner(streaming: Streaming | None, transport: Transport) -> PassRunner | None:
    """Returns the object that runs several passes layer by layer; None if passes have to run one after the other."""
    if streaming is None:
        return transport.passes_together()
    return None if streaming.evaluates else streaming
