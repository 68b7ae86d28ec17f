"""Features that meet: a pair of any two gives mlx-lm's tokens, or is refused by name. Triples are a benchmark's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from combined_cases import Case, Constraint, Pair, against, constraints, drawn, named, parsed, possible
from combined_faces import Place
from combined_models import Shelf
from combined_reference import Reference
from combined_runs import EQUAL, REFUSED, run
from rank_processes import WaitingRanks

OTHER_BITS = {"2bit", "3bit", "5bit", "6bit", "8bit"}


def not_drawn(meeting: Pair) -> bool:
    """Bits matter to what drafts from them; with other features test_equality.py and the benchmark have them."""
    values = dict(meeting)
    return values.get("weights") in OTHER_BITS and values.get("draft") not in ("self", "copy")


TABLE = Path(__file__).with_name("support") / "combined_pairs.txt"
PAIRS = [parsed(line) for line in TABLE.read_text().splitlines()]
"""Cases in which every pair meets, of those found the ones that take least time."""


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("combined"))


@pytest.fixture(autouse=True)
def on_cpu(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "transformers")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_where_features_meet_the_tokens_are_mlx_lms(case: Case, shelf: Shelf, waiting_ranks: WaitingRanks) -> None:
    """``python benchmarks/combinations.py --case "..."`` runs one of these again."""
    result = run(case, shelf, waiting_ranks.two() if case.face == "ranks" else None)
    assert result.end == EQUAL, result


FOUND_BY_TRIPLES = [
    # One rank's layers have no experts that can be read one by one, the other's have.
    "kind=moe weights=float32 adapter=full memory=pools draft=none context=plain sampling=greedy face=ranks "
    "disturbance=none",
]


@pytest.mark.parametrize("line", FOUND_BY_TRIPLES)
def test_what_triples_found_stays_mended(line: str, shelf: Shelf, waiting_ranks: WaitingRanks) -> None:
    result = run(parsed(line), shelf, waiting_ranks.two())
    assert result.end == EQUAL, result


def test_every_pair_that_can_meet_does() -> None:
    met = {m for case in PAIRS for m in case.meetings(2)}
    assert not [str(case) for case in PAIRS if against(case)]
    assert not [m for m in sorted(possible(2) - met) if not not_drawn(m)], "add a case to combined_pairs.txt"


def test_every_pair_is_drawn_for_the_benchmark() -> None:
    cases, never = drawn(2)
    assert not never
    assert possible(2) == {m for case in cases for m in case.meetings(2)} & possible(2)


REFUSALS = [(c, case) for c in constraints() if c.by == "outcore" for case in c.examples()]


@pytest.mark.parametrize(("constraint", "case"), REFUSALS, ids=lambda x: "" if isinstance(x, Constraint) else str(x))
def test_what_cannot_meet_is_refused_by_name(
    constraint: Constraint, case: Case, shelf: Shelf, waiting_ranks: WaitingRanks
) -> None:
    result = run(case, shelf, waiting_ranks.two() if case.face == "ranks" else None)
    assert result.end == REFUSED and named(result.why, case) is constraint, result


LIMITS = [case for c in constraints() if c.by == "mlx-lm" and "face" not in c.when for case in c.examples()]


@pytest.mark.parametrize("case", LIMITS, ids=str)
def test_what_mlx_lm_cannot_do_it_still_cannot(case: Case, shelf: Shelf) -> None:
    """Where it can, the entry of docs/combinations.toml goes."""
    place = Place(case, shelf)
    with pytest.raises((ValueError, AttributeError)):
        Reference(place.folder, place.adapter).answers(place.texts(), place.how)
