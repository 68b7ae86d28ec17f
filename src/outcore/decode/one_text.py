"""What a session has to do with one text that it writes: room for it before each sweep, and drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..engine.engine import State
from ..engine.session import Session
from ..plan.draft_cost import MOST
from .hidden_states import HiddenStates
from .model_runner import ModelRunner
from .sampling import Draw, foresee
from .speculative.acceptance import AcceptanceStats
from .speculative.draft_length import DraftLengthPolicy
from .speculative.drafting import Drafting, check_draft_length
from .speculative.speculate import Speculation


@dataclass
class OneText:
    """A text under way.

    Attributes:
        held: tokens that a cache held before the prompt; ``before``: which, as far as they are known.
        most: drafted tokens for a sweep at most.
        bound: tokens that its caches hold at most; None: as many as it has.
        control: of this text's drafts; None: there are none yet.
    """

    session: Session
    held: int
    drafting: Drafting | None
    most: int
    before: Sequence[int]
    sampler: Draw | None
    ends: Collection[int]
    bound: int | None = None
    control: DraftLengthPolicy | None = None

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens, before a sweep."""
        tokens += self.held
        before_sweep(self.session, tokens if self.bound is None else min(tokens, self.bound))
        if self.session.streaming is not None and self.control is not None:
            self.control.most = min(self.control.most, self.session.size.drafted)
            self.look()

    def look(self) -> None:
        """Tell what drafts of the disk, as it is now."""
        session, control = self.session, self.control
        if control is None:
            return
        streaming = session.streaming
        reads = streaming is not None and not control.by_token
        control.own = session.transport.alone
        control.ahead = streaming.ring.ahead if streaming is not None and reads else 0.0
        sweep = session.plan.bytes_per_token if reads else 0
        control.reading_s = control.experience.reading_s(*session.metrics.reading(), sweep)

    def hidden(self) -> HiddenStates | None:
        """What keeps the hidden states that it is drafted from, if it is."""
        return None if self.drafting is None or self.most == 0 else self.drafting.hidden()

    def speculation(self, target: ModelRunner, logprobs: mx.array) -> Speculation | None:
        """How tokens are drafted, if they are."""
        session = self.session
        if self.drafting is None or self.most == 0:
            return None
        if session.plan.pools and not self._fit_to_pools(target):
            return None
        if session.experience is None:
            session.experience = AcceptanceStats()
        self.control = DraftLengthPolicy(self.most, session.experience)
        self.control.by_token = bool(session.plan.pools)
        self.control.foreseen_s = target.prompt_s
        how = foresee(self.sampler, logprobs.dtype)
        source = self.drafting.source(self.control, how, logprobs.size, target.state, target.hidden)
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        room = session.plan.budget_bytes - session.plan.peak_bytes if session.plan.streams else 0
        return Speculation(source, self.control, session.metrics, self.ends, self.before, max(0, room))

    def _fit_to_pools(self, target: ModelRunner) -> bool:
        """Whether drafts can be worth their time where experts are read one by one: passes of a token each would read,
        and compute, as much for each as plain decoding. No more are drafted than go to the pools."""
        plan, size = self.session.plan, self.session.size
        fits = (n for n in range(self.most, 0, -1) if plan.goes_to_pools(size, n + 1))
        self.most = next(fits, 0)
        return target.in_blocks and self.most > 0

    def count(self, tokens: int) -> None:
        """So many tokens of it went into the cache."""
        self.session.in_cache = tokens


def drafting_of(session: Session, kwargs: dict[str, Any]) -> tuple[Drafting | None, int]:
    """What drafts, taken from the arguments or as the model was loaded, and how many tokens for a sweep at most."""
    model, asked = kwargs.pop("draft_model", None), kwargs.pop("num_draft_tokens", None)
    drafting = cast(Drafting | None, session.drafting) if model is None else Drafting("model", "draft_model", model)
    most = MOST if session.streaming is None else session.size.drafted
    if not session.transport.alone:
        # Who has experts in pools would read as many for each guess; what evaluates on the way cannot be verified while
        # it is streamed, on whichever rank. Then nobody drafts, whatever was asked for.
        evaluates = session.streaming is not None and session.streaming.evaluates
        none = drafting is None or session.plan.pools or evaluates
        (most,) = session.transport.leasts([0 if none else most])
        return drafting, most if asked is None else min(check_draft_length(asked), most)
    return drafting, most if asked is None else min(check_draft_length(asked), most or asked)


def make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
    """Room for a context of that many tokens, a prompt, and bytes of caches to go back to. Returns tokens of the prompt
    to compute at a time."""
    if session.state is State.CLOSED:  # what it holds then stays as it is
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, kept)


def before_sweep(session: Session, tokens: int) -> None:
    """Room for a context of that many tokens; where nothing is streamed, a look at memory too, which a streamed model
    takes by itself."""
    make_room(session, tokens)
    session.before_pass()
