"""Sequences that come and go on a model that several ranks share: the first one decides, the others follow.

Before each step the first rank says which sequences join and which leave, and every rank does the same with its own
``Scheduler``. Samplers, processors and stop strings are the first one's alone: of a sequence others know its prompt
and how long its answer may be, and are told each token.
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

from .agreement import RankAgreement

STEP, REST, END = "step", "rest", "end"
"""What follows on who joins and who leaves: the next step; nothing for now; nothing more."""


class RankLeader:
    """The first rank's ``Scheduler``, which the other ranks' do as.

    Args:
        agreement: with them.
    """

    def __init__(self, sequences: Scheduler, agreement: RankAgreement) -> None:
        self._sequences, self._agreement = sequences, agreement
        self._joining: list[tuple[int, list[int], int]] = []  # number, tokens and most tokens of the answer
        self._leaving: list[int] = []
        self._over = self._resting = False

    @property
    def running(self) -> int:
        """Sequences under way."""
        return self._sequences.running

    @property
    def ends(self) -> Collection[int]:
        """As ``Scheduler.ends``."""
        return self._sequences.ends

    @ends.setter
    def ends(self, tokens: Collection[int]) -> None:
        self._sequences.ends = tokens

    def add(self, request: Request) -> None:
        """Have a sequence join as soon as there is room for it on all ranks."""
        self._joining.append((request.uid, list(request.tokens), request.max_tokens))
        self._sequences.add(request)

    def remove(self, uids: Iterable[int]) -> None:
        """Sequences have ended, or nobody wants them any more."""
        gone = list(uids)
        self._leaving += gone
        self._sequences.remove(gone)

    def step(self) -> StepResult:
        """One more token of every sequence, on all ranks.

        Raises:
            Exception: it failed, here or elsewhere, and no rank can go on.
        """
        self._tell(STEP)
        step = self._sequences.step()
        # What a sequence's own sampler raised is known here only.
        self._leaving += [uid for uid, _ in step.failed]
        return step

    def rest(self) -> None:
        """Nobody asks for anything now: others give back what they need to compute only.

        Raises:
            LinkError: the run has failed.
        """
        self._agreement.link.check()
        if not self._resting:
            self._tell(REST)
            self._resting = True

    def fail(self, reason: str) -> None:
        """No rank can go on."""
        self._over = True
        self._agreement.link.fail(reason)

    def close(self) -> None:
        """End all sequences; others follow no longer. Safe to call twice."""
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
    """Do as the first rank says, until it says that it was all.

    Args:
        sequences: made with what the first rank's were made with, at the same time.

    Raises:
        LinkError: the run has failed. Exception: this rank cannot go on.
    """
    session: Session = model.outcore
    with contextlib.closing(sequences), contextlib.ExitStack() as busy:
        awake = False
        while (said := json.loads(session.transport.text(str)))["then"] != END:
            for uid, tokens, most in said["joining"]:
                sequences.add(Request(uid, tuple(tokens), most))
            sequences.remove(said["leaving"])
            if said["then"] == STEP:
                if not awake:
                    awake = True
                    busy.enter_context(generating(model))
                sequences.step()
            else:
                busy.close()
                awake = False
                clear_cache()
