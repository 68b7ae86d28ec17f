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

NEAR, LAST = 0.3, 0.8
"""How fast what was measured before gives way to what is measured now, and how much of it stays where many count."""

FAR, NOTHING = 3.0, 0.02
"""Times that are so many times what was expected are doubted; how much it counts that no tokens take no time."""

PROBE = 0.02
"""Of the time without a draft, that which trying a token again may take where drafting has not been worth it."""

STALLED = 0.05
"""Share of a sweep spent waiting for the disk from which the disk is the limit."""


@dataclass
class _Seconds:
    """What something takes, of late. A time far from those around it does not count: kernels were compiled then."""

    value: float | None = None
    last: tuple[float, ...] = ()

    def add(self, seconds: float) -> None:
        self.last = (*self.last, seconds)[-3:]
        typical = sorted(self.last)[(len(self.last) - 1) // 2]
        self.value = typical if self.value is None or len(self.last) < 3 else _near(self.value, typical)

    @property
    def unsure(self) -> bool:
        """Whether it was seen once, which may have been such a time."""
        return len(self.last) == 1


@dataclass
class _Line:
    """Seconds that computing so many tokens takes, of late: something for each sweep and something for each token.

    Seen for one number of tokens only, all of it is for the tokens. Times far above the line do not count until they
    come twice, and one far below it means that those before were not what computing takes.
    """

    seen: int = 0
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)  # 1, n, s, n n, n s
    doubted: bool = False

    def add(self, tokens: int, seconds: float) -> None:
        expected = self.at(tokens)
        if self.seen and seconds > FAR * expected and not self.doubted:
            self.doubted = True
            return
        if self.doubted or seconds * FAR < expected:
            self.seen, self.sums = 0, (0.0, 0.0, 0.0, 0.0, 0.0)
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        self.sums = tuple(LAST * b + n for b, n in zip(self.sums, new, strict=True))  # type: ignore[assignment]
        self.seen, self.doubted = self.seen + 1, False

    def at(self, tokens: int) -> float:
        """0 if nothing was seen."""
        one, n, s, nn, ns = self.sums
        if not one:
            return 0.0
        # As if no tokens had been seen to take no time.
        slope = max(0.0, (ns - n * s / (one + NOTHING)) / (nn - n * n / (one + NOTHING)))
        fixed = (s - slope * n) / one
        return fixed + slope * tokens if fixed > 0 else ns / nn * tokens


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

    Attributes:
        foreseen_s: seconds that a sweep is thought to take before any was seen.
    """

    def __init__(
        self, most: int = MOST, *, fixed: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.most = most
        self.fixed = fixed
        self.foreseen_s = 0.0
        self._clock = clock
        self._rates: dict[Key, _Rate] = {}
        self._sources: dict[str, _Rate] = {}
        self._guess: dict[str, _Seconds] = {}  # a guess of that source takes
        self._follow: dict[str, _Seconds] = {}  # and to follow the text there, a token
        self._seen: dict[str, int] = {}  # tokens of the text that it has followed
        self._computing = _Line()  # tokens takes
        self._read_s = 0.0  # a sweep takes at least
        self._idle_s = 0.0  # since something was drafted

    def chance(self, key: Key) -> float:
        """How likely a guess of this kind is right."""
        rate = self._rates.get(key)
        return rate.value if rate is not None else self.typical(key[0])

    def typical(self, source: str) -> float:
        """How likely a guess of this source is right, on the whole."""
        rate = self._sources.get(source)
        return rate.value if rate is not None else PRIORS.get(source, PRIOR)

    def sweep_s(self, tokens: int) -> float:
        """Seconds that a sweep over so many tokens is expected to take; 0 if there is nothing to go by."""
        return max(self._read_s, self._computing.at(tokens)) if self._computing.seen else self.foreseen_s

    def draft(self, source: Source, text: Sequence[int], most: int) -> list[Guess]:
        """Guesses that are worth being looked at by the next sweep.

        Args:
            text: the tokens so far.
            most: guesses at most.
        """
        limit = min(most, self.most if self._computing.seen or self.fixed else UNTRIED)
        guesses = self._draft(source, text, limit)
        if not guesses and source.cheaper is not None:
            guesses = self._draft(source.cheaper, text, limit)
        return guesses

    def _draft(self, source: Source, text: Sequence[int], limit: int) -> list[Guess]:
        times = self._guess.setdefault(source.name, _Seconds())
        follow = self._follow.setdefault(source.name, _Seconds())
        behind = len(text) - self._seen.get(source.name, 0)
        guess_s, follow_s, best = times.value or 0.0, follow.value or 0.0, self._best(source)
        probe = PROBE * self._idle_s > guess_s + follow_s * behind + self.sweep_s(2) - self.sweep_s(1)
        probe |= times.unsure or self._computing.seen == 1
        guesses: list[Guess] = []
        if not probe and not self._promises(best, limit, guess_s, follow_s):
            return guesses
        expected, chance, spent = 1.0, 1.0, 0.0
        while len(guesses) < limit:
            if guesses and not self._worth(expected, chance * best, len(guesses), spent, times.value or 0.0):
                break
            began, begins, follows = self._clock(), not guesses, False
            if begins:
                source.begin(text)
                follows = source.name in self._seen
                self._seen[source.name] = len(text)
                if not follows:
                    # It computed the prompt, which is not what following a text takes.
                    began = self._clock()
            guess = source.guess([g.token for g in guesses])
            took = self._clock() - began
            if guess is None:
                break
            if source.cheaper is None or guess.key[0] != source.cheaper.name:
                if follows and times.value is not None and took > times.value:
                    follow.add((took - times.value) / max(1, behind))
                else:
                    times.add(took)
            chance *= self.chance(guess.key)
            spent += took
            if not self._worth(expected, chance, len(guesses), spent, 0.0) and not probe:
                break
            guesses.append(guess)
            expected, probe = expected + chance, False
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
        self._idle_s = 0.0 if guesses else self._idle_s + seconds
        self._computing.add(tokens, max(seconds - stall_s, 1e-9))
        if stall_s > STALLED * seconds:
            self._read_s = _near(self._read_s, seconds) if self._read_s else seconds
        else:
            self._read_s = min(self._read_s, seconds)

    def _best(self, source: Source) -> float:
        return max([self.typical(source.name), *(r.value for k, r in self._rates.items() if k[0] == source.name)])

    def _promises(self, chance: float, most: int, guess_s: float, follow_s: float) -> bool:
        """Whether drafts of any length are faster than none, if each guess is right with this chance and all of the
        text has to be followed. Not what has to be made up for now: where it pays to go on, it pays to begin.
        """
        expected, plain = 1.0, self.sweep_s(1)
        for drafted in range(1, most + 1):
            expected += chance**drafted
            seconds = self.sweep_s(drafted + 1) + guess_s * drafted + follow_s * expected
            if self.fixed or not plain or expected * plain > seconds:
                return True
        return False

    def _worth(self, expected: float, chance: float, drafted: int, spent: float, more: float) -> bool:
        """Whether one more guess, that takes ``more`` seconds and is right with this chance, is worth its time."""
        if self.fixed or not self.sweep_s(1):
            return True
        before = self.sweep_s(drafted + 1) + spent
        after = self.sweep_s(drafted + 2) + spent + more
        return (expected + chance) * before > expected * after


def _near(before: float, now: float) -> float:
    return before + NEAR * (now - before)
