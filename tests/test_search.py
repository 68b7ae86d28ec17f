"""Candidates that are not looked at could not have been taken."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from outcore.errors import BudgetError
from outcore.plan.candidate import Candidates, place
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize, PieceSize, unit_sizes
from outcore.plan.planner import make_plan, smallest_budget

MB = 1_000_000


def random_layer(rng: random.Random, most: int) -> LayerSize:
    pieces = tuple(PieceSize(n, n + 4096, n, rng.choice([0, n])) for n in rng.sample(range(1, most), 4))
    resident, slot = sum(p.resident for p in pieces), sum(p.slot for p in pieces)
    return LayerSize(
        resident, slot, resident, streamable=rng.random() > 0.1, pieces=pieces, splittable=rng.random() > 0.3
    )


def random_size(rng: random.Random) -> ModelSize:
    most = rng.choice([30 * MB, 10_000])  # slots that outweigh all else, and such that do not
    layers = tuple(random_layer(rng, most) for _ in range(rng.randint(1, 12)))
    head = LayerSize(40 * MB, rng.randrange(1, 4 * MB), 40 * MB)
    size = ModelSize(
        layers, non_layer=90 * MB, cache=20 * MB, token=rng.randrange(100_000), hidden=rng.randrange(10_000),
        score=rng.randrange(100), window=0, state=rng.randrange(1000), logits=MB, context=1000,
        prompt=rng.randint(1, 1000), tables=rng.choice([0, 45 * MB]), head=rng.choice([None, head]),
        between=rng.randrange(10_000), growing=((1_000, None),) * 2, fixed=MB, versions=rng.choice([0, 3000]),
    )  # fmt: skip
    return rng.choice(
        [size, replace(size, sequences=3), replace(size, kept_apart=((0, 1_000),), kv_disk="on", on_disk=True)]
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_all_of_them_would_give(seed: int) -> None:
    rng = random.Random(seed)
    size = random_size(rng)
    candidates = Candidates(size)
    counts = range(len(size.layers), -1, -1)
    head, step, ring = rng.random() < 0.5 and size.head is not None, rng.randint(1, 1000), rng.choice([2, 3])
    for unit in unit_sizes(size.layers, size.most_unit):
        every = {n: candidates.at(n, head, step, ring, unit).peak for n in counts}
        weights = {n: sum(size.layers[i].resident for i in place(size, n)) for n in counts}
        assert all(weights[n] + candidates.fixed(head, step) <= peak for n, peak in every.items())
        for order in (counts, counts[::-1]):
            assert candidates.smallest(order, head, step, ring, unit) == min(every.values())
        for budget in {*every.values(), min(every.values()) - 1}:
            found = candidates.first(counts, head, step, ring, unit, budget)
            assert (found and len(found.resident)) == next(
                (len(place(size, n)) for n in counts if every[n] <= budget), None
            )


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_that_is_reported_at_once_is_that_of_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    size = random_size(rng)
    candidates = Candidates(size)
    for unit in unit_sizes(size.layers, size.most_unit):
        for count, head in product(range(len(size.layers) + 1), {False, size.head is not None}):
            candidate = candidates.at(count, head, rng.randint(1, 1000), rng.choice([2, 3]), unit)
            filled = candidate.fill(candidate.peak + rng.randrange(40 * MB))
            for each in (candidate, filled):
                plan = each.bare
                assert each.peak == plan.peak_bytes and plan.streams == bool(plan.parts or head)
                assert replace(each, of=Candidates(size)).bare == plan, (
                    "parts are this candidate's, whatever others have made"
                )


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_budget_that_is_said_is_planned_for(seed: int) -> None:
    size = random_size(random.Random(seed))
    least = smallest_budget(size)
    assert make_plan(size, least).peak_bytes <= least
    with pytest.raises(BudgetError):
        make_plan(size, least - 1)


def test_few_are_looked_at_where_few_could_be_taken() -> None:
    rng = random.Random(1)
    size = replace(
        random_size(rng), layers=tuple(random_layer(rng, 30 * MB) for _ in range(40)), sequences=1, on_disk=False
    )
    candidates = Candidates(size)
    (unit, *_), seen = unit_sizes(size.layers, size.most_unit), list[int]()
    at = candidates.at
    candidates.at = lambda *args: seen.append(args[0]) or at(*args)  # type: ignore[func-returns-value, method-assign]
    found = candidates.first(range(40, -1, -1), False, 16, 2, unit, candidates.at(20, False, 16, 2, unit).peak)
    assert found is not None and len(seen) < 15
