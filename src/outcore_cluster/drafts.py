"""What drafts for a model that ranks share: the first rank guesses for all of them, and tells the others its guesses.

A copy of the model goes on from the model's own caches, of which each rank has those of its own layers. So the first
rank's copy of others' layers fills their caches there (``Hops.fill``), from the inputs that those layers have. Where
these cannot be sent, a copy is refused. Another model has caches of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outcore.decode.speculative.drafting import draft_of_itself
from outcore.decode.speculative.self_draft import self_draft
from outcore.engine.model_profile import ModelProfile
from outcore.errors import BudgetError, OutcoreError, UsageError
from outcore.loading.draft_choices import cannot_be_written, copy_to_write, least_bytes, other_ways
from outcore.loading.draft_experience import seen_before
from outcore.loading.opened import draft_named
from outcore.options import LoadOptions
from outcore.plan.draft_choice import Choice, expected_of, fastest
from outcore.plan.draft_cost import AUTO, MTP, NGRAM, NONE, SELF, Draft, guess_s
from outcore.plan.joint_plan import Planning
from outcore.plan.machine_profile import Calibration
from outcore.sizes import format_size

from .cuts import Cuts
from .layer_shares import HOP_S, RankMeans, beside_rings, shared_sweep_s
from .link.link import Link
from .rank_share import share_out
from .stage import fillable


@dataclass(frozen=True)
class Sharing:
    """A model that is about to be shared out, as the first rank knows it.

    Attributes:
        profile: of the whole model.
        means: what ranks have for layers beside what drafts. ``owners``: the rank of each layer then, in the order of
            calls. ``hop_s``: seconds from one rank to another.
    """

    profile: ModelProfile
    cuts: Cuts
    link: Link
    means: Callable[[Draft | None], list[RankMeans]]
    owners: Callable[[Draft | None], tuple[int, ...]]
    hop_s: float = HOP_S

    def by_layer(self, owners: Sequence[int]) -> list[int]:
        """The rank of each layer by its number."""
        return [owner for _, owner in sorted(zip(self.cuts.order, owners, strict=True))]

    @property
    def nbytes(self) -> list[int]:
        """Of each layer, in the order of calls."""
        return [self.profile.size.layers[i].resident for i in self.cuts.order]


@dataclass(frozen=True)
class SharedModel:
    """How a model is shared out.

    Attributes:
        owners: the rank of each layer, in the order of calls. ``profile``: what this rank holds.
        draft: what drafts. ``choices``: what ``auto`` chose from; ``choice``: what it is expected to give.
        filled: the draft goes on from caches that are filled for it.
    """

    owners: tuple[int, ...]
    draft: Draft | None
    choices: tuple[Choice, ...] = ()
    choice: Choice | None = None
    filled: bool = False
    profile: Any = None


@dataclass(frozen=True)
class RankedDrafts:
    """Opens, weighs and chooses what drafts on the first rank.

    Attributes:
        kind, which: as from ``parse_draft``. ``folder``: of the model.
        budget: bytes of the first rank.
        ring: options of plans, as in ``Planning``. ``blocks``: guesses are computed in one pass.
    """

    kind: str
    which: int | str | None
    folder: Path
    o: LoadOptions
    calibration: Calibration
    budget: int
    ring: dict[str, Any] = field(default_factory=dict)
    blocks: bool = False

    def choose(self, sharing: Sharing) -> SharedModel:
        """What was asked for, or of ``auto`` what is fastest.

        Raises:
            UsageError, CheckpointError: it cannot draft.
        """
        if self.kind != AUTO:
            asked = self._shared(sharing, self._opened(self.kind, self.which, sharing))
            with contextlib.suppress(BudgetError):  # the plan says so
                return replace(asked, choice=self._way(sharing, asked.draft))
            return asked
        plain = SharedModel(sharing.owners(None), Draft(NGRAM, NGRAM))
        profile = sharing.profile
        experts = any(layer.experts is not None for layer in profile.size.layers)
        if experts or profile.evaluates or sum(r.memory for r in sharing.means(None)) >= sum(sharing.nbytes):
            return plain  # what is tried beside it is no gain, or is not tried
        try:
            choices = [self._way(sharing, draft) for draft in (None, plain.draft)]
        except BudgetError:
            return SharedModel(
                sharing.owners(None), None
            )  # it may be room for that; if not, the plan says what would be
        drafts = {NONE: None, NGRAM: plain.draft}
        for name, kind, which in other_ways(profile, self.folder):
            choice, draft = self._other(sharing, name, kind, which)
            choices.append(choice)
            drafts[choice.name] = draft
        best = fastest(choices)
        chosen = drafts[best.name] if best.planned is not None else plain.draft
        return replace(self._shared(sharing, chosen), choices=tuple(choices), choice=best)

    def _opened(self, kind: str, which: int | str | None, sharing: Sharing) -> Draft | None:
        if not isinstance(which, int):
            return draft_named(kind, which, sharing.profile, self.folder, self.o.dtype)
        draft = draft_of_itself(sharing.profile, which)
        if sharing.profile.lazy.share is not None:
            raise UsageError(
                f"{self.o.name('draft')} {draft.name}: a copy is made of all layers, and this folder has those of one "
                "machine; ngram or another model can draft"
            )
        if sharing.profile.evaluates or not fillable(sharing.cuts, sharing.by_layer(sharing.owners(draft))):
            raise UsageError(
                f"{self.o.name('draft')} {draft.name}: a copy of this model cannot draft over several machines; "
                "ngram or another model can"
            )
        return draft

    def _shared(self, sharing: Sharing, draft: Draft | None) -> SharedModel:
        return SharedModel(sharing.owners(draft), draft, filled=is_filled(draft))

    def _other(self, sharing: Sharing, name: str, kind: str, which: int | str | None) -> tuple[Choice, Draft | None]:
        """A way that takes memory; its choice says why it cannot be."""
        profile = sharing.profile
        if kind == MTP:
            return Choice(name, reason="not over several machines"), None
        if isinstance(which, int) and (least := least_bytes(profile, which)) > self.budget:
            return Choice(name, reason=f"needs more than {format_size(least)}"), None
        try:
            draft, first = self._opened(kind, which, sharing), 0
            if isinstance(which, int):
                copy = self_draft(profile, which)
                first = copy_to_write(profile, copy)
                if first and (reason := cannot_be_written(first, copy.folder)):
                    return Choice(name, reason=reason), None
            return self._way(sharing, draft, first), draft
        except OutcoreError as e:
            return Choice(name, reason=str(e)), None

    def _way(self, sharing: Sharing, draft: Draft | None, first: int = 0) -> Choice:
        """What a way to draft is expected to give, by simulated sweeps over all ranks.

        Raises:
            BudgetError: it has no room on the first rank.
        """
        profile, owners, means = sharing.profile, sharing.owners(draft), sharing.means(draft)
        size = share_out(profile, sharing.cuts, sharing.link, owners, filled=is_filled(draft)).size
        kind, name = (NONE, NONE) if draft is None else (draft.kind, draft.name)
        planned = Planning(size, kind, draft, self.ring, self.blocks).at(self.budget, self.calibration)
        left, nbytes = beside_rings(means), sharing.nbytes

        def swept(guesses: int) -> float:
            return shared_sweep_s(nbytes, owners, left, sharing.hop_s, passes=1 if self.blocks else guesses + 1)

        seen = seen_before(profile.lazy.checkpoint.identity(), name, self.o.dtype)
        guess = 0.0
        if draft is not None and draft.kind != NGRAM:
            guess = seen.guess_s or guess_s(profile.size, draft, self.calibration)
        return expected_of(planned, name, seen, guess, swept, first)


def is_filled(draft: Draft | None) -> bool:
    """Whether the first rank's caches of others' layers are filled for what drafts."""
    return draft is not None and draft.kind == SELF
