"""The plan for a model together with its draft, the smallest budget that works for both, and the fastest draft.

The budget pays for the draft's weights and caches and for drafted tokens' logits. Of several ways to make room, the
first that fits is taken. If each guess is right with chance p, a pass over n guesses yields (1 - p ** (n + 1)) / (1 -
p) tokens, including the model's own (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import BudgetError, called
from ..sizes import format_size
from .candidate import replan
from .machine_profile import Calibration
from .model_size import ModelSize
from .plan import ANSWER, Plan
from .planner import ASSUMED, make_plan, reading_sizes, refusal, resident_budget, smallest_budget
from .prediction import computing_s, sweep_s

# Values of ``--draft`` in addition to the kinds that packages provide.
AUTO, NONE, NGRAM = "auto", "none", "ngram"

# One in ``SHARE`` bytes of the budget is for drafted tokens' logits; at least ``FEW`` tokens if the user chose a draft.
SHARE, FEW = 32, 8

# Most drafted tokens per pass.
MOST = 32

# Assumed chance that a draft model's guess is accepted, before any was observed.
ASSUMED_CHANCE = 0.6


@dataclass(frozen=True)
class Draft:
    """A draft before any of its weights is read. Sizes in bytes.

    Attributes:
        kind: ``ngram``, or the kind of the package that provides it.
        weights: its weights in memory.
        head: its further weights if the model's head is streamed.
        cache, growing: its caches, as in ``ModelSize``.
        uses_head: whether it drafts with the model's own head, which then stays in memory.
        copies_model: whether it is a copy of the model's layers that continues from the model's own caches. Then these
            stay in memory, and a guess takes as long as a token of the resident model.
        reads: the numbers of the model's layers whose outputs it reads; -1: a module that is no layer with weights.
        chance: assumed chance that a guess is accepted, before any was observed; ``assumed``: where it is from, if that
            is told. ``published``: the least and most tokens a pass of which it is the middle, and of how many guesses.
        block: the most guesses, which take as long as one; 0: each takes its time.
        detail: private data of the package.
    """

    kind: str
    name: str
    weights: int = 0
    head: int = 0
    cache: int = 0
    growing: tuple[tuple[int, int | None], ...] = ()
    uses_head: bool = False
    copies_model: bool = False
    reads: tuple[int, ...] = ()
    chance: float = ASSUMED_CHANCE
    assumed: str = ""
    published: tuple[float, float, int] = 1.0, 1.0, MOST
    block: int = 0
    detail: Any = field(default=None, compare=False, repr=False)

    def added_to(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """Returns the model's size including this draft."""
        weights = size.non_layer + self.weights + (self.head if head_streamed else 0)
        return replace(size, non_layer=weights, cache=size.cache + self.cache, growing=size.growing + self.growing)


def drafted_tokens(size: ModelSize, budget: int, explicit: bool, most: int = MOST) -> int:
    """Returns how many drafted tokens' logits fit a share of the budget, at most ``most``; ``FEW`` if ``explicit``."""
    room = budget // SHARE // max(1, size.logits_row)
    return min(most, max(room, FEW if explicit else 0))


def guess_s(size: ModelSize, draft: Draft, calibration: Calibration) -> float:
    """Returns seconds in which a resident draft computes one token."""
    outside = size.non_layer - size.tables
    if draft.copies_model:
        layers = sum(computing_s(x.kind, x.joined or x.resident, calibration, [(1, 1)]) for x in size.layers)
        return layers + computing_s(size.rest_kind, outside, calibration, [(1, 1)]) + calibration.sync_s
    # A draft model computes its own weights, and the model's head if it uses that.
    own = computing_s(size.rest_kind, outside - draft.weights, calibration, [(1, 1)]) if draft.uses_head else 0.0
    return draft.weights / calibration.weight_gbps / 1e9 + own + calibration.sync_s


# Most slots where a draft model runs and memory is left: with 28M parameters, 20 MB/s and nothing resident, a token
# took .88 of the time with 8 slots that it took with 3.
AHEAD = 8

POINTS = 16
# A budget is enough if it gives this share of the fastest speed.
NEAR = 0.95

# If streaming reaches this share of the resident speed, computing is the limit: handing units to the device takes the
# rest of the time.
COMPUTING = 0.9


@dataclass(frozen=True)
class Planned:
    """A plan, its draft, and the model's size including the draft."""

    plan: Plan
    size: ModelSize
    draft: Draft | None


@dataclass(frozen=True)
class Planning:
    """Makes plans for any budget.

    Attributes:
        size: the model's size without a draft.
        kind: the draft's, as from ``parse_draft``; ``auto`` drafts only if the budget has room.
        blocks: whether all drafted tokens are computed in one pass. If not, plans with an expert cache do not draft:
            each drafted token would read its own experts.
        most: most drafted tokens per pass.
        options: arguments of ``make_plan``.
    """

    size: ModelSize
    kind: str = NONE
    draft: Draft | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: bool = True
    most: int = MOST
    _made: dict[Hashable, tuple[Calibration, Plan]] = field(default_factory=dict, compare=False)

    def at(self, budget: int, calibration: Calibration = ASSUMED) -> Planned:
        """Returns the plan within ``budget`` bytes.

        Raises:
            BudgetError: the budget is too small; the message names the smallest that works, the context and the draft.
            UsageError: as ``make_plan``.
        """
        if budget < self.smallest:
            raise BudgetError(self.refusal(budget), self.smallest)
        for size, head in self._ways(budget):
            try:
                plan = self._make(size, budget, head, calibration)
            except BudgetError:
                continue
            if plan.pools and not self.blocks:
                return Planned(self._make(self.size, budget, head, calibration), self.size, None)
            if self.kind != AUTO:
                return Planned(plan, size, self.draft)
            return self._with_drafted_tokens(plan, budget, calibration)
        return replace(self, size=reading_sizes(self.size)[1]).at(budget, calibration)

    @cached_property
    def smallest(self) -> int:
        """The smallest budget in bytes that works."""
        least = replace(self, size=reading_sizes(self.size)[-1])._ways(0)
        return min(smallest_budget(size, **self._options(head)) for size, head in least)

    @property
    def largest(self) -> ModelSize:
        """The model's size with its draft and with the drafted tokens of a budget that keeps everything resident."""
        if self.kind in (AUTO, NONE) or self.draft is None:
            return self.size
        budget = resident_budget(self.draft.added_to(self.size, False))
        drafted = drafted_tokens(self.size, budget, True, min(self.most, self.draft.block or MOST))
        return self.draft.added_to(replace(self.size, drafted=drafted), False)

    def _ways(self, budget: int) -> Iterator[tuple[ModelSize, bool | None]]:
        """Yields the model's size with its draft, and whether the head is resident, the preferred first.

        As many drafted tokens as the budget allows come before a few; a resident head before a streamed one, with which
        a draft that copies the model needs a head of its own.
        """
        head, draft = self.options.get("head_resident"), self.draft
        if self.kind in (AUTO, NONE) or draft is None:
            yield self.size, head
            return
        both = draft.head and self.size.head is not None and head is None
        heads = [True] if draft.uses_head else [True, False] if both else [head]
        most = min(self.most, draft.block or MOST)
        for drafted in dict.fromkeys(drafted_tokens(self.size, b, True, most) for b in (budget, 0)):
            for stays in heads:
                streamed = stays is False and bool(draft.head) and self.size.head is not None
                yield draft.added_to(replace(self.size, drafted=drafted), streamed), stays

    def _with_drafted_tokens(self, plan: Plan, budget: int, calibration: Calibration) -> Planned:
        """Adds room for drafted tokens if something is streamed and the budget has room. Not for plans with an expert
        cache, since each drafted token uses experts of its own."""
        size = replace(self.size, drafted=drafted_tokens(self.size, budget, False, self.most))
        if plan.streams and not plan.pools and size.drafted and self.draft is not None:
            try:
                with_draft = self._make(size, budget, self.options.get("head_resident"), calibration)
            except BudgetError:
                return Planned(plan, self.size, None)
            if not with_draft.kv_slot > plan.kv_slot == 0:  # KV is not offloaded to make room for drafts
                return Planned(with_draft, size, self.draft)
        return Planned(plan, self.size, None)

    def _make(self, size: ModelSize, budget: int, head: bool | None, calibration: Calibration) -> Plan:
        key = size, budget, head, id(calibration)
        if key not in self._made:  # copies by ``dataclasses.replace`` share this dictionary
            plan = make_plan(size, budget, calibration=calibration, **self._options(head))
            self._made[key] = calibration, plan  # keeping the calibration keeps its id from being reused
        plan = self._made[key][1]
        # With several ranks one drafts, and the others have the same time to read ahead.
        if self.draft is not None and self.draft.name != NGRAM and self.options.get("slots") is None:
            plan = _read_ahead(size, plan, calibration)
        return replace(plan, smallest_budget_bytes=self.smallest)

    def _options(self, head: bool | None) -> dict[str, Any]:
        return {**self.options, "head_resident": head}

    def refusal(self, budget: int) -> str:
        """Returns the message for a budget that is too small."""
        also = ""
        if self.draft is not None and self.kind != AUTO:
            weights = f" (its weights take {format_size(self.draft.weights)})" if self.draft.weights else ""
            also = f" and {called('draft')} {self.draft.name}{weights}"
        return refusal(self.size, budget, self.smallest, self.options.get("resident"), also)


def _read_ahead(size: ModelSize, plan: Plan, calibration: Calibration) -> Plan:
    """Adds slots while memory is left: the disk fills them while a draft model computes."""
    if not plan.streams or plan.pools:
        return plan
    for slots in range(plan.slots + 1, min(AHEAD, len(plan.parts)) + 1):
        wider = replan(size, replace(plan, slots=slots), plan.resident, calibration)
        if wider.peak_bytes > plan.budget_bytes:
            break
        plan = wider
    return plan


def speed_curve(
    planning: Planning, calibration: Calibration, *, points: int = POINTS, also: Sequence[int] = ()
) -> list[Plan]:
    """Returns plans for evenly spaced budgets, from the smallest that works to one with everything resident.

    Args:
        also: further budgets between these.
    """
    least = planning.smallest
    most = max(least, resident_budget(planning.largest, planning.options.get("prefill_step")))
    steps = [least + i * (most - least) // (points - 1) for i in range(points)]
    budgets = sorted({*steps, *(b for b in also if least <= b <= most)})
    return [planning.at(budget, calibration).plan for budget in budgets]


def knee(plans: Sequence[Plan], available: int) -> Plan | None:
    """Returns, of the plans within ``available`` bytes, the smallest that is about as fast as the fastest; or None."""
    fitting = [p for p in plans if p.budget_bytes <= available]
    fastest = min((p.token_s for p in fitting), default=0.0)
    return next((p for p in fitting if p.token_s <= fastest / NEAR), None)


def computing_from(plans: Sequence[Plan]) -> Plan | None:
    """Returns the streaming plan from whose budget on computing is the limit: it and all larger plans are about as fast
    as the resident one. None if there is none, or the last plan is not fully resident.
    """
    if plans[-1].streams:
        return None
    slowest = plans[-1].token_s / COMPUTING
    first = next(i for i in range(len(plans)) if all(p.token_s <= slowest for p in plans[i:]))
    return plans[first] if plans[first].streams else None


# Draft lengths that are compared.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Tokens per pass assumed for n-gram drafts, and guesses per pass.
REPEATED, TRIED = 1.3, 2

# A draft is chosen over a simpler one if it takes less than this share of its time.
MARGIN = 0.97


@dataclass(frozen=True)
class Choice:
    """A plan with a draft, and its expected speed.

    Attributes:
        planned: the plan; None if the draft does not fit or is not possible: ``reason`` says why.
        drafted: guesses per pass.
        tokens: expected tokens per pass.
        token_s: expected seconds per token of a text.
        first: bytes to write once, before the first answer.
        measured: whether its speed follows from what was measured on this machine.
    """

    name: str
    planned: Planned | None = None
    reason: str = ""
    drafted: int = 0
    tokens: float = 1.0
    token_s: float = float("inf")
    first: int = 0
    measured: bool = True

    @property
    def cost(self) -> float:
        """What the fastest has least of: seconds of a token, with its share of a prompt's further readings. Where
        nothing was measured only bytes are known; there guesses count as free: the passes show what they cost."""
        if self.planned is None:
            return self.token_s
        plan, draft = self.planned.plan, self.planned.draft
        again = self.planned.size.further_readings(plan.prefill_step) / ANSWER
        if self.measured:
            return self.token_s + again * plan.token_s
        share = 1.0 if draft is None else 1 / REPEATED if draft.kind == NGRAM else 1 - draft.chance
        return float("inf") if draft is not None and draft.copies_model else plan.bytes_per_token * (share + again)


def expected(planned: Planned, calibration: Calibration, name: str, blocks: bool, first: int = 0) -> Choice:
    """Returns the expected speed of a plan with its draft.

    Args:
        blocks: whether one pass verifies all guesses; otherwise each guess takes a pass.
    """
    size, plan, draft = planned.size, planned.plan, planned.draft

    def pass_s(guesses: int) -> float:
        return sweep_s(size, plan, calibration, guesses + 1, blocks)

    best = Choice(name, planned, token_s=pass_s(0), first=first, measured=calibration.measured)
    if draft is None:
        return best
    if draft.kind == NGRAM:
        tried = min(TRIED, size.drafted)
        token_s = _repeating(pass_s(0), pass_s(tried), REPEATED) / REPEATED
        return min((replace(best, drafted=tried, tokens=REPEATED, token_s=token_s), best), key=lambda c: c.token_s)
    guess = guess_s(size, draft, calibration)
    most = min(size.drafted, draft.block or MOST, draft.published[2])
    for n in (n for n in (*LENGTHS, draft.block, draft.published[2]) if 0 < n <= most):
        tokens = _tokens(draft.chance, n)
        token_s = (pass_s(n) + (1 if draft.block else n) * guess) / tokens
        if token_s < best.token_s:
            best = replace(best, drafted=n, tokens=tokens, token_s=token_s)
    return best


def pays_for_several(
    size: ModelSize,
    plan: Plan,
    calibration: Calibration,
    texts: int,
    blocks: bool,
    *,
    tokens: float | None = None,
    chance: float | None = None,
    guess_s: float = 0.0,
) -> bool:
    """Returns whether texts that share passes are faster with drafts than with one token each, by simulation.

    With drafts each text needs a pass of its own; without, one pass serves all of them.

    Args:
        tokens: observed tokens per pass with n-gram drafts; None: not observed.
        chance: that a guess of another draft is right, which takes ``guess_s`` seconds; None: n-gram drafts.
    """
    together = sweep_s(size, plan, calibration, texts, True)  # one batched pass
    alone = sweep_s(size, plan, calibration, 1, blocks, texts)
    for n in (n for n in LENGTHS if 0 < n <= size.drafted // texts):
        seconds = sweep_s(size, plan, calibration, n + 1, blocks, texts) + n * texts * guess_s
        if chance is not None:
            given = _tokens(chance, n)
        elif n > TRIED:
            break
        else:
            given = tokens or REPEATED
            seconds = _repeating(alone, seconds, given)
        if seconds < MARGIN * given * together:
            return True
    return False


def _tokens(chance: float, guesses: int) -> float:
    """Returns the expected tokens of a pass that verifies so many guesses."""
    return (1 - chance ** (guesses + 1)) / (1 - chance)


def _repeating(plain: float, tried: float, tokens: float) -> float:
    """Returns mean seconds of a pass: ``tried`` with n-gram guesses, where the text repeats itself; else ``plain``."""
    return plain + min(1.0, tokens - 1) * (tried - plain)


def fastest(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice; among nearly equal ones, the first. Where nothing was measured, that is the one with
    the fewest bytes for a token, of those that need no copy of the model. At least one must have a plan."""
    possible = [c for c in choices if c.planned is not None]
    best = possible[0]
    for choice in possible[1:]:
        if choice.cost < best.cost * MARGIN:
            best = choice
    return best
