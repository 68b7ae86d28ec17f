"""What drafting has taught: how likely guesses are right, and what they and passes take on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from .proposers import Key

PRIOR, WEIGHT, FADE = 0.6, 2.0, 0.98
"""The chance of a kind of guess that was never tried, how many guesses that counts for, and how old ones fade."""

NEAR, LAST = 0.3, 0.8
"""How fast what was measured before gives way to what is measured now, and how much of it stays where many count."""

FAR = 3.0
"""A time counts as so many times what was expected at most; one that much shorter means that those before were not what
it takes."""

KEPT = 8
"""Guesses that what was learnt of other texts counts for."""


@dataclass
class Seconds:
    """What something takes, of late: falls at once, as kernels may have been compiled before, and rises slowly."""

    value: float | None = None
    seen: int = 0

    def add(self, seconds: float) -> None:
        before = seconds if self.value is None else self.value
        self.value = before + (seconds - before) * (NEAR if seconds > before else 1.0)
        self.seen += 1


@dataclass
class CostLine:
    """Seconds that drafting and a pass over so many tokens take together, of late: a line through what was seen.

    Attributes:
        slope: seconds for each token more: none until passes over several numbers of tokens were seen.
    """

    seen: int = 0
    slope: float = 0.0
    sums: tuple[float, ...] = (0.0,) * 5  # 1, n, s, n n, n s

    def add(self, tokens: int, seconds: float) -> None:
        expected = self.at(tokens)
        if seconds * FAR < expected:
            self.sums = (0.0,) * 5
        elif self.seen:
            seconds = min(seconds, FAR * expected)
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        one, n, s, nn, ns = self.sums = tuple(LAST * b + n for b, n in zip(self.sums, new, strict=True))
        # As if one more token had been seen to take what it took before: passes over the same number say nothing of it.
        self.slope = max(0.0, (ns - n * s / one + self.slope) / (nn - n * n / one + 1))
        self.seen += 1

    def at(self, tokens: int) -> float:
        """0 if nothing was seen."""
        one, n, s, _, _ = self.sums
        return max(0.0, (s - self.slope * n) / one + self.slope * tokens) if one else 0.0


@dataclass
class Rate:
    """How often guesses were right, the older ones counting less; begins with what is thought of them before."""

    right: float
    all: float = WEIGHT

    def add(self, right: bool) -> None:
        self.right, self.all = self.right * FADE + right, self.all * FADE + 1

    def fade_to(self, guesses: float) -> None:
        if self.all > guesses:
            self.right, self.all = self.value * guesses, guesses

    @property
    def value(self) -> float:
        return self.right / self.all


@dataclass
class AcceptanceStats:
    """Goes on from text to text.

    Attributes:
        rates, sources: how often guesses of a kind, and of a source, were right.
        guess: what a guess of a source takes; ``follow``: and a token of the text there.
        plain: what a pass takes without a draft; ``drafted``: and with one of a source, which is made before it.
        sweeps: that were seen, and tokens that they ``made``.
    """

    rates: dict[Key, Rate] = field(default_factory=dict)
    sources: dict[str, Rate] = field(default_factory=dict)
    guess: dict[str, Seconds] = field(default_factory=dict)
    follow: dict[str, Seconds] = field(default_factory=dict)
    plain: Seconds = field(default_factory=Seconds)
    drafted: dict[str, CostLine] = field(default_factory=dict)
    sweeps: int = 0
    made: int = 0

    def another_text(self) -> None:
        """Another text begins: what was learnt of those before counts for less."""
        for rate in (*self.rates.values(), *self.sources.values()):
            rate.fade_to(KEPT)

    def chance(self, key: Key) -> float:
        """How likely a guess of this kind is right."""
        rate = self.rates.get(key)
        return rate.value if rate is not None else self.typical(key[0])

    def typical(self, source: str) -> float:
        """How likely a guess of this source is right, on the whole."""
        rate = self.sources.get(source)
        return rate.value if rate is not None else PRIOR

    def best(self, source: str) -> float:
        """How likely the best of its guesses are right."""
        return max([self.typical(source), *(r.value for k, r in self.rates.items() if k[0] == source)])

    def judged(self, key: Key, right: bool) -> None:
        """A guess of this kind was right, or not."""
        prior = self.typical(key[0]) * WEIGHT
        self.rates.setdefault(key, Rate(prior)).add(right)
        self.sources.setdefault(key[0], Rate(prior)).add(right)

    def swept(self, source: str | None, tokens: int, seconds: float) -> None:
        """Drafting by a source, or nothing, and a pass over so many tokens took so long."""
        if source is not None:
            self.drafted.setdefault(source, CostLine()).add(tokens, seconds)
        # No pass takes longer without a draft than with one.
        if source is None or seconds < (self.plain.value or 0.0):
            self.plain.add(seconds)
