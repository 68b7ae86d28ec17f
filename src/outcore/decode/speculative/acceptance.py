"""What drafting has taught: how likely guesses are right, and what they and sweeps take on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from .proposers import Key

PRIOR, WEIGHT, FADE = 0.6, 2.0, 0.98
"""The chance of a kind of guess that was never tried, how many guesses that counts for, and how old ones fade."""

NEAR, LAST = 0.3, 0.8
"""How fast what was measured before gives way to what is measured now, and how much of it stays where many count."""

FAR, NOTHING = 3.0, 0.02
"""Times that are so many times what was expected are doubted; how much it counts that no tokens take no time."""

STALLED = 0.05
"""Share of a sweep spent waiting for the disk from which the disk is the limit."""

KEPT = 8
"""Guesses that what was learnt of other texts counts for."""


@dataclass
class Seconds:
    """What something takes, of late. A time far from those around it does not count: kernels were compiled then."""

    value: float | None = None
    last: tuple[float, ...] = ()

    def add(self, seconds: float) -> None:
        self.last = (*self.last, seconds)[-3:]
        typical = sorted(self.last)[(len(self.last) - 1) // 2]
        self.value = typical if self.value is None or len(self.last) < 3 else near(self.value, typical)

    @property
    def unsure(self) -> bool:
        """Whether it was seen once, which may have been such a time."""
        return len(self.last) == 1


@dataclass
class CostLine:
    """Seconds that computing so many tokens takes, of late: something for each sweep and something for each token.

    Seen for one number of tokens only, all of it is for the tokens. Times far above the line do not count until they
    come twice, and one far below it means that those before were not what computing takes.
    """

    seen: int = 0
    sums: tuple[float, ...] = (0.0,) * 5  # 1, n, s, n n, n s
    doubted: bool = False

    def add(self, tokens: int, seconds: float) -> None:
        expected = self.at(tokens)
        if self.seen and seconds > FAR * expected and not self.doubted:
            self.doubted = True
            return
        if self.doubted or seconds * FAR < expected:
            self.seen, self.sums = 0, (0.0,) * 5
        new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
        self.sums = tuple(LAST * b + n for b, n in zip(self.sums, new, strict=True))
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
        computing: what a sweep computes in; ``read_s``: what it takes at least, from the end of the one before.
        sweeps: that were seen, and tokens that they ``made``.
        first: guesses of a source that are thought to be worth their time, for a sweep before any was seen.
        byte_s: what the disk took for a byte, of late; ``counted``: bytes and seconds of reading so far.
    """

    rates: dict[Key, Rate] = field(default_factory=dict)
    sources: dict[str, Rate] = field(default_factory=dict)
    guess: dict[str, Seconds] = field(default_factory=dict)
    follow: dict[str, Seconds] = field(default_factory=dict)
    computing: CostLine = field(default_factory=CostLine)
    read_s: float = 0.0
    sweeps: int = 0
    made: int = 0
    first: dict[str, int] = field(default_factory=dict)
    byte_s: Seconds = field(default_factory=Seconds)
    counted: tuple[int, float] = (0, 0.0)

    def expect(self, source: str, chance: float, first: int) -> None:
        """A source's guesses are thought to be right with this chance, and so many to be worth their time."""
        self.sources[source], self.first[source] = Rate(chance * KEPT, KEPT), first

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

    def reading_s(self, nbytes: int, seconds: float, of: int) -> float:
        """Seconds that ``of`` bytes, a sweep's, take at the rate that the disk had of late. 0 where nothing is known.

        Args:
            nbytes: that were read so far, in so many ``seconds`` of reading.
        """
        before, self.counted = self.counted, (nbytes, seconds)
        if nbytes > before[0] and seconds > before[1]:
            self.byte_s.add((seconds - before[1]) / (nbytes - before[0]))
        return of * (self.byte_s.value or 0.0)

    def swept(self, tokens: int, seconds: float, stall_s: float, idle_s: float = 0.0, ahead: float = 0.0) -> None:
        """A sweep over so many tokens took so long, and waited for the disk for a part of that.

        Args:
            idle_s: seconds before it, since the sweep before, in which ``ahead`` of its bytes could be read.
        """
        self.computing.add(tokens, max(seconds - stall_s, 1e-9))
        whole = seconds + idle_s
        if idle_s > ahead * whole:
            whole = seconds / (1 - ahead) if ahead < 1 else seconds
        if stall_s > STALLED * seconds:
            self.read_s = near(self.read_s, whole) if self.read_s else whole
        else:
            # Long drafts would have it that reading takes as long as they do.
            self.read_s = min(self.read_s, whole)

    def sweep_s(self, tokens: int, read_s: float, idle_s: float = 0.0, ahead: float = 0.0) -> float:
        """Seconds that a sweep over so many tokens is expected to take whose bytes take ``read_s``; 0 before any was
        seen. Arguments as above."""
        if not self.computing.seen:
            return 0.0
        return max(read_s - min(idle_s, ahead * read_s), self.computing.at(tokens))


def near(before: float, now: float) -> float:
    """What was measured before, changed a little by what is measured now."""
    return before + NEAR * (now - before)
