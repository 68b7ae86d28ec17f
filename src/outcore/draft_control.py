"""How many tokens to draft: what each kind of guess is worth, and what a sweep costs for so many tokens.

Nothing is assumed about the machine: where the disk is the limit a sweep takes as long for thirty tokens as for one,
elsewhere computing them takes longer than reading, and both are seen while tokens are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .drafts import AGAINST, Guess, Key, Source

MOST = 32
"""Drafted tokens at most."""

UNTRIED = 4
"""And before any sweep was seen."""

PRIOR, WEIGHT, FADE = 0.6, 2.0, 0.98
"""The chance of a kind of guess that was never tried, how many guesses that counts for, and how old ones fade."""

PRIORS = {AGAINST: 0.2}
"""Of sources that are known to be right more or less often."""

NEAR = 0.3
"""How fast what was measured before gives way to what is measured now."""

PROBE = 64
"""Sweeps without a draft after which a token is tried again, where drafting has not been worth it."""

STALLED = 0.05
"""Share of a sweep spent waiting for the disk from which the disk is the limit."""


@dataclass
class _Rate:
    right: float
    all: float = WEIGHT

    def add(self, right: bool) -> None:
        self.right = self.right * FADE + right
        self.all = self.all * FADE + 1

    @property
    def value(self) -> float:
        return self.right / self.all


class Control:
    """Decides for each drafted token whether it is worth its time.

    A draft goes on while the tokens expected of a sweep grow by more than its time does: (1 + p1 + p1 p2 + ...) over
    the time of drafting and sweeping. Chances are counted by kind of guess. A sweep takes as long as reading or as
    computing, whichever is longer; only computing grows with the number of tokens.

    Args:
        most: drafted tokens at most.
        fixed: always draft that many, as far as the source goes.
    """

    def __init__(
        self, most: int = MOST, *, fixed: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.most = most
        self.fixed = fixed
        self._clock = clock
        self._rates: dict[Key, _Rate] = {}
        self._sources: dict[str, _Rate] = {}
        self._guess_s: dict[str, float] = {}  # a guess of that source takes
        self._read_s = 0.0  # a sweep takes at least
        self._pass_s: float | None = None  # computing one token takes
        self._more_s: float | None = None  # and each further one
        self._idle = 0  # sweeps since something was drafted

    def chance(self, key: Key) -> float:
        """How likely a guess of this kind is right."""
        rate = self._rates.get(key)
        return rate.value if rate is not None else self.typical(key[0])

    def typical(self, source: str) -> float:
        """How likely a guess of this source is right, on the whole."""
        rate = self._sources.get(source)
        return rate.value if rate is not None else PRIORS.get(source, PRIOR)

    def sweep_s(self, tokens: int) -> float:
        """Seconds that a sweep over so many tokens is expected to take; 0 before any was seen."""
        if self._pass_s is None:
            return 0.0
        more = self._pass_s if self._more_s is None else self._more_s
        return max(self._read_s, self._pass_s + more * (tokens - 1))

    def draft(self, source: Source, text: Sequence[int], most: int) -> list[Guess]:
        """Guesses that are worth being looked at by the next sweep.

        Args:
            text: the tokens so far.
            most: guesses at most.
        """
        limit = min(most, self.most if self._pass_s is not None or self.fixed else UNTRIED)
        probe = self._idle >= PROBE
        guesses: list[Guess] = []
        expected, chance, spent = 1.0, 1.0, 0.0
        if limit > 0:
            source.begin(text)
        while len(guesses) < limit:
            foreseen = self._guess_s.get(source.name, 0.0)
            if not self._worth(expected, chance * self._best(source), len(guesses), spent, foreseen) and not probe:
                break
            began = self._clock()
            guess = source.guess([g.token for g in guesses])
            took = self._clock() - began
            if guess is None:
                break
            self._guess_s[source.name] = _near(self._guess_s.get(source.name), took)
            chance *= self.chance(guess.key)
            if not self._worth(expected, chance, len(guesses), spent, took) and not probe:
                break
            guesses.append(guess)
            expected, spent, probe = expected + chance, spent + took, False
        self._idle = 0 if guesses else self._idle + 1
        return guesses

    def saw(self, guesses: Sequence[Guess], text: Sequence[int], tokens: int, seconds: float, stall_s: float) -> None:
        """What became of a draft.

        Args:
            text: that the sweep made: guesses that were right, and one token more.
            tokens: that the sweep computed; ``seconds``: that it took, of which ``stall_s`` waiting for the disk.
        """
        for guess, token in zip(guesses, text, strict=False):
            for guessed, key in ((guess.token, guess.key), *guess.others):
                prior = self.typical(key[0]) * WEIGHT
                self._rates.setdefault(key, _Rate(prior)).add(guessed == token)
                self._sources.setdefault(key[0], _Rate(prior)).add(guessed == token)
        computing = max(seconds - stall_s, 1e-9)
        if tokens == 1:
            self._pass_s = _near(self._pass_s, computing)
        elif self._pass_s is None:
            self._pass_s = self._more_s = computing / tokens
        else:
            self._more_s = _near(self._more_s, max(0.0, computing - self._pass_s) / (tokens - 1))
        if stall_s > STALLED * seconds:
            self._read_s = _near(self._read_s or None, seconds)
        else:
            self._read_s = min(self._read_s, seconds)

    def _best(self, source: Source) -> float:
        return max([self.typical(source.name), *(r.value for k, r in self._rates.items() if k[0] == source.name)])

    def _worth(self, expected: float, chance: float, drafted: int, spent: float, more: float) -> bool:
        """Whether one more guess, that takes ``more`` seconds and is right with this chance, is worth its time."""
        if self.fixed or self._pass_s is None:
            return True
        before = self.sweep_s(drafted + 1) + spent
        after = self.sweep_s(drafted + 2) + spent + more
        return (expected + chance) * before > expected * after


def _near(before: float | None, now: float) -> float:
    return now if before is None else before + NEAR * (now - before)
