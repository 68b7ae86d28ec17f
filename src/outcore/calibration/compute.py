"""How long a model's layers take, by kind and number of tokens, in memory; and what computes while reads run."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median, median_low

import mlx.core as mx
import numpy as np

from ..machine.device import on_cpu
from ..machine.neighbours import Neighbours, undisturbed
from ..modules.code_planes import joined
from ..modules.split_exponents import EXPONENTS, SplitDecoder, stored_shape
from ..plan.machine_profile import TOKENS, Conditions
from .random_model import PAST_CACHES, Rig, TimedPass, seconds_of

PROMPT_TOKENS = (128, 512)
"""Numbers of tokens measured beside ``TOKENS`` where there is time: a prompt's chunks."""

SAMPLES, SAMPLES_OF_PROMPTS, PASS_S = 3, 2, 0.25
"""Times that each kind of layer is timed in a pass, and seconds of a pass, before it may be broken off."""

ROUNDS, QUIET_TURNS, MOST_TURNS = 3, 2, 8
"""Turns of all measurements, of which so many should be undisturbed; and turns at most, to get them."""

TOKENS_OF_A_TURN = 6
PREFILL = 8
"""Tokens before the one whose whole forward pass is timed."""

COMPUTE_S, COMPILE_S = 20.0, 20.0
"""Seconds that measuring a model may take, and that compiling its GPU kernels before that may."""

PARTS = 8
"""Matrices that are computed with where there is no model: a part takes milliseconds, and all are past the caches."""

Progress = Callable[[str, int, int], None]


def sync_seconds(clock: Callable[[], float] = time.perf_counter, repeats: int = 200) -> float:
    """Seconds of handing a graph of hardly any work to the device and waiting for it: median."""
    x = mx.zeros((8,))
    mx.eval(x)
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval((x + 1) * 2)
        times.append(clock() - begin)
    return median(times)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one pass by kind of layer (and of what is not a layer) and number of tokens, and how they were taken;
    the conditions are those of the turns that count. ``parts``: as in ``Calibration``."""

    kinds: dict[str, dict[int, float]]
    conditions: Conditions | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Round:
    """What was measured in one go: passes and heads by number of tokens, seconds of single tokens, others' load."""

    passes: dict[int, TimedPass] = field(default_factory=dict)
    heads: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    tokens: list[tuple[float, float | None]] = field(default_factory=list)
    load: float | None = None

    @property
    def quiet(self) -> bool:
        return bool(undisturbed([self.load]))


def times_of(
    made: Rig,
    sync_s: float,
    *,
    budget_s: float = COMPUTE_S,
    progress: Progress = lambda *_: None,
    neighbours: Neighbours | None = None,
) -> LayerTimes:
    """Seconds of one pass, by kind of layer (and of what is not a layer) and by number of tokens.

    In each turn first single tokens in whole passes, nothing evaluated on the way: that is what a token takes. Then
    layer by layer; for one token the shares are scaled to that sum, and what waiting for each layer added is taken off
    for more tokens too. Turns that others disturbed are taken again while there is time, and do not count if others do.

    Args:
        sync_s: what waiting for one layer costs, where there is no time for a whole pass.
        budget_s: seconds that it may take; what no time is left for is left out.
    """
    what = "measuring the layers"
    neighbours = neighbours or Neighbours()
    counts: tuple[int, ...] = (*TOKENS, *PROMPT_TOKENS)
    kinds = {size.kind for size in made.profile.size.layers}
    if not on_cpu():
        counts = _compile_kernels(made, kinds, counts, progress)
    deadline = made.clock() + budget_s
    progress(what, 0, MOST_TURNS)
    first, first_s = _timed_pass(made, 1, kinds, made.clock() + budget_s / 3, brief=False)
    prefill = 0
    if first.whole and first_s * 4 < budget_s / 2:
        prefill = PREFILL if PREFILL in counts and first_s * PREFILL < budget_s / 4 / ROUNDS else 1
    took: dict[int, float] = {}
    turns: list[_Round] = []
    neighbours.lap()
    while len(turns) < MOST_TURNS and not _enough(turns):
        progress(what, len(turns), MOST_TURNS)
        again = bool(turns)
        if again and made.clock() + _foreseen(took, 1) > deadline:
            break
        turn = _Round()
        if prefill and (not again or made.clock() + 5 * first_s + _foreseen(took, 1) < deadline):
            turn.tokens = made.decode(prefill, TOKENS_OF_A_TURN, budget_s / 5 / ROUNDS)
        for n in counts:
            if again and (n not in took or (n > max(TOKENS) and _known(turns, n, took[n]))):
                continue
            if made.clock() + _foreseen(took, n) > deadline:
                break
            begin = made.clock()
            seen, _ = _timed_pass(made, n, kinds, deadline, brief=n > 1 or not prefill)
            turn.passes[n] = seen
            turn.heads[n] = _head(made, n, seen)
            took[n] = made.clock() - begin
        turn.load = neighbours.lap()
        turns.append(turn)
    if not any(1 in turn.passes for turn in turns):
        turns.append(_Round({1: first}, {1: _head(made, 1, first)}))
    progress(what, MOST_TURNS, MOST_TURNS)
    return _assemble(made, turns, first, sync_s)


def _known(turns: Sequence[_Round], n: int, took_s: float) -> bool:
    """Whether a prompt's chunk was measured undisturbed, or has taken its share of the time."""
    there = [turn for turn in turns if n in turn.passes]
    return len(there) * took_s > COMPUTE_S / 5 or any(turn.quiet for turn in there)


def _enough(turns: Sequence[_Round]) -> bool:
    """Whether so many turns will do: of those that others disturbed, only where their time is known."""
    known = all(seen.working is not None for turn in turns for seen in turn.passes.values())
    return len(turns) >= ROUNDS and (known or sum(turn.quiet for turn in turns) >= QUIET_TURNS)


def _compile_kernels(made: Rig, kinds: set[str], counts: Sequence[int], progress: Progress) -> tuple[int, ...]:
    """Run each kind of layer once for each number of tokens: MLX compiles GPU kernels when they are first needed.

    On an H200 that took 24 to 34 s for one token and 62 s for eight, which without this was taken for a layer's. MLX
    keeps compiled kernels on disk, so a later calibration has more time for the others.

    Returns:
        The numbers of tokens whose kernels are there: no more are begun after ``COMPILE_S``.
    """
    until = made.clock() + COMPILE_S
    ready: list[int] = []
    for i, n in enumerate(counts):
        if ready and made.clock() > until:
            break
        progress("compiling kernels, once", i, len(counts))
        made.watched(n, lambda seen: kinds <= seen.layers.keys())
        made.head(n)
        ready.append(n)
    return tuple(ready)


def _timed_pass(made: Rig, n: int, kinds: set[str], deadline: float, *, brief: bool) -> tuple[TimedPass, float]:
    begin = made.clock()
    wanted = SAMPLES if n <= max(TOKENS) else SAMPLES_OF_PROMPTS

    def enough(seen: TimedPass) -> bool:
        now = made.clock()
        enough_of_each = all(len(seen.layers[kind]) >= wanted for kind in kinds)
        return now > deadline or (brief and enough_of_each and now - begin > PASS_S)

    return made.watched(n, enough), made.clock() - begin


def _foreseen(took: Mapping[int, float], n: int) -> float:
    """Seconds that a pass over ``n`` tokens will take, from those over fewer: in proportion at worst."""
    if n in took:
        return took[n]
    fewer = max((m for m in took if m < n), default=None)
    return took[fewer] * n / fewer if fewer else 0.0


def _head(made: Rig, n: int, seen: TimedPass) -> tuple[float, float | None]:
    """Seconds of products with tables, from the pass if it came that far; and without others' time."""
    return (seen.head, seen.working.head if seen.working is not None else None) if seen.whole else made.head(n)


@dataclass(frozen=True)
class _Counted:
    """What counts of the turns: those that were left alone, and their medians. Where none was, all of them without the
    time in which others had the processor; and where that is not known, the best of all, since others can only have
    made it slower."""

    turns: Sequence[_Round]
    quiet: bool

    @staticmethod
    def of(turns: Sequence[_Round]) -> _Counted:
        quiet = [turn for turn in turns if turn.quiet]
        return _Counted(quiet or turns, bool(quiet))

    @property
    def value(self) -> Callable[[Iterable[float]], float]:
        known = all(p.working is not None for turn in self.turns for p in turn.passes.values())
        return median_low if self.quiet or known else min

    def passes(self, n: int) -> list[TimedPass]:
        return [self._view(turn.passes[n]) for turn in self.turns]

    def heads(self, n: int) -> list[float]:
        return [self._seconds(t.heads[n]) for t in self.turns]

    def tokens(self) -> list[float]:
        return [self._seconds(times) for turn in self.turns for times in turn.tokens]

    def _seconds(self, times: tuple[float, float | None]) -> float:
        seconds, working = times
        return seconds if self.quiet or working is None else working

    def _view(self, seen: TimedPass) -> TimedPass:
        return seen if self.quiet or seen.working is None else seen.working


def _assemble(made: Rig, turns: Sequence[_Round], first: TimedPass, sync_s: float) -> LayerTimes:
    calls = Counter(made.profile.size.layers[i].kind for i in made.profile.order if i < len(made.profile.layers))
    if first.whole:
        calls = Counter({kind: len(times) for kind, times in first.layers.items()})
    layers: dict[str, dict[int, float]] = defaultdict(dict)
    rest: dict[int, float] = {}
    in_layers = parts = slow = 0.0  # of one token, layer by layer; slow: the slowest quarter
    for n in sorted({n for turn in turns for n in turn.passes}):
        counted = _Counted.of([t for t in turns if n in t.passes])
        seen, value = counted.passes(n), counted.value
        for kind in calls:
            if times := [s for p in seen for s in p.layers.get(kind, ())]:
                layers[kind][n] = value(times)
                slow += calls[kind] * upper_quartile(times) if n == 1 else 0.0
        between = [mean(p.gaps) if p.gaps else 0.0 for p in seen]
        rest[n] = value([p.prelude for p in seen]) + value(between) * max(0, sum(calls.values()) - 1)
        if n == 1:
            in_layers = sum(calls[kind] * times[1] for kind, times in layers.items() if 1 in times)
            sliced = [p.sliced for p, t in zip(seen, counted.turns, strict=True) if t.passes[1].whole]
            parts = in_layers + rest[1] + value(sliced or counted.heads(1))
        rest[n] += value(counted.heads(n))
    spread = slow / in_layers - 1 if in_layers > 0 else 0.0
    one = {kind: times[1] for kind, times in layers.items() if 1 in times} | {"": rest[1]}
    counted = _Counted.of([t for t in turns if t.tokens])
    if (tokens := counted.tokens()) and parts > 0:
        # Waiting for each layer cannot have made them faster: what is above was disturbed.
        scale = min(1.0, counted.value(tokens) / parts)
        one = {kind: seconds * scale for kind, seconds in one.items()}
        spread = max(spread, upper_quartile(tokens) / (parts * scale) - 1)
    else:
        one = {kind: max(seconds - sync_s, seconds / 2) for kind, seconds in one.items()}
    found = {kind: _less_waiting(times, one[kind]) for kind, times in layers.items() if kind in one}
    found[made.profile.size.rest_kind] = _less_waiting(rest, one[""])
    loads = [t.load for t in _Counted.of(turns).turns if t.load is not None]
    return LayerTimes(found, Conditions(time.time(), mean(loads) if loads else None, max(0.0, spread)))


def upper_quartile(times: Iterable[float]) -> float:
    """Three quarters of the samples took at most that long."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, len(ordered) * 3 // 4)]


def _less_waiting(times: Mapping[int, float], one: float) -> dict[int, float]:
    """Times by number of tokens, each less what the one for a single token was too long by."""
    if times[1] <= 0 or one <= 0:
        return {n: s for n, s in times.items() if s > 0}
    waiting, share = times[1] - one, one / times[1]
    return {n: max(s - waiting, s * share) if waiting > 0 else s - waiting for n, s in sorted(times.items())}


Load = Callable[[Callable[[], bool]], list[tuple[str, float]]]
"""Computes until told to stop; returns what was computed, by name, and the seconds of each."""


def model_load(made: Rig) -> Load:
    """The model's layers for one token, again and again."""

    def load(stop: Callable[[], bool]) -> list[tuple[str, float]]:
        samples: list[tuple[str, float]] = []
        while True:
            seen = made.watched(1, lambda _: stop())
            samples += [(kind, s) for kind, times in seen.layers.items() for s in times]
            if stop() or not seen.calls:
                return samples

    return load


def product_gbps() -> float:
    """GB/s of weights in a product of one token, float32: what a machine does where no model says more."""
    times = [s for _, s in product_load()(_times(3 * PARTS))]
    return PAST_CACHES / PARTS / median(times) / 1e9


def join_gbps(streams: int) -> float:
    """GB/s of 4-bit codes that are put together from 2 high and 2 low bits, by all streams together."""
    shape = 1024, PAST_CACHES // PARTS // 1024 // 8
    high, low = mx.full(shape, 1, dtype=mx.uint32), mx.full(shape, 2, dtype=mx.uint32)
    mx.eval(high, low)
    # The first one compiles it.
    seconds = [seconds_of(partial(joined, high, low, 4, 2), time.perf_counter, 1) for _ in range(PARTS + 1)][1:]
    return streams * 2 * high.nbytes / median(seconds) / 1e9


def cast_gbps() -> float:
    """GB/s of float32 weights that are made of bfloat16 ones, as large as layers have them."""
    stored = [mx.full((1024, PAST_CACHES // PARTS // 4096), 1, dtype=mx.bfloat16) for _ in range(PARTS)]
    mx.eval(stored)
    seconds = [seconds_of(partial(w.astype, mx.float32), time.perf_counter, 1) for _ in range(3) for w in stored]
    return 2 * stored[0].nbytes / median(seconds) / 1e9


def decode_gbps() -> float:
    """GB/s of bfloat16 weights that are put together from their signs, mantissas and codes of exponents."""
    columns = 4096
    shape = PAST_CACHES // PARTS // 2 // columns, columns
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    rows = mx.full(stored_shape(shape), 0x31, dtype=mx.uint8)
    mx.eval(rows)
    # The first one compiles it.
    seconds = [seconds_of(partial(decoder.decode, rows), time.perf_counter, 1) for _ in range(4)][1:]
    return shape[0] * columns * 2 / median(seconds) / 1e9


def _times(n: int) -> Callable[[], bool]:
    """A function that says True when it is called for the ``n``-th time."""
    left = iter(range(n, 0, -1))
    return lambda: next(left, 1) == 1


def product_load(clock: Callable[[], float] = time.perf_counter) -> Load:
    """Products of one token with matrices of ``PAST_CACHES`` bytes together, in turn, again and again."""
    columns = 4096
    rows = PAST_CACHES // PARTS // columns // 4
    weights = [mx.full((rows, columns), 0.01 * (n + 1), dtype=mx.float32) for n in range(PARTS)]
    x = mx.ones((1, columns), dtype=mx.float32)
    mx.eval(weights, x)

    def load(stop: Callable[[], bool]) -> list[tuple[str, float]]:
        samples: list[tuple[str, float]] = []
        while not samples or not stop():
            weight = weights[len(samples) % PARTS]
            samples.append(("product", seconds_of(partial(mx.matmul, x, weight.T), clock, 1)))
        return samples

    return load
