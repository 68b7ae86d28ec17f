"""How many tokens to draft: what each kind of guess is worth, and what a sweep costs for so many tokens.

Nothing is assumed about the machine: where the disk is the limit a sweep takes as long for thirty tokens as for one,
elsewhere computing them takes longer than reading, and both are seen while tokens are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan.draft_cost import MOST
from .acceptance import AcceptanceStats, Seconds
from .proposers import Guess, Proposer

UNTRIED = 4
"""Guesses for a sweep before any was seen, where nothing is foreseen of them."""

PROBE = 0.01
"""Of the time without a draft, that which trying a token again may take where drafting has not been worth it."""


@dataclass(frozen=True)
class SharedPass:
    """What other texts have of a sweep that they share.

    Attributes:
        tokens: that are computed for them; ``expected``: that they are thought to get of it.
        seconds: that drafting for them took.
    """

    tokens: int = 0
    expected: float = 0.0
    seconds: float = 0.0


class DraftLengthPolicy:
    """Decides for each drafted token whether it is worth its time.

    A draft goes on while the tokens expected of a sweep grow by more than its time does: (1 + p1 + p1 p2 + ...) over
    the time of drafting and sweeping. Chances are counted by kind of guess. A sweep takes as long as reading or as
    computing, whichever is longer; only computing grows with the number of tokens. While tokens are drafted the disk
    reads ahead, as far as there are slots: so long drafting takes no time where the disk is the limit.

    Args:
        most: drafted tokens at most.
        experience: of texts before this one; what this one teaches is added.
        fixed: always draft that many, as far as the source goes.

    Attributes:
        by_token: what a sweep reads grows with its tokens, too: experts are read one by one.
        foreseen_s: seconds that a sweep is thought to take before any was seen.
        ahead: part of a sweep's bytes that is read while none is under way. ``reading_s``: seconds that all of them
            take at the rate that was seen of late; 0: none was. ``own``: no other rank's disk is waited for.
        beside: what others have of the next sweep.
        expected: tokens that the last draft is thought to be worth, with the one that the model says itself.
    """

    def __init__(
        self,
        most: int = MOST,
        experience: AcceptanceStats | None = None,
        *,
        fixed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.experience = experience or AcceptanceStats()
        self.experience.another_text()
        self.most = most
        self.fixed = fixed
        self.by_token = False
        self.foreseen_s = 0.0
        self.ahead = self.reading_s = 0.0
        self.own = True
        self.beside = SharedPass()
        self.expected = 1.0
        self._clock = clock
        self._seen: dict[str, int] = {}  # tokens of the text that it has followed
        self._idle_s = 0.0  # since something was drafted

    def sweep_s(self, tokens: int, idle_s: float = 0.0) -> float:
        """Seconds that a sweep over so many tokens is expected to take, that begins so long after the one before; 0 if
        there is nothing to go by."""
        measured = self.experience.read_s
        # What the disk takes is known by its rate, whatever was read when; of others' only what sweeps waited for is.
        read_s = self.reading_s if self.own and self.reading_s else max(measured, self.reading_s)
        return self.experience.sweep_s(tokens, read_s, idle_s, self.ahead) or self.foreseen_s

    def draft(self, source: Proposer, text: Sequence[int], most: int) -> list[Guess]:
        """Guesses that are worth being looked at by the next sweep.

        Args:
            text: the tokens so far.
            most: guesses at most.
        """
        untried = max(UNTRIED, self.experience.first.get(source.name, 0))
        limit = min(most, self.most if self.experience.computing.seen or self.fixed else untried)
        self.expected = 1.0
        guesses = self._draft(source, text, limit)
        if not guesses and source.cheaper is not None:
            guesses = self._draft(source.cheaper, text, limit)
        return guesses

    def _draft(self, source: Proposer, text: Sequence[int], limit: int) -> list[Guess]:
        learnt = self.experience
        times = learnt.guess.setdefault(source.name, Seconds())
        follow = learnt.follow.setdefault(source.name, Seconds())
        behind = len(text) - self._seen.get(source.name, 0)
        guess_s, follow_s, best = times.value or 0.0, follow.value or 0.0, learnt.best(source.name)
        more_s = self._beside_s(2) - self._beside_s(1)
        probe = PROBE * self._idle_s > guess_s + follow_s * behind + more_s
        probe |= times.unsure or learnt.computing.seen == 1
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
            chance *= learnt.chance(guess.key)
            spent += took
            if not self._worth(expected, chance, len(guesses), spent, 0.0) and not probe:
                break
            guesses.append(guess)
            expected, probe = expected + chance, False
        self.expected = expected
        return guesses

    def judged(self, guesses: Sequence[Guess], text: Sequence[int], seconds: float) -> None:
        """What became of a draft.

        Args:
            text: that the sweep made: guesses that were right, and one token more; ``seconds``: that it took for it.
        """
        learnt = self.experience
        for guess, token in zip(guesses, text, strict=False):
            for guessed, key in ((guess.token, guess.key), *guess.others):
                learnt.judged(key, guessed == token)
        learnt.sweeps, learnt.made = learnt.sweeps + 1, learnt.made + max(1, len(text))
        self._idle_s = 0.0 if guesses else self._idle_s + seconds

    def swept(self, tokens: int, seconds: float, stall_s: float, idle_s: float = 0.0) -> None:
        """A sweep computed so many tokens in so many seconds, of which it waited ``stall_s`` for the disk; ``idle_s``:
        before it, since the one before."""
        self.experience.swept(tokens, seconds, 0.0 if self.by_token else stall_s, idle_s, self.ahead)

    def _beside_s(self, tokens: int, spent: float = 0.0) -> float:
        """Seconds of a sweep over so many tokens and what others have of it, after so many of drafting and theirs."""
        return self.sweep_s(tokens + self.beside.tokens, spent + self.beside.seconds)

    def _promises(self, chance: float, most: int, guess_s: float, follow_s: float) -> bool:
        """Whether drafts of any length are faster than none, if each guess is right with this chance and all of the
        text has to be followed. Not what has to be made up for now: where it pays to go on, it pays to begin.
        """
        if self.fixed:
            return most > 0
        expected, plain, others = 1.0, self._beside_s(1), self.beside.expected
        for drafted in range(1, most + 1):
            expected += chance**drafted
            drafting = guess_s * drafted + follow_s * expected
            seconds = self._beside_s(drafted + 1, drafting) + drafting
            if not plain or (others + expected) * plain > (others + 1) * seconds:
                return True
        return False

    def _worth(self, expected: float, chance: float, drafted: int, spent: float, more: float) -> bool:
        """Whether one more guess, that takes ``more`` seconds and is right with this chance, is worth its time."""
        if self.fixed or not self.sweep_s(1):
            return True
        before = self._beside_s(drafted + 1, spent) + spent
        after = self._beside_s(drafted + 2, spent + more) + spent + more
        expected += self.beside.expected
        return (expected + chance) * before > expected * after
