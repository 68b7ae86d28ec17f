"""Acceptance statistics: how likely guesses are right, and what guesses and passes cost on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .proposers import Key

# Assumed chance of a kind of guess before any was tried; how many guesses this assumption counts as; the factor by
# which older guesses count less with each new one.
PRIOR, WEIGHT, FADE = 0.6, 2.0, 0.98

# Weight of a new time that is longer than the average; the factor by which older passes count less with each new one.
NEAR, LAST = 0.3, 0.8

# A time counts as at most this many times the expected one; if it is this many times shorter, it replaces all others.
FAR = 3.0

# How many guesses the statistics of earlier texts count as, at most.
KEPT = 8


@dataclass
class Seconds:
    """An average of recent durations. A shorter duration replaces the average at once, as earlier ones may include
    compiling kernels; a longer one raises it slowly."""

    value: float | None = None
    seen: int = 0

    def add(self, seconds: float) -> None:
        before = seconds if self.value is None else self.value
        self.value = before + (seconds - before) * (NEAR if seconds > before else 1.0)
        self.seen += 1


@dataclass
class CostLine:
    """Recent seconds of drafting plus a pass, as a straight line over the pass's tokens; ``slope`` is 0 until passes
    over different numbers of tokens were seen. ``far``: as ``FAR``; infinite: few and many are no exceptions."""

    seen: int = 0
    slope: float = 0.0
    far: float = FAR
    sums: tuple[float, ...] = (0.0,) * 5  # faded sums of 1, n, s, n n, n s for passes over n tokens in s seconds

    def add(self, tokens: int, seconds: float) -> None:
        expected = self.at(tokens)
        if seconds * self.far < expected:
            self.sums = (0.0,) * 5
        elif self.seen:
            seconds = min(seconds, self.far * expected)
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        one, n, s, nn, ns = self.sums = tuple(LAST * b + n for b, n in zip(self.sums, new, strict=True))
        # The old slope counts as one observation: passes over one number of tokens say nothing about the slope.
        self.slope = max(0.0, (ns - n * s / one + self.slope) / (nn - n * n / one + 1))
        self.seen += 1

    def at(self, tokens: int) -> float:
        """Returns the expected seconds of a pass over ``tokens`` tokens; 0 if no pass was seen."""
        one, n, s, _, _ = self.sums
        return max(0.0, (s - self.slope * n) / one + self.slope * tokens) if one else 0.0


@dataclass
class Rate:
    """The share of guesses that were right; older ones count less. ``right`` and ``all`` begin with a prior."""

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
    """Acceptance statistics over all texts. ``chance`` returns the acceptance rate of a kind of guess, ``typical`` that
    of all guesses of a source, ``best`` that of its best kind.

    Attributes:
        rates, sources: share of right guesses by kind, and by source.
        guess: by source, seconds of a guess; ``follow``: seconds in which it takes in one more token of the text.
        plain: seconds of a pass without a draft; ``drafted``: of drafting plus the pass, by source.
        experts: experts that passes read one by one, as a straight line over their tokens.
        sweeps: passes seen; ``made``: tokens that they yielded; ``lately``: tokens, seconds, and tokens that n-grams
            would have guessed, whatever drafted; older ones fade. ``own``: as many passes, and the tokens that only a
            draft with weights knew.
        weighed: the pass at which memory was last weighed; ``given``: how often layers got it, as 2 ** n - 1.
        total_s: seconds of all passes, and of drafting.
    """

    rates: dict[Key, Rate] = field(default_factory=dict)
    sources: dict[str, Rate] = field(default_factory=dict)
    guess: dict[str, Seconds] = field(default_factory=dict)
    follow: dict[str, Seconds] = field(default_factory=dict)
    plain: Seconds = field(default_factory=Seconds)
    drafted: dict[str, CostLine] = field(default_factory=dict)
    experts: CostLine = field(default_factory=lambda: CostLine(far=math.inf))
    sweeps: int = 0
    made: int = 0
    lately: tuple[float, float, float] = (0.0, 0.0, 0.0)
    own: tuple[float, float] = (0.0, 0.0)
    weighed: int = -1
    given: int = 0
    total_s: float = 0.0

    def another_text(self) -> None:
        """Called when a text begins: statistics of earlier texts count for less from now on."""
        for rate in (*self.rates.values(), *self.sources.values()):
            rate.fade_to(KEPT)

    def chance(self, key: Key) -> float:
        rate = self.rates.get(key)
        return rate.value if rate is not None else self.typical(key[0])

    def typical(self, source: str) -> float:
        rate = self.sources.get(source)
        return rate.value if rate is not None else PRIOR

    def best(self, source: str) -> float:
        return max([self.typical(source), *(r.value for k, r in self.rates.items() if k[0] == source)])

    def judged(self, key: Key, right: bool) -> None:
        prior = self.typical(key[0]) * WEIGHT
        self.rates.setdefault(key, Rate(prior)).add(right)
        self.sources.setdefault(key[0], Rate(prior)).add(right)

    def swept(self, source: str | None, tokens: int, seconds: float) -> None:
        """Records the ``seconds`` of drafting by a source (None: no draft) plus a pass over ``tokens`` tokens."""
        if source is not None:
            self.drafted.setdefault(source, CostLine()).add(tokens, seconds)
        # A pass without a draft takes no longer than one with a draft.
        if source is None or seconds < (self.plain.value or 0.0):
            self.plain.add(seconds)
