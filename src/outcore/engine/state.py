"""What a running model is, as all that looks after it sees it: its plan, what it weighs, and how it is streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..disk.metrics import Metrics
from ..disk.replica import Replicas
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .streaming import Streaming
from .transport import Solo, Transport


class Drafter(Protocol):
    """What drafts tokens for a model (``generation.speculative``).

    Attributes:
        kind: ``ngram``, ``self`` or ``model``; ``name`` for people.
        model: that drafts, in memory; None for the text's own repetitions alone.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Any: ...


@dataclass
class State:
    """What a running model is.

    Attributes:
        plan: what is resident, what is streamed, and where the bytes go.
        size: what the model weighs.
        metrics: live counters.
        io: how files are read: ``direct``, ``cached``, or ``none`` when everything is resident.
        streaming: the engine; None when everything is resident.
        notes: what the user should know: layers that could not be streamed, a dtype that would be faster.
        prefill_step_size: tokens of a prompt at a time, if they were asked for.
        max_context: tokens that the model itself was made for; None if it does not say. Beyond them it errs.
        drafting: what drafts tokens for it; None for nothing.
        hold: takes what a plan needs of MLX's allocator.
        transport: to the ranks that have other layers of the model.
        replicas: the folders that it is read from; None where that is not known.
    """

    plan: Plan
    size: ModelSize
    metrics: Metrics
    io: str = "none"
    streaming: Streaming | None = None
    notes: tuple[str, ...] = ()
    prefill_step_size: int | None = None
    max_context: int | None = None
    drafting: Drafter | None = None
    replicas: Replicas | None = None
    transport: Transport = field(default_factory=Solo)
    hold: Callable[[Plan], None] = lambda _: None

    def adopt(self, plan: Plan) -> None:
        """Run by another plan from now on, and have MLX keep no more freed memory than that leaves over."""
        self.plan = plan
        self.hold(plan)

    def note(self, line: str) -> None:
        """What the user should know, once."""
        if line not in self.notes:
            self.notes = (*self.notes, line)
