"""The seam between a running model and other machines that hold layers of it.

A model whose layers lie on several machines is run by one process on each of them, a rank. All ranks run the same code
over the same tokens, each with its own layers. Whatever the engine and the decoding loops need of the other ranks they
ask their ``Transport``. A model that is all here has ``Solo``, which asks nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..plan.model_size import Graph
from .recorded_pass import Leaving, RecordedPass, Wanted
from .undo import Moved, Undo

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


class PassRecorder(Protocol):
    """What calls of streamed layers go through (``executor.LayerExecutor``)."""

    recording: RecordedPass | None

    def moved(self) -> Moved: ...

    def reached(self, moved: Moved) -> None: ...


class Sweeps(Protocol):
    """What computes several passes layer by layer (``streaming.Streaming.sweep``)."""

    graph: Graph

    def sweep(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]: ...


class Leader(Protocol):
    """``decode.continuous.Continuous`` on the first rank, whose steps all other ranks take, too."""

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


class Stage(Protocol):
    """What the engine asks of the ranks that have other layers.

    Attributes:
        alone: there are none. ``eager``: the model evaluates arrays in its forward pass, on whichever rank.
    """

    @property
    def alone(self) -> bool: ...

    @property
    def eager(self) -> bool: ...

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None:
        """Calls of streamed layers go through ``recorder``. ``before_send`` is called before anything is sent."""

    def whole(self, model: nn.Module) -> None:
        """Nothing of the model is streamed here."""

    def fill(self, copy: nn.Module | None) -> None:
        """A copy of the whole model, which drafts on this rank, fills the caches of other ranks' layers; None: it was
        given up."""

    def watch(self, module: nn.Module) -> None:
        """A layer stays in memory from now on: send what it puts out, if others need it."""

    def unwatch(self, module: nn.Module) -> None:
        """A layer will be streamed."""

    def begin_sweep(self, *, pooled: bool) -> None:
        """A sweep begins; ``pooled``: experts are read one by one, so routers are evaluated on the way."""

    def passes(self) -> AbstractContextManager[Callable[[], None]]:
        """Several passes are recorded meanwhile; what it gives is called before each of them."""

    @property
    def waits(self) -> bool:
        """Whether ``settle`` would wait."""

    def settle(self) -> None:
        """Wait for all that was built so far depends on, where passes are not recorded.

        Raises:
            LinkError: another rank is gone, silent, or sent what it should not.
        """

    def leaving(self, module: int, out: Any) -> Leaving:
        """What other ranks need of a layer's outputs; ``module``: the layer's id."""

    def depart(self, leaving: Leaving) -> None:
        """Compute it and send it."""

    def abandon(self) -> None:
        """After something failed: nobody waits for what was under way."""

    def close(self) -> None:
        """End what waits for other ranks. Safe to call twice."""

    def transaction(self, undo: Undo | None) -> None:
        """What takes caches back if a pass fails, where nothing is streamed; None: it is over."""

    def working(self) -> AbstractContextManager[object]:
        """This rank waits for its device meanwhile, so others have patience with it."""


class Agreement(Protocol):
    """What ranks agree on. What all ranks ask has to be asked by all of them, in the same order.

    Attributes:
        alone: there are no others. ``chooses``: this rank has the logits, so it chooses tokens.
    """

    @property
    def alone(self) -> bool: ...

    @property
    def chooses(self) -> bool: ...

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Whole numbers that the first rank chooses; all ranks ask."""

    def text(self, tell: Callable[[], str]) -> str:
        """A text that the first rank has; all ranks ask."""

    def leasts(self, values: Sequence[int]) -> list[int]:
        """Of each value, the least that any rank has; all ranks ask."""

    def seconds(self, value: float) -> float:
        """The sum of all ranks' values; all ranks ask."""

    def give_up(self, error: Exception) -> None:
        """What this rank alone does, and others wait for, has failed: end the run on all ranks."""


class Transport(Agreement, Stage, Protocol):
    """The other ranks of a model, as this one sees them.

    Attributes:
        forecast: what all ranks together are predicted to take; None where that is not known.
    """

    @property
    def forecast(self) -> Forecast | None: ...

    # Room

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        """What ``has_room`` returns, as all ranks have room for it; all ranks ask.

        Args:
            text: whatever has to be the same on all ranks. asked: the caller chose the chunks' length.

        Raises:
            PromptError, BudgetError: a rank has no room. UsageError: ranks were given different texts.
        """

    def chunk(self, most: int, *, asked: bool) -> int:
        """Tokens of a prompt to compute at a time, at most ``most``; all ranks ask."""

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        """Make room by ``here`` on all ranks, which all ask; tokens of a prompt at a time, where ranks have agreed.

        Raises:
            BudgetError: a rank has no room.
        """

    def rest(self) -> None:
        """Sequences gave back the room that they had."""

    # Decoding

    def leader(self, sequences: Any) -> Leader | None:
        """What a server asks in place of ``sequences`` (``Continuous``), so that other ranks follow; None: there are
        none."""

    def merging(self, caches: Sequence[Sequence[Any]]) -> None:
        """Caches of several sequences, of each one for every layer, are about to be merged."""

    def sweeps(self) -> Sweeps | None:
        """What computes several passes layer by layer, where nothing is streamed; None: they follow each other."""


class _SoloStage:
    alone = True
    eager = waits = False

    working = staticmethod(contextlib.nullcontext)

    def transaction(self, undo: Undo | None) -> None: ...

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None: ...

    def whole(self, model: nn.Module) -> None: ...

    def fill(self, copy: nn.Module | None) -> None: ...

    def watch(self, module: nn.Module) -> None: ...

    def unwatch(self, module: nn.Module) -> None: ...

    def begin_sweep(self, *, pooled: bool) -> None: ...

    def passes(self) -> AbstractContextManager[Callable[[], None]]:
        return contextlib.nullcontext(lambda: None)

    def settle(self) -> None: ...

    def leaving(self, module: int, out: Any) -> Leaving:
        return []

    def depart(self, leaving: Leaving) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class Solo(_SoloStage):
    """The transport of a model that is all here: nobody has to agree, and nothing is sent."""

    chooses = True
    forecast = None

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        return list(choose())

    def text(self, tell: Callable[[], str]) -> str:
        return tell()

    def leasts(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def seconds(self, value: float) -> float:
        return value

    def give_up(self, error: Exception) -> None: ...

    def text_room(self, text: Callable[[], Sequence[int]], has_room: HasRoom, *, asked: bool) -> tuple[int, int]:
        return has_room()

    def chunk(self, most: int, *, asked: bool) -> int:
        return most

    def fit(self, here: Fit, lengths: Sequence[int], joining: Sequence[int], begun: Sequence[int]) -> int | None:
        here(lengths, joining, begun)
        return None

    def rest(self) -> None: ...

    def leader(self, sequences: Any) -> None: ...

    def merging(self, caches: Sequence[Sequence[Any]]) -> None: ...

    def sweeps(self) -> None: ...
