"""Drafting for one text: whether drafts can pay, which drafter guesses, and how many tokens per pass."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ..engine.draft_memory import give_back, plan_without_draft
from ..engine.session import Session
from ..errors import BudgetError
from ..plan.joint_plan import MOST
from .model_runner import ModelRunner
from .passes import HiddenKeeper
from .request import Alone, Request
from .sampling import drawn_by
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting
from .speculative.proposers import Guess, Proposer
from .speculative.sources import for_models

# Passes after which a draft's memory is weighed against layers, each time; layers get it if they save as much of the
# time.
SETTLED, LESS = 12, 0.95


class TextDrafts:
    """Drafting for a text, from its first log-probabilities on.

    Args:
        ends: end-of-text tokens; nothing is drafted after them.
        most: the most tokens drafted per forward pass; None: as many as pay.

    Attributes:
        drafting: the drafter, until ``begin`` is called; None afterwards, or if there is none.
        control: decides how many tokens are drafted; None: nothing is drafted, or not yet.
        source: guesses tokens; None whenever ``control`` is.
        hidden: keeps the hidden states that the drafter uses; None: it needs none.
    """

    def __init__(self, session: Session, request: Request, ends: Collection[int], most: int | None) -> None:
        own = request.alone or Alone()
        self._session, self._request, self._history, self._ends = session, request, own.history, ends
        drafting, self.most = drafting_of(session, own.draft_model, most)
        self.drafting: Drafting | None = drafting if self.most else None
        self.hidden: HiddenKeeper | None = None if self.drafting is None else self.drafting.hidden()
        self.control: DraftLengthPolicy | None = None
        self.source: Proposer | None = None

    def begin(self, logprobs: mx.array, runner: ModelRunner) -> None:
        """Starts drafting if drafts can pay. ``logprobs`` give the vocabulary size; ``runner`` runs the text."""
        session, drafting, self.drafting = self._session, self.drafting, None
        # A model that evaluates inside its forward pass cannot verify several tokens in one pass.
        evaluates = session.transport.eager or (session.streaming is not None and session.streaming.evaluates)
        if drafting is None or evaluates or (session.plan.pools and not self._fits_expert_cache(runner)):
            return
        if session.acceptance is None:
            session.acceptance = AcceptanceStats()
        self.control = DraftLengthPolicy(self.most, session.acceptance)
        self.most = self.control.most
        self.control.foreseen_s = runner.prompt_s
        self.source = drafting.source(
            self.control,
            drawn_by(self._request.sampler),
            logprobs.size,
            lambda: (runner.cache, runner.pending),
            runner.hidden,
        )

    def guesses(self, text: list[int], most: int) -> list[Guess]:
        """Returns guesses of the next tokens: as many as pay, at most ``most``, up to an end-of-text token."""
        assert self.control is not None and self.source is not None
        if self.control.acceptance.sweeps % SETTLED == SETTLED - 1 and self._is_worth_less_than_layers():
            give_back(self._session.residency.layers)
            most = min(most, self._session.size.drafted)
        found = self.control.draft(self.source, [*self._history, *text], most)
        end = next((i + 1 for i, g in enumerate(found) if g.token in self._ends), len(found))
        return found[:end]

    def _is_worth_less_than_layers(self) -> bool:
        """Whether, by what the latest passes took, the draft's memory is worth more to layers: a pass without a draft
        waits for the disk as much less as it reads less."""
        control, session, metrics = self.control, self._session, self._session.metrics
        layers, plan, reading = session.residency.layers, session.plan, metrics.reading()[1]
        if control is None or control.acceptance.plain.seen < 2 or control.shared.tokens or not metrics.bytes_read:
            return False
        if not (layers.adapts and plan.streams and session.size.drafted) or plan.pools or plan.kv_slot:
            return False
        tokens, seconds = control.acceptance.lately
        with contextlib.suppress(BudgetError):
            less = plan.bytes_per_token - plan_without_draft(layers).bytes_per_token
            saved = min(less * reading / metrics.bytes_read, metrics.stall_s / metrics.sweeps)
            return less > (1 - LESS) * plan.bytes_per_token and control.plain_s - saved < LESS * seconds / tokens
        return False

    def _fits_expert_cache(self, runner: ModelRunner) -> bool:
        """Whether drafts can pay if experts are read one by one. Limits ``self.most`` to what expert caches take in one
        pass. (Verified in separate passes, tokens would read and compute as much as without drafts.)"""
        plan, size = self._session.plan, self._session.size
        experts = size.on_demand
        fits = (n for n in range(self.most, 0, -1) if experts is not None and experts.reads(plan, size, n + 1))
        self.most = next(fits, 0)
        return runner.in_blocks and self.most > 0


def drafting_of(
    session: Session, model: nn.Module | None = None, asked: int | None = None
) -> tuple[Drafting | None, int]:
    """Returns the drafter of a text (None: there is none), and the most tokens that it drafts per pass. ``model``: a
    caller's draft model to use instead of the loaded drafter; ``asked``: the caller's limit on the tokens."""
    if asked == 0:
        return None, 0
    drafting = cast(Drafting | None, session.drafting) if model is None else for_models("draft_model").of_model(model)
    most = MOST if session.streaming is None else session.size.drafted
    if not session.transport.alone:
        # A rank with an expert cache would read experts for each guess, and one that evaluates inside its forward pass
        # cannot verify drafts. Then no rank drafts, whatever was asked for.
        evaluates = session.streaming is not None and session.streaming.evaluates
        none = drafting is None or session.plan.pools or evaluates
        (most,) = session.transport.leasts([0 if none else most])
    elif asked is not None and not most:
        most = asked
    return drafting, most if asked is None else min(asked, most)
