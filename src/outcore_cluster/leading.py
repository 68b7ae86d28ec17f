"""Runs a server's sequences on several ranks: rank 0 decides, the others follow.

Before each step rank 0 sends which sequences join and which leave, and every rank applies this to its own
``Scheduler``. Only rank 0 has samplers, processors and stop strings; the others get each sequence's prompt, the largest
number of tokens of its answer, and each sampled token.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable

import mlx.nn as nn

from outcore.decode.passes import generating
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.decode.step import StepResult
from outcore.engine.session import Session
from outcore.machine.allocator import clear_cache

from .link_protocol import RankAgreement

# What the ranks do after sequences have joined and left: compute a step, pause, or end.
STEP, REST, END = "step", "rest", "end"


class RankLeader:
    """Rank 0's scheduler: as ``Scheduler``, and sends each step to the other ranks."""

    def __init__(self, sequences: Scheduler, agreement: RankAgreement) -> None:
        self._sequences, self._agreement = sequences, agreement
        self._joining: list[tuple[int, list[int], int]] = []  # uid, tokens, most tokens of the answer
        self._leaving: list[int] = []
        self._over = self._resting = False

    @property
    def running(self) -> int:
        return self._sequences.running

    @property
    def ends(self) -> Collection[int]:
        return self._sequences.ends

    @ends.setter
    def ends(self, tokens: Collection[int]) -> None:
        self._sequences.ends = tokens

    def add(self, request: Request) -> None:
        self._joining.append((request.uid, list(request.tokens), request.max_tokens))
        self._sequences.add(request)

    def remove(self, uids: Iterable[int]) -> None:
        gone = list(uids)
        self._leaving += gone
        self._sequences.remove(gone)

    def step(self) -> StepResult:
        """Computes one more token of every sequence, on all ranks. An exception ends the run."""
        self._tell(STEP)
        step = self._sequences.step()
        # Only rank 0 has samplers, so the other ranks must learn which sequences failed.
        self._leaving += [uid for uid, _ in step.failed]
        return step

    def rest(self) -> None:
        """Makes the other ranks free memory that only computing needs. Called when there are no requests. Raises
        ``LinkError`` if the run has failed."""
        self._agreement.link.check()
        if not self._resting:
            self._tell(REST)
            self._resting = True

    def fail(self, reason: str) -> None:
        self._over = True
        self._agreement.link.fail(reason)

    def close(self) -> None:
        """Ends all sequences, also on the other ranks. Safe to call twice."""
        over, self._over = self._over, True
        try:
            if not over:
                self._tell(END)
        finally:
            self._sequences.close()

    def _tell(self, then: str) -> None:
        orders = json.dumps({"joining": self._joining, "leaving": self._leaving, "then": then})
        self._joining, self._leaving, self._resting = [], [], False
        self._agreement.text(lambda: orders)


def follow(model: nn.Module, sequences: Scheduler) -> None:
    """Applies rank 0's steps to ``sequences`` until rank 0 ends. Every rank makes ``sequences`` with the same
    arguments, at the same time. Raises ``LinkError`` if the run has failed."""
    session: Session = model.outcore
    with contextlib.closing(sequences), contextlib.ExitStack() as busy:
        awake = False
        while (orders := json.loads(session.transport.text(str)))["then"] != END:
            for uid, tokens, most in orders["joining"]:
                sequences.add(Request(uid, tuple(tokens), most))
            sequences.remove(orders["leaving"])
            if orders["then"] == STEP:
                if not awake:
                    awake = True
                    busy.enter_context(generating(model))
                sequences.step()
            else:
                busy.close()
                awake = False
                clear_cache()
