"""Chooses which experts of a layer stay in memory: those that recent tokens used most. Numbers only.

Uses are counted with three half-lives, of a few, some and many tokens, for the experts of a sentence, of a page and of
a subject. LRU, by contrast, forgets an expert that every tenth token uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Numbers of tokens after which a use counts half.
HALF_LIVES = (4, 32, 256)

# Weights of the half-lives. Over 2,500 tokens of code and of prose (py-qwen35moe-30m, a quarter and a half of the
# experts in memory) hit rates differ by .01 between any weights of 1 to 4.
PACES = (1.0, 2.0, 2.0)

Load = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """Experts of a call that are in memory at the same time. ``loads``: (expert, slot) of those to read first."""

    experts: tuple[int, ...]
    loads: tuple[Load, ...]


class ExpertPolicy:
    """The policy of one layer.

    Attributes:
        expert_in: the expert in each slot, -1 for none; int64 (slots,).
        slot_of: the slot of each expert, -1 if it is not in memory; int64 (experts,).
    """

    def __init__(self, experts: int, slots: int) -> None:
        self.expert_in = np.full(slots, -1, np.int64)
        self.slot_of = np.full(experts, -1, np.int64)
        self._counts = np.zeros((len(HALF_LIVES), experts))
        self._decay = 0.5 ** (1 / np.array(HALF_LIVES))[:, None]
        # Scale counts to shares of tokens, so that a long half-life does not count more for being long.
        self._weights = np.array(PACES)[:, None] * (1 - self._decay)

    @property
    def slots(self) -> int:
        return len(self.expert_in)

    @property
    def complete(self) -> bool:
        """Whether all experts are in memory, each in the slot of its number."""
        return self.slots == len(self.slot_of) and bool((self.expert_in >= 0).all())

    @property
    def inside(self) -> npt.NDArray[np.int64]:
        return self.expert_in[self.expert_in >= 0]

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """The value of keeping each expert; float64 (experts,)."""
        scores: npt.NDArray[np.float64] = (self._weights * self._counts).sum(0)
        return scores

    def used(self, tokens: npt.NDArray[np.int64]) -> None:
        """Counts the experts of these tokens, int64 (tokens, experts per token); the last token is the newest."""
        if len(tokens) == 1:
            self._counts *= self._decay
            self._counts[:, tokens[0]] += 1
            return
        ages = np.arange(len(tokens) - 1, -1, -1)
        self._counts *= self._decay ** len(tokens)
        for counts, decay in zip(self._counts, self._decay, strict=True):
            weights = np.repeat(decay**ages, tokens.shape[1])
            counts += np.bincount(tokens.ravel(), weights, minlength=len(counts))

    def groups(self, wanted: Collection[int]) -> Iterator[Group]:
        """Yields the groups of experts in which a call that uses ``wanted`` is computed: one if there are enough slots.

        The caller reads a group's loads, calls ``placed`` with them and computes the group before it takes the next
        group. After the last one, the most valuable of the new and the old experts are in memory.
        """
        numbers = np.fromiter(wanted, np.int64, len(wanted))
        inside = self.slot_of[numbers] >= 0
        here, missing = numbers[inside].tolist(), numbers[~inside].tolist()
        if not missing:
            yield Group(tuple(here), ())
            return
        if self.slots == len(self.slot_of):
            # Each expert has its own slot, so that a full cache equals the layer's own arrays.
            yield Group((*here, *missing), tuple((e, e) for e in missing))
            return
        scores = self.scores
        missing = sorted(missing, key=lambda e: (scores[e], e))
        spare = self.spare(here, scores)
        # The most valuable experts are loaded last, so that they are not replaced by other groups.
        now, missing = missing[: len(spare)], missing[len(spare) :]
        if here or now:
            yield Group((*here, *now), tuple(zip(now, spare, strict=False)))
        while missing:
            # Replace the least valuable experts, at least one.
            best = set(self.best(missing))
            spare = [s for s in self.spare((), scores) if self.expert_in[s] not in best] or [self.spare((), scores)[0]]
            now, missing = missing[: len(spare)], missing[len(spare) :]
            yield Group(tuple(now), tuple(zip(now, spare, strict=False)))

    def best(self, candidates: Collection[int]) -> list[int]:
        """Returns the most valuable of ``candidates`` and the experts in memory, best first, at most one for each
        slot."""
        scores = self.scores
        return sorted({*self.inside.tolist(), *candidates}, key=lambda e: (-scores[e], e))[: self.slots]

    def coming(self, candidates: Collection[int]) -> list[Load]:
        """Returns the (expert, slot) that replace cached experts by more valuable ones of ``candidates``."""
        best = self.best(candidates)
        new = [e for e in best if self.slot_of[e] < 0]
        if self.slots == len(self.slot_of):
            return [(e, e) for e in new]
        stay = set(best)
        return list(zip(new, (s for s in range(self.slots) if int(self.expert_in[s]) not in stay), strict=False))

    def vacate(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (expert := self.expert_in[slot]) >= 0:
                self.slot_of[expert] = -1
            self.expert_in[slot] = -1

    def placed(self, loads: Sequence[Load]) -> None:
        self.vacate([slot for _, slot in loads])
        for expert, slot in loads:
            self.expert_in[slot], self.slot_of[expert] = expert, slot

    def resized(self, slots: int) -> tuple[ExpertPolicy, list[Load]]:
        """Returns a policy with ``slots`` empty slots and the same counts, and the (expert, slot) to move into them."""
        other = ExpertPolicy(len(self.slot_of), slots)
        other._counts = self._counts
        stay = self.best(())[:slots]
        own = slots == len(self.slot_of)
        return other, [(expert, expert if own else slot) for slot, expert in enumerate(stay)]

    def spare(self, wanted: Collection[int], scores: npt.NDArray[np.float64]) -> list[int]:
        """Returns the slots that hold none of ``wanted``, those whose experts have the lowest ``scores`` first."""
        worth = np.where(self.expert_in < 0, -1.0, scores[self.expert_in])
        taken = self.slot_of[np.fromiter(wanted, np.int64, len(wanted))]
        worth[taken[taken >= 0]] = np.inf
        order = np.argsort(worth, kind="stable").tolist()
        free = len(order) - int(np.isinf(worth).sum())
        return order[:free]
