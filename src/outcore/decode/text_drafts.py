"""Drafting for one text: whether drafts can pay, which drafter guesses, how many tokens per pass, and where memory
goes: to drafts or to layers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from outcore.engine.resident_layers import ResidentLayers
from outcore.plan.candidate import replanned_bytes

from ..engine.session import Session
from ..errors import BudgetError
from ..plan.joint_plan import MOST, drafted_tokens
from .media import plain
from .model_runner import ModelRunner
from .passes import HiddenKeeper
from .request import Alone, Request
from .sampling import drawn_by
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting
from .speculative.proposers import Guess, NGram, Proposer
from .speculative.sources import for_models

# Passes after which the memory of layers is weighed against that of drafts (twice as many where these have it), each
# time; it goes where it saves as much of the time. Each time that layers got it drafts have to wait twice as long.
SETTLED, LESS = 12, 0.95

# A draft is given up if n-grams alone would take this share of the time for the tokens that both knew.
EQUAL = 0.98

# Share of what n-grams would give if each token that they know were accepted that they do give (simulated: 0.8 to 1).
GIVEN = 0.85


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
        prompt_s: seconds that the prompt took; 0 before it.
    """

    def __init__(self, session: Session, request: Request, ends: Collection[int], most: int | None) -> None:
        own, media = request.alone or Alone(), request.media
        self._session, self._request, self._history = session, request, plain(media, own.history)
        self._ends = ends if media is None else {*ends, media.placeholder}
        self._adapts = session.residency.layers.adapts and session.plan.streams and own.draft_model is None
        if self._adapts and most != 0 and media is None and session.drafting is not None:
            cast(Drafting, session.drafting).new_text(session, most or MOST)
        drafting, self.most = drafting_of(session, own.draft_model, most)
        if self._adapts and most != 0 and not self.most:
            drafting, self.most = cast(Drafting, session.drafting or Drafting()), most or MOST  # these may get memory
        if drafting is not None and media is not None:
            drafting = Drafting()  # drafters with weights do not see images
        self.drafting: Drafting | None = drafting if self.most else None
        self._repeats, self._counted = NGram(), len(request.earlier) + len(request.tokens)
        self.hidden: HiddenKeeper | None = None if self.drafting is None else self.drafting.hidden()
        self.control: DraftLengthPolicy | None = None
        self.source: Proposer | None = None
        self.prompt_s = 0.0

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
        self.control.foreseen_s = self.prompt_s
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
        learnt, size = self.control.acceptance, self._session.size
        if self._adapts and not self.control.shared.tokens:
            self._count_repetitions(text, learnt)
            if learnt.sweeps >= learnt.weighed + SETTLED * (2 if size.drafted else 1):
                self._weigh(self.control, learnt)
            most = min(most, size.drafted, self._session.size.drafted)
        if (streaming := self._session.streaming) is not None and streaming.experts is not None:
            self.control.expert_s = streaming.experts.expert_s
        found = self.control.draft(self.source, [*self._history, *text], most)
        end = next((i + 1 for i, g in enumerate(found) if g.token in self._ends), len(found))
        return found[:end]

    def _count_repetitions(self, text: list[int], learnt: AcceptanceStats) -> None:
        """Counts which of the text's new tokens n-grams would have guessed, whatever drafts."""
        for at in range(self._counted, len(text)):
            self._repeats.begin([*self._history, *text[:at]])
            guess, (tokens, seconds, repeated) = self._repeats.guess(()), learnt.lately
            learnt.lately = tokens, seconds, repeated + (guess is not None and guess.token == text[at])
        self._counted = len(text)

    def _weigh(self, control: DraftLengthPolicy, learnt: AcceptanceStats) -> None:
        """Moves memory between drafts and layers, to where it pays by what the latest passes took: a pass that reads
        less waits for the disk as much less."""
        session, metrics, plan = self._session, self._session.metrics, self._session.plan
        layers, plain_s, learnt.weighed = session.residency.layers, control.plain_s, learnt.sweeps
        if learnt.plain.seen < 2 or not (plan.streams and metrics.bytes_read) or plan.pools or plan.kv_slot:
            return
        byte_s, drafts = metrics.reading()[1] / metrics.bytes_read, layers.draft is not None
        (tokens, seconds, repeated), (count, own) = learnt.lately, learnt.own
        passes = (1 - repeated / tokens) / GIVEN  # for a token, with n-grams
        if drafts or session.size.drafted:
            most_s = metrics.stall_s / metrics.sweeps
            saved_s = min(bytes_moved(layers) * byte_s, most_s)
            without_s = (plain_s - saved_s) * (passes if drafts else 1)
            pays = not (drafts or saved_s > 0) or without_s > LESS * seconds / tokens
            if drafts and pays and count:
                # The same passes without what only the draft knew, and with n-grams' memory alone.
                saved_s = min(bytes_moved(layers, session.size.drafted) * byte_s, most_s)
                pays = (seconds - count * saved_s) / (tokens - own) > EQUAL * seconds / tokens
            if pays:
                return
            give_back(layers)
            learnt.lately = 0.0, 0.0, 0.0
            if not drafts:
                learnt.weighed, learnt.given = learnt.sweeps + SETTLED * learnt.given, 2 * learnt.given + 1
                return
        drafted = drafted_tokens(session.size, plan.budget_bytes, False, self.most)
        more_s = -min(0, bytes_moved(layers, drafted)) * byte_s
        if drafted and passes * (plain_s + more_s) < LESS * plain_s:
            with contextlib.suppress(BudgetError):
                take(layers, drafted)
                session.drafting = session.drafting or Drafting()
                learnt.lately = 0.0, 0.0, 0.0

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


def bytes_moved(layers: ResidentLayers, drafted: int = 0) -> int:
    """Returns how many bytes a pass would read less (below 0: more) if no draft but n-grams had memory, for ``drafted``
    drafted tokens, and layers the rest."""
    session, plan, draft = layers.session, layers.session.plan, layers.draft
    size = session.size if draft is None else draft.profile_without(session.profile, plan.head_streamed).size
    room = plan.budget_bytes - replanned_bytes(replace(size, drafted=drafted), plan, plan.resident)
    count = min(room // max(layer.resident for layer in size.layers), len(plan.streamed) - 1)
    return count * max(layer.read for layer in size.layers)


def give_back(layers: ResidentLayers) -> None:
    """Gives up the draft, or n-grams' room, so that layers come back with the next pass."""
    session = layers.session
    if layers.draft is not None:
        layers.give_up_draft()
    session.resize(replace(session.size, drafted=0))
    layers.replan(session.plan.resident)
    pieces, parts = dict(session.plan.kept), session.profile.parts
    layers.shed_layers |= {i for i in session.plan.streamed if parts[i].unit is not None and i not in pieces}
    layers.regrow(len(layers.shed_layers))
    session.note("the draft did not pay: layers have its memory")


def take(layers: ResidentLayers, drafted: int) -> None:
    """Makes room for drafted tokens, which layers had. Raises BudgetError if there is none."""
    session = layers.session
    size = replace(session.size, drafted=drafted)
    session.residency.accommodate(size, [session.plan.prefill_step], keep_draft=True)
