"""How long a model's layers take, by kind and number of tokens, in memory; and what computes while reads run."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median, median_low

import mlx.core as mx

from .calibrate_rig import PAST_CACHES, Pass, Rig, seconds_of
from .calibration import TOKENS

PROMPT_TOKENS = (128, 512)
"""Numbers of tokens measured beside ``TOKENS`` where there is time: a prompt's chunks."""

SAMPLES, SAMPLES_OF_PROMPTS, PASS_S = 3, 2, 0.25
"""Times that each kind of layer is timed in a pass, and seconds of a pass, before it may be broken off."""

ROUNDS = 3
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


def times_of(
    made: Rig, sync_s: float, *, budget_s: float = COMPUTE_S, progress: Progress = lambda *_: None
) -> dict[str, dict[int, float]]:
    """Seconds of one pass, by kind of layer (and of what is not a layer) and by number of tokens.

    First one token in a whole pass, nothing evaluated on the way: that is what a token takes. Then layer by layer; for
    one token the shares are scaled to that sum, and what waiting for each layer added is taken off for more tokens too.

    Args:
        sync_s: what waiting for one layer costs, where there is no time for a whole pass.
        budget_s: seconds that it may take; what no time is left for is left out.
    """
    what = "measuring the layers"
    counts: tuple[int, ...] = (*TOKENS, *PROMPT_TOKENS)
    kinds = {size.kind for size in made.found.size.layers}
    if mx.default_device().type != mx.DeviceType.cpu:
        counts = _compile_kernels(made, kinds, counts, progress)
    deadline = made.clock() + budget_s
    passes: dict[int, list[Pass]] = defaultdict(list)
    progress(what, 0, len(counts) + 1)
    first, first_s = _timed_pass(made, 1, kinds, made.clock() + budget_s / 3, brief=False)
    whole_s: float | None = None
    if first.whole and first_s * 4 < budget_s / 2:
        several = PREFILL in counts and first_s * PREFILL < budget_s / 4
        whole_s = made.decode(PREFILL if several else 1, 12, budget_s / 5)
    took: dict[int, float] = {}
    heads: dict[int, list[float]] = defaultdict(list)
    for turn in range(ROUNDS):
        for i, n in enumerate(counts):
            progress(what, i + 1, len(counts) + 1)
            if made.clock() + _foreseen(took, n) > deadline or (turn and (n not in took or n > max(TOKENS))):
                break
            begin = made.clock()
            seen, _ = _timed_pass(made, n, kinds, deadline, brief=n > 1 or whole_s is None)
            passes[n].append(seen)
            heads[n].append(seen.head if seen.whole else made.head(n))
            took[n] = made.clock() - begin
    passes = passes or {1: [first]}
    heads = heads or {1: [first.head if first.whole else made.head(1)]}
    progress(what, len(counts) + 1, len(counts) + 1)
    return _assemble(made, passes, heads, first, whole_s, sync_s)


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


def _timed_pass(made: Rig, n: int, kinds: set[str], deadline: float, *, brief: bool) -> tuple[Pass, float]:
    begin = made.clock()
    wanted = SAMPLES if n <= max(TOKENS) else SAMPLES_OF_PROMPTS

    def enough(seen: Pass) -> bool:
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


def _assemble(
    made: Rig,
    passes: Mapping[int, Sequence[Pass]],
    heads: Mapping[int, Sequence[float]],
    first: Pass,
    whole_s: float | None,
    sync_s: float,
) -> dict[str, dict[int, float]]:
    calls = Counter(made.found.size.layers[i].kind for i in made.found.order if i < len(made.found.layers))
    if first.whole:
        calls = Counter({kind: len(times) for kind, times in first.layers.items()})
    layers: dict[str, dict[int, float]] = defaultdict(dict)
    rest: dict[int, float] = {}
    for n, seen in passes.items():
        for kind in calls:
            if times := [s for p in seen for s in p.layers.get(kind, ())]:
                layers[kind][n] = median_low(times)
        between = [mean(p.gaps) if p.gaps else 0.0 for p in seen]
        rest[n] = median_low(p.prelude for p in seen) + median_low(between) * max(0, sum(calls.values()) - 1)
    sliced = [p.sliced for p in passes[1] if p.whole]
    parts = sum(calls[kind] * times[1] for kind, times in layers.items() if 1 in times) + rest[1]
    parts += median_low(sliced) if sliced else median_low(heads[1])
    for n in rest:
        rest[n] += median_low(heads[n])
    one = {kind: times[1] for kind, times in layers.items() if 1 in times} | {"": rest[1]}
    if whole_s is not None and parts > 0:
        one = {kind: seconds * whole_s / parts for kind, seconds in one.items()}
    else:
        one = {kind: max(seconds - sync_s, seconds / 2) for kind, seconds in one.items()}
    found = {kind: _less_waiting(times, one[kind]) for kind, times in layers.items() if kind in one}
    return found | {made.found.size.rest_kind: _less_waiting(rest, one[""])}


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
