"""How much is drafted, on machines and texts made of numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from outcore.decode.speculative.acceptance import AcceptanceStats, Rate
from outcore.decode.speculative.draft_length import UNTRIED, DraftLengthPolicy, SharedPass
from outcore.decode.speculative.proposers import SHORTEST, Both, Guess, NGram, Proposer
from outcore.plan.joint_plan import MOST


@dataclass
class Machine:
    """Seconds: a sweep reads for ``read``, computes a token in ``compute`` and something else in ``fixed``; a guess
    takes ``guess``. Between sweeps ``ahead`` of the next one is read.
    """

    read: float
    compute: float
    guess: float
    fixed: float = 0.0
    now: float = 0.0
    ahead: float = 0.0
    ended: float = 0.0

    def sweep(self, tokens: int) -> float:
        """Seconds of it."""
        computing, idle = self.fixed + self.compute * tokens, self.now - self.ended
        read = self.read - min(idle, self.ahead * self.read)
        self.now += max(read, computing)
        self.ended = self.now
        return max(read, computing)


@dataclass
class Coin:
    """A source whose guesses are right with these chances, of which it knows which one holds."""

    machine: Machine
    chances: Sequence[float]
    name: str = "coin"
    cheaper: Proposer | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def begin(self, text: Sequence[int]) -> None: ...

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        self.machine.now += self.machine.guess
        kind = self.rng.randrange(len(self.chances))
        # 1 for a guess that will be right.
        return Guess(int(self.rng.random() < self.chances[kind]), ("coin", kind))


@dataclass
class Follower(Coin):
    """A source that takes time for every token of the text, too, as a model does; and for a prompt."""

    follow: float = 0.0
    prompt: float = 0.0
    fed: int = 0

    def begin(self, text: Sequence[int]) -> None:
        self.machine.now += self.follow * (len(text) - self.fed) if self.fed else self.prompt
        self.fed = len(text)


def saw(control: DraftLengthPolicy, guesses: Sequence[Guess], text: Sequence[int], tokens: int, seconds: float) -> None:
    """A sweep over so many tokens, and what became of a draft."""
    control.swept(tokens, seconds + control.spent)
    control.judged(guesses, text, seconds)


def seconds_for(machine: Machine, source: Proposer, n: int = 2000) -> float:
    """For a text of ``n`` tokens, each of which is 1, with as many drafted as seems worth it."""
    control = DraftLengthPolicy(MOST, clock=lambda: machine.now)
    text = [1] * 8
    began = machine.now
    while len(text) < n:
        guesses = control.draft(source, text, n - len(text))
        swept = machine.sweep(1 + len(guesses))
        right = next((i for i, g in enumerate(guesses) if g.token == 0), len(guesses))
        saw(control, guesses, [1] * (right + 1), 1 + len(guesses), swept)
        text += [1] * (right + 1)
    return machine.now - began


def fixed_seconds(machine: Machine, source: Coin, length: int, n: int = 2000, passes: int = 40) -> float:
    """For such a text, always with ``length`` drafted tokens: nobody decides. Some passes take what the mean one does,
    and bring what it brings at the source's chances."""
    there, began = 8, machine.now
    for _ in range(passes):
        if length:
            source.begin(range(there))
        drafted: list[int] = []
        while len(drafted) < length:
            guess = source.guess(drafted)
            assert guess is not None
            drafted.append(guess.token)
        machine.sweep(1 + len(drafted))
        there += next((i for i, token in enumerate(drafted) if token == 0), len(drafted)) + 1
    chance = sum(source.chances) / len(source.chances)
    tokens = sum(chance**i for i in range(length + 1))
    return (machine.now - began) / passes * (n - 8) / tokens


def best_seconds(source: Callable[[], Coin]) -> float:
    """With the fixed length that is best for it."""
    found = []
    for length in (0, 1, 2, 4, 8, 16, 32):
        one = source()
        found.append(fixed_seconds(one.machine, one, length))
    return min(found)


MACHINES = {
    "disk": (1.0, 0.001, 0.002),
    "disk, slow draft": (1.0, 0.001, 0.1),
    "both": (1.0, 0.2, 0.02),
    "disk, read ahead": (1.0, 0.001, 0.02, 0.0, 0.0, 0.4),
    "disk, slow draft, read ahead": (1.0, 0.001, 0.1, 0.0, 0.0, 0.4),
    "both, read ahead": (1.0, 0.05, 0.02, 0.0, 0.0, 0.6),
    "all read ahead": (1.0, 0.001, 0.1, 0.0, 0.0, 1.0),
    "compute": (0.0, 1.0, 0.05),
    "compute, slow draft": (0.0, 1.0, 0.9),
    "nearly compute": (1.0, 0.9, 0.01),
    "compute for any number": (1.0, 0.002, 0.005, 0.8),
    "compute for any number, no disk": (0.0, 0.002, 0.005, 0.8),
}


@pytest.mark.parametrize(("machine", "chances"), list(zip(MACHINES, [[0.02], [0.0, 0.1]] * 6, strict=True)))
def test_where_nothing_is_right_it_is_at_most_three_percent_slower(machine: str, chances: list[float]) -> None:
    now, alone = Machine(*MACHINES[machine]), Machine(*MACHINES[machine])
    assert 0.97 * seconds_for(now, Coin(now, chances)) <= fixed_seconds(alone, Coin(alone, chances), 0)


@pytest.mark.parametrize(
    ("machine", "chances"), list(zip(MACHINES, [[0.4], [0.5, 0.9, 0.99]] * 6, strict=True)), ids=str
)
def test_it_is_nearly_as_fast_as_the_best_length(machine: str, chances: list[float]) -> None:
    def coin() -> Coin:
        return Coin(Machine(*MACHINES[machine]), chances)

    one = coin()
    assert 0.9 * seconds_for(one.machine, one) <= best_seconds(coin)


@pytest.mark.parametrize(("machine", "follow"), list(zip(list(MACHINES)[::2], [0.02, 0.3] * 3, strict=True)))
def test_following_a_text_that_is_not_drafted_costs_nothing(machine: str, follow: float) -> None:
    alone = Machine(*MACHINES[machine])
    plain = fixed_seconds(alone, Coin(alone, [0.0]), 0)
    now = Machine(*MACHINES[machine])
    # A prompt's time is what asking for a drafting model costs.
    assert seconds_for(now, Follower(now, [0.0], follow=follow, prompt=50.0)) - 50.0 <= 1.03 * plain


@pytest.mark.parametrize("machine", list(MACHINES)[1::2])
def test_following_is_a_part_of_what_a_draft_takes(machine: str) -> None:
    def follower() -> Follower:
        return Follower(Machine(*MACHINES[machine]), [0.5, 0.9], follow=0.05)

    one = follower()
    assert 0.9 * seconds_for(one.machine, one) <= best_seconds(follower)


@pytest.mark.parametrize("machine", list(MACHINES)[::2])
def test_a_time_that_kernels_took_to_be_compiled_is_forgotten(machine: str) -> None:
    def took(compiling: float) -> float:
        now = Machine(*MACHINES[machine])
        source = Coin(now, [0.9])
        guess, sweep, asked, swept = source.guess, now.sweep, [0], set[int]()

        def slow_guess(drafted: Sequence[int]) -> Guess | None:
            asked[0] += 1
            now.now += compiling * (asked[0] == 1)
            return guess(drafted)

        def slow_sweep(tokens: int) -> float:
            seconds = sweep(tokens)
            late = compiling * (bool(swept) and tokens not in swept and len(swept) < 3)
            swept.add(tokens)
            now.now += late
            now.ended = now.now
            return seconds + late

        source.guess, now.sweep = slow_guess, slow_sweep  # type: ignore[method-assign]
        return seconds_for(now, source)

    assert took(20.0) <= 1.12 * took(0.0) + 3 * 20.0


def test_a_first_guess_that_kernels_were_compiled_for_does_not_keep_drafts_short() -> None:
    machine = Machine(1.0, 0.001, 0.002)
    control = DraftLengthPolicy(clock=lambda: machine.now)
    control.foreseen_s = 1.0
    source = Coin(machine, [1.0])
    text, sweeps = [1], 0
    machine.guess = 45.0
    while len(text) < 200:
        guesses = control.draft(source, text, 200)
        machine.guess = 0.002
        swept = machine.sweep(1 + len(guesses))
        saw(control, guesses, [1] * (len(guesses) + 1), 1 + len(guesses), swept)
        text += [1] * (len(guesses) + 1)
        sweeps += 1
    assert sweeps < 15


def test_repetitions_are_followed_where_the_model_is_too_slow() -> None:
    def repeats(machine: Machine) -> Coin:
        return Coin(Machine(0, 0, 0), [0.9], "ngram")

    slow = Machine(1.0, 0.01, 5.0)
    ngram, model = repeats(slow), Coin(slow, [0.95], "model")
    both = Both(ngram, model, lambda _: 0.5)
    alone = Machine(1.0, 0.01, 5.0)
    assert seconds_for(slow, both) <= 1.1 * seconds_for(alone, repeats(alone))


def test_nothing_is_drafted_beyond_what_may_be() -> None:
    control = DraftLengthPolicy(5, fixed=True)
    source = Coin(Machine(1, 0.1, 0.1), [1.0])
    assert len(control.draft(source, [1], 100)) == 5
    assert len(control.draft(source, [1], 3)) == 3
    assert control.draft(source, [1], 0) == []


def test_ngrams_follow_the_longest_repetition() -> None:
    ngram = NGram()
    ngram.begin([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    found = ngram.guess([])
    assert found is not None and found.token == 4  # 1 2 3 came before, and 2 3 alone later
    assert ngram.guess([4]) is not None and ngram.guess([4]).token == 9  # type: ignore[union-attr]
    assert ngram.guess([7]) is None
    ngram.begin([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3, 5, 6, 2, 3])
    assert ngram.guess([]).token == 5  # type: ignore[union-attr]
    fresh = NGram()
    fresh.begin([8] * (SHORTEST - 1))
    assert fresh.guess([]) is None


class Says:
    """Always guesses the same."""

    cheaper = None

    def __init__(self, name: str, token: int) -> None:
        self.name, self.token, self.asked = name, token, 0

    def begin(self, text: Sequence[int]) -> None: ...

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        self.asked += 1
        return Guess(self.token, (self.name, 0))


@pytest.mark.parametrize("right", ["ngram", "model"])
def test_the_one_that_is_right_where_they_differ_is_followed(right: str) -> None:
    control = DraftLengthPolicy(4, fixed=True)
    ngram, model = Says("ngram", 1), Says("model", 2)
    both = Both(ngram, model, control.acceptance.chance)
    token = {"ngram": 1, "model": 2}[right]
    for _ in range(60):
        guesses = control.draft(both, [0], 4)
        text = []
        for g in guesses:
            text.append(token)
            if g.token != token:
                break
        saw(control, guesses, text, 1 + len(guesses), 1.0)
    assert {g.token for g in control.draft(both, [0], 4)} == {token}
    before = model.asked
    control.draft(both, [0], 4)
    # Repetitions that have always been right are not compared with the model's guesses any more.
    assert (model.asked == before) == (right == "ngram")


def test_a_source_that_is_slower_than_a_pass_is_asked_once_before_that_is_known() -> None:
    machine = Machine(1.0, 0.01, 30.0)
    control = DraftLengthPolicy(clock=lambda: machine.now)
    control.foreseen_s = 1.0
    assert len(control.draft(Coin(machine, [0.9]), [1], 100)) == 1
    assert machine.now == 30.0


def test_the_next_text_begins_with_what_was_learnt_and_forgets_it_soon_enough() -> None:
    machine, learnt = Machine(1.0, 0.001, 0.002), AcceptanceStats()

    def drafted(chance: float) -> list[int]:
        control, source, lengths = (
            DraftLengthPolicy(MOST, learnt, clock=lambda: machine.now),
            Coin(machine, [chance]),
            [],
        )
        for _ in range(12):
            guesses = control.draft(source, [1], 100)
            right = next((i for i, g in enumerate(guesses) if g.token == 0), len(guesses))
            saw(control, guesses, [1] * (right + 1), 1 + len(guesses), machine.sweep(1 + len(guesses)))
            lengths.append(len(guesses))
        return lengths

    assert drafted(0.95)[0] == UNTRIED
    worse = drafted(0.1)
    assert worse[0] > 2 * UNTRIED > worse[-1]


@pytest.mark.parametrize("ahead", [0.2, 1.0])
def test_a_disk_that_was_slow_is_forgotten(ahead: float) -> None:
    """Long drafts had it that reading takes as long as they do, and the mean rate of all that was read said so too: a
    token took twenty times as long as without drafts, for ever where all of a sweep is read ahead."""
    machine = Machine(read=2.0, compute=0.03, guess=0.02, ahead=ahead)
    control, source = DraftLengthPolicy(clock=lambda: machine.now), Coin(machine, [0.6])
    text, seconds = [1] * 8, dict[float, float]()
    for machine.read in (2.0, 0.02):
        for tokens in (800, 100):
            began, before = machine.now, len(text)
            while len(text) < before + tokens:
                guesses = control.draft(source, text, 100)
                swept = machine.sweep(1 + len(guesses))
                right = next((i for i, g in enumerate(guesses) if g.token == 0), len(guesses))
                text += [1] * (right + 1)
                saw(control, guesses, [1] * (right + 1), 1 + len(guesses), swept)
            seconds[machine.read] = (machine.now - began) / (len(text) - before)
    assert seconds[2.0] < 0.8 and seconds[0.02] < 0.033, "without: 2 and 0.03"


def test_less_is_drafted_where_others_have_much_of_the_pass() -> None:
    machine = Machine(read=1.0, compute=0.03, guess=0.001)
    control = DraftLengthPolicy(clock=lambda: machine.now)
    for tokens in (20, 40, 60):
        control.acceptance.swept("coin", tokens, machine.sweep(tokens))
    source = Coin(machine, [0.8])
    control.acceptance.sources[source.name] = Rate(6.4, 8.0)
    for _ in range(2):
        control.acceptance.plain.add(1.0)
    alone = len(control.draft(source, [1, 2], 32))
    assert control.expected > 1.0
    control.shared = SharedPass(tokens=31)  # what is computed for them takes time
    assert len(control.draft(source, [1, 2, 3], 32)) < alone
    control.shared = SharedPass(tokens=40)
    few = len(control.draft(source, [1, 2, 3, 4], 32))
    control.shared = SharedPass(tokens=40, expected=20.0)  # and what they get of it waits for ours
    assert len(control.draft(source, [1, 2, 3, 4, 5], 32)) < few


@pytest.mark.parametrize(("trunk", "best"), [(0.0, 0), (20.0, 4)])
def test_a_block_is_as_long_as_the_experts_that_it_reads_pay_for(trunk: float, best: int) -> None:
    """A second of reading for an expert, four of them for each token, and the rest for all tokens of a pass."""
    machine, sizes = Machine(0.0, 4.0, 0.01, trunk), list[int]()
    control, source, made = DraftLengthPolicy(MOST, clock=lambda: machine.now), Coin(machine, [0.8]), 0
    control.expert_s = 1.0
    while made < 200:
        guesses = control.draft(source, range(made), MOST)
        sizes.append(len(guesses))
        took = machine.sweep(1 + len(guesses))
        right = next((i for i, g in enumerate(guesses) if g.token == 0), len(guesses))
        control.swept(1 + len(guesses), took + control.spent, 4 * (1 + len(guesses)))
        control.judged(guesses, [1] * (right + 1), took)
        made += right + 1
    other = Machine(0.0, 4.0, 0.01, trunk)
    assert sizes[0] == 0 and sizes[1] == 1, "nothing is known of either"
    assert max(sizes[2:]) <= (16 if best else 1)
    assert machine.now < 1.12 * fixed_seconds(other, Coin(other, [0.8]), best, made + 8)
