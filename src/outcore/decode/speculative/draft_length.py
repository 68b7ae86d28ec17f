"""Decides how many tokens to draft, from acceptance statistics and from measured times of drafting and of passes.

Nothing is assumed about the machine. If the disk is the limit, a pass takes as long for thirty tokens as for one;
elsewhere, more tokens take longer. Times are measured while tokens are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan.joint_plan import MOST, NGRAM
from .acceptance import FADE, AcceptanceStats, Seconds
from .proposers import AGAINST, Guess, Proposer

# The most guesses for the first pass with a draft.
UNTRIED = 4

# Drafts of a source after which its cost is known; the first drafts include compiling kernels.
SURE = 3

# Share of time for probing: drafting a token although drafts did not pay, or a pass without a draft although they do.
PROBE = 0.01


@dataclass(frozen=True)
class SharedPass:
    """The part of other texts in a shared pass: tokens computed for them, and tokens that they are expected to get."""

    tokens: int = 0
    expected: float = 0.0


class DraftLengthPolicy:
    """Decides for each drafted token whether it is worth its time.

    A draft goes on while the expected tokens of a pass, (1 + p1 + p1 p2 + ...), grow faster than the time of drafting
    and the pass. Chances are counted by kind of guess. Drafting and the pass are measured as one time, by source, since
    the disk reads ahead while tokens are drafted. A pass with a draft takes as long as one without, or as computing and
    drafting, which grow with the number of tokens, whichever is longer. Where experts are read one by one, a pass over
    more tokens reads more of them: that is learned from all passes.

    Args:
        most: the most drafted tokens.
        acceptance: statistics of earlier texts, to which this text's are added.
        fixed: always draft ``most`` tokens, or as many as the source guesses.

    Attributes:
        foreseen_s: expected seconds of a pass before any was seen.
        shared: the other texts' part of the next pass.
        expert_s: seconds in which an expert is read; 0: experts are not read one by one.
        expected: tokens that the last draft is expected to yield, with the one that the model itself adds.
        source: name of the last draft's source; None: there was no draft. ``spent``: seconds that drafting took.
    """

    def __init__(
        self,
        most: int = MOST,
        acceptance: AcceptanceStats | None = None,
        *,
        fixed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.acceptance = acceptance or AcceptanceStats()
        self.acceptance.another_text()
        self.most = most
        self.fixed = fixed
        self.foreseen_s = self.spent = self.expert_s = 0.0
        self.source: str | None = None
        self.shared = SharedPass()
        self.expected = 1.0
        self._clock = clock
        self._seen: dict[str, int] = {}  # tokens of the text that each source has taken in
        self._alike_s = 0.0  # seconds of the latest passes that all had a draft, or all had none
        self._drafted = False  # whether these passes had a draft

    def seconds(self, source: str, tokens: int) -> float:
        """Returns the expected seconds of drafting by a source plus the shared pass with ``tokens`` tokens of this
        text; 0 if unknown."""
        learnt, of_all = self.acceptance, tokens + self.shared.tokens
        line = learnt.drafted.get(source)
        found = max(self.plain_s, line.at(of_all) if line is not None else 0.0)
        if self.expert_s and line is not None:
            # A token more reads as many experts as one alone, until passes over several have shown how many they share.
            each = min(learnt.experts.at(1), learnt.experts.slope)
            found = max(found, self.plain_s + self.expert_s * each * (of_all - 1))
        return found

    @property
    def plain_s(self) -> float:
        return self.foreseen_s if self.acceptance.plain.value is None else self.acceptance.plain.value

    def draft(self, source: Proposer, text: Sequence[int], most: int) -> list[Guess]:
        """Returns at most ``most`` guesses of the tokens after ``text``: those worth verifying in the next pass."""
        learnt = self.acceptance
        self.expected = 1.0
        stale = self._drafted and PROBE * self._alike_s > self.plain_s
        unknown = learnt.plain.seen < 2 if learnt.drafted else self.expert_s and not learnt.experts.seen
        if not self.fixed and (unknown or (learnt.drafted and stale)):
            return []  # to measure a pass without a draft
        limit = min(most, self.most if learnt.drafted or self.fixed else 1 if self.expert_s else UNTRIED)
        guesses = self._draft(source, text, limit)
        if not guesses and source.cheaper is not None:
            guesses = self._draft(source.cheaper, text, limit)
        return guesses

    def _draft(self, source: Proposer, text: Sequence[int], limit: int) -> list[Guess]:
        learnt = self.acceptance
        times = learnt.guess.setdefault(source.name, Seconds())
        follow = learnt.follow.setdefault(source.name, Seconds())
        behind = len(text) - self._seen.get(source.name, 0)
        guess_s, best = times.value or 0.0, learnt.best(source.name)
        line = learnt.drafted.get(source.name)
        more_s = min(self.seconds(source.name, 2) - self.plain_s, self.plain_s)
        probe = not self._drafted and PROBE * self._alike_s > max(more_s, guess_s) + (follow.value or 0.0) * behind
        probe |= times.seen == 1 or (line is not None and line.seen < SURE)
        guesses: list[Guess] = []
        if not self._promises(source.name, best, limit):
            limit = min(limit, int(probe))
        expected, chance, spent, caught_up = 1.0, 1.0, 0.0, 0.0
        while len(guesses) < limit:
            if guesses and not self._worth(source.name, expected, chance * best, len(guesses), spent, guess_s):
                break
            began, begins, follows = self._clock(), not guesses, False
            if begins:
                source.begin(text)
                follows = source.name in self._seen
                self._seen[source.name] = len(text)
                if not follows:
                    # The source took in the prompt, which is no measure of taking in one more token.
                    began = self._clock()
            guess = source.guess([g.token for g in guesses])
            took = self._clock() - began
            if guess is None:
                break
            if source.cheaper is None or guess.key[0] != source.cheaper.name:
                if follows and times.value is not None and took > times.value:
                    follow.add((took - times.value) / max(1, behind))
                    # Catching up on tokens that the source missed is no part of a draft's cost either.
                    caught_up = took - times.value if behind > MOST + 1 else 0.0
                else:
                    times.add(took)
                guess_s = times.value or 0.0
            chance *= learnt.chance(guess.key)
            spent += took
            if not self._worth(source.name, expected, chance, len(guesses), spent, -guess_s) and not probe:
                break
            guesses.append(guess)
            expected, probe = expected + chance, False
        self.expected, self.spent = expected, self.spent + spent - caught_up
        self.source = source.name if guesses else None
        return guesses

    def judged(self, guesses: Sequence[Guess], text: Sequence[int], seconds: float) -> None:
        """Records the outcome of a draft. ``text``: the tokens that the pass yielded, accepted guesses and one more;
        ``seconds``: duration of the pass."""
        learnt = self.acceptance
        for guess, token in zip(guesses, text, strict=False):
            for guessed, key in ((guess.token, guess.key), *guess.others):
                learnt.judged(key, guessed == token)
        learnt.sweeps, learnt.made = learnt.sweeps + 1, learnt.made + max(1, len(text))
        learnt.total_s += seconds + self.spent
        (tokens, took, repeated), (passes, own) = learnt.lately, learnt.own
        line = learnt.drafted.get(self.source or "")
        if learnt.plain.seen < 2 or (line is not None and line.seen <= SURE):
            # Lengths are still found out.
            learnt.weighed, tokens, took, repeated, passes, own = learnt.sweeps, 0.0, 0.0, 0.0, 0.0, 0.0
        learnt.lately = tokens * FADE + max(1, len(text)), took * FADE + seconds + self.spent, repeated * FADE
        learnt.own = passes * FADE + 1, own * FADE + sum(map(_known_by_weights, guesses[: max(0, len(text) - 1)]))
        self._alike_s = seconds + (self._alike_s if bool(guesses) == self._drafted else 0.0)
        self._drafted = bool(guesses)
        self.spent, self.source = 0.0, None

    def swept(self, tokens: int, seconds: float, experts: int = 0) -> None:
        """Records the seconds of a pass over ``tokens`` tokens and of drafting (``spent``) for all texts that share it,
        and how many experts it read one by one. To be called before ``judged``."""
        learnt = self.acceptance
        if self.expert_s:
            learnt.experts.slope = learnt.experts.slope if learnt.experts.seen else experts / tokens
            learnt.experts.add(tokens, experts)
        learnt.swept(self.source, tokens, seconds)

    def _promises(self, source: str, chance: float, most: int) -> bool:
        """Whether a draft of some length, up to ``most``, is faster than none if guesses are right with ``chance``."""
        if self.fixed:
            return most > 0
        expected, plain, others = 1.0, self.plain_s, self.shared.expected
        for drafted in range(1, most + 1):
            expected += chance**drafted
            if not plain or (others + expected) * plain > (others + 1) * self.seconds(source, drafted + 1):
                return True
        return False

    def _worth(self, source: str, expected: float, chance: float, drafted: int, spent: float, more: float) -> bool:
        """Whether one more guess, right with ``chance``, pays after ``spent`` seconds of drafting. ``more``: seconds of
        the guess; negative: they are part of ``spent`` already."""
        if self.fixed or not self.plain_s:
            return True
        before = max(self.seconds(source, drafted + 1), spent)
        after = max(self.seconds(source, drafted + 2) + min(more, 0.0), spent + max(more, 0.0))
        expected += self.shared.expected
        return (expected + chance) * before > expected * after


def _known_by_weights(guess: Guess) -> bool:
    """Whether n-grams had no such guess."""
    alike = (key for token, key in ((guess.token, guess.key), *guess.others) if token == guess.token)
    return all(key[0] not in (NGRAM, AGAINST) for key in alike)
