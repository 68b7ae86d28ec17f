"""What is drafted of one text: whether it can be worth its time, by what, and how much for a pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ..engine.session import Session
from ..plan.draft_cost import MOST
from .model_runner import ModelRunner
from .passes import HiddenKeeper
from .request import Alone, Request
from .sampling import drawn_by
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting
from .speculative.proposers import Guess, Proposer
from .speculative.sources import for_models


class TextDrafts:
    """What is drafted of a text, once its first log-probabilities are known.

    Args:
        ends: tokens after which nothing is drafted.
        most: tokens drafted for a forward pass at most; None: as many as are worth it.

    Attributes:
        drafting: what is to draft once they are; None: it does, or nothing can.
        control: decides how much is drafted; None: nothing is, or not yet.
        source: guesses tokens; None with ``control``.
        hidden: keeps what the source is made from of the text's hidden states; None: it needs none.
    """

    def __init__(self, session: Session, request: Request, ends: Collection[int], most: int | None) -> None:
        own = request.alone or Alone()
        self._session, self._request, self._history, self._ends = session, request, own.history, ends
        drafting, self.most = drafting_of(session, own.draft_model, most)
        self.drafting: Drafting | None = drafting if self.most else None
        self.hidden: HiddenKeeper | None = None if self.drafting is None else self.drafting.hidden()
        self.control: DraftLengthPolicy | None = None
        self.source: Proposer | None = None

    def begin(self, logprobs: mx.array, target: ModelRunner) -> None:
        """Have tokens be drafted whose log-probabilities are like these, if that can be worth its time; ``target`` runs
        the text."""
        session, drafting, self.drafting = self._session, self.drafting, None
        # What evaluates on the way cannot be verified in one pass.
        evaluates = session.transport.eager or (session.streaming is not None and session.streaming.evaluates)
        if drafting is None or evaluates or (session.plan.pools and not self._fit_to_pools(target)):
            return
        if session.acceptance is None:
            session.acceptance = AcceptanceStats()
        self.control = DraftLengthPolicy(self.most, session.acceptance)
        self.most = self.control.most
        self.control.foreseen_s = target.prompt_s
        self.source = drafting.source(
            self.control,
            drawn_by(self._request.sampler),
            logprobs.size,
            lambda: (target.cache, target.pending),
            target.hidden,
        )

    def guesses(self, text: list[int], most: int) -> list[Guess]:
        """What follows the text perhaps, as is worth a pass's time, up to a token that ends the text."""
        assert self.control is not None and self.source is not None
        found = self.control.draft(self.source, [*self._history, *text], most)
        end = next((i + 1 for i, g in enumerate(found) if g.token in self._ends), len(found))
        return found[:end]

    def _fit_to_pools(self, target: ModelRunner) -> bool:
        """Whether drafts can be worth their time where experts are read one by one: passes of a token each would read,
        and compute, as much for each as plain decoding. No more are drafted than go to the pools."""
        plan, size = self._session.plan, self._session.size
        experts = size.on_demand
        fits = (n for n in range(self.most, 0, -1) if experts is not None and experts.reads(plan, size, n + 1))
        self.most = next(fits, 0)
        return target.in_blocks and self.most > 0


def drafting_of(
    session: Session, model: nn.Module | None = None, asked: int | None = None
) -> tuple[Drafting | None, int]:
    """What drafts (``Drafting``; None: nothing), and how many tokens for a pass at most.

    Args:
        model: in place of what was loaded for it. asked: how many; None: as many as are worth it.
    """
    if asked == 0:
        return None, 0
    drafting = cast(Drafting | None, session.drafting) if model is None else for_models("draft_model").of_model(model)
    most = MOST if session.streaming is None else session.size.drafted
    if not session.transport.alone:
        # Who has experts in pools would read as many for each guess; what evaluates on the way cannot be verified while
        # it is streamed, on whichever rank. Then nobody drafts, whatever was asked for.
        evaluates = session.streaming is not None and session.streaming.evaluates
        none = drafting is None or session.plan.pools or evaluates
        (most,) = session.transport.leasts([0 if none else most])
    elif asked is not None and not most:
        most = asked
    return drafting, most if asked is None else min(asked, most)
