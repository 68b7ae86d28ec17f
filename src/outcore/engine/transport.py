"""``Transport``: how decoding reaches other ranks. Its base ``seams.Stage`` is how the engine reaches them.

A model whose layers lie on several machines is run by one process on each, a rank. All ranks run the same code over the
same tokens, each with its own layers. ``Transport`` itself is for a model without other ranks.
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
    """Predicted speed of all ranks together: seconds per token, seconds to the first token, and a line for the user."""

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
    """A scheduler (``decode.scheduler.Scheduler``) on the first rank, whose steps all other ranks repeat."""

    ends: Collection[int]

    @property
    def running(self) -> int: ...
    def add(self, request: Any) -> None: ...
    def remove(self, uids: Iterable[int]) -> None: ...
    def step(self) -> Any: ...
    def close(self) -> None: ...

    def rest(self) -> None:
        """Called while there are no requests. Raises LinkError if another rank is gone."""

    def fail(self, reason: str) -> None: ...


class Agreement:
    """Gives all ranks the same values; every rank makes the same calls in the same order. This class itself is for a
    single rank. ``chooses``: this rank has the logits and samples tokens."""

    alone = chooses = True

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Returns the integers that ``choose`` returns on the first rank."""
        return list(choose())

    def text(self, tell: Callable[[], str]) -> str:
        """Returns the text that ``tell`` returns on the first rank."""
        return tell()

    def leasts(self, values: Sequence[int]) -> list[int]:
        """Returns, for each of ``values``, the smallest that any rank gave."""
        return list(values)

    def give_up(self, error: Exception) -> None:
        """Ends the run on all ranks after an error in work that only this rank does."""


class Transport(Agreement, Stage):
    """How this rank reaches the other ranks of a model; this class itself is for a single rank."""

    forecast: Any = None  # a Forecast

    # Room

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        """Returns the least that ``has_room`` returns on any rank: tokens of an answer, and of a chunk of the prompt.

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
        """Returns a scheduler for a server that makes other ranks repeat the steps of ``sequences``; None: there is
        only one rank."""
        return None

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Called before sequences' caches are merged; ``caches``: for each sequence, a cache per layer."""

    def passes_together(self) -> PassRunner | None:
        """Returns an object that runs several passes layer by layer if nothing is streamed; None: they run one after
        the other."""
        return None


def pass_runner(streaming: Streaming | None, transport: Transport) -> PassRunner | None:
    """Returns the object that runs several passes layer by layer; None if passes have to run one after the other."""
    if streaming is None:
        return transport.passes_together()
    return None if streaming.evaluates else streaming
