"""What ranks that share a model are foreseen to take."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from memory_link import memory_links
from outcore_cluster.forecast import BEHIND, RankPart, RanksPlan
from outcore_cluster.group import RankGroup
from outcore_cluster.timing import LinkTimes

READ_S, CHUNK_S, TOKEN_S, STEP = 0.1, 0.02, 0.001, 50


def part(places: list[int], read_s: float = READ_S, head_s: float = 0.0) -> RankPart:
    behind_token = [(BEHIND, 0.0, head_s)] if head_s else []
    behind_prompt = [(BEHIND, 0.0, 0.0, head_s)] if head_s else []
    return RankPart(
        host="a", layers=len(places), resident=0, slots=3, bytes_per_token=1, peak_bytes=1, budget_bytes=1,
        read_gbps=1.0, calibrated=True, notes=[],
        token=[(p, read_s, TOKEN_S) for p in places] + behind_token,
        prompt={str(STEP): [(p, read_s, CHUNK_S, TOKEN_S) for p in places] + behind_prompt},
    )  # fmt: skip


def shared(parts: list[RankPart], layers: int, prompt: int = 9, latency_s: float = 0.0) -> RanksPlan:
    return RanksPlan.of(parts, prompt, STEP, [0] * layers, 1, LinkTimes(latency_s))


def foreseen(parts: list[RankPart], prompt: int = 100, latency_s: float = 0.0) -> tuple[float, float]:
    found = shared(parts, sum(p.layers for p in parts), prompt, latency_s)
    return found.token_s, found.ttft_s


def test_layers_in_turn_and_in_blocks() -> None:
    alone = foreseen([part(list(range(16)))])
    in_turn = foreseen([part(list(range(0, 16, 2))), part(list(range(1, 16, 2)))])
    blocks = foreseen([part(list(range(8))), part(list(range(8, 16)))])
    assert alone[0] == pytest.approx(1.6, rel=0.02)
    assert in_turn[0] == pytest.approx(0.8, rel=0.03)
    assert alone[0] > blocks[0] > in_turn[0]
    assert in_turn[1] == pytest.approx(alone[1] / 2, rel=0.2)


@pytest.mark.parametrize(
    ("places", "layout"),
    [([[0, 2], [1, 3]], "in turn"), ([[2, 3], [0, 1]], "in blocks"), ([[0, 1], []], "")],
)
def test_how_layers_lie_in_words(places: list[list[int]], layout: str) -> None:
    parts = [part(each, head_s=0.1) for each in places]
    parts[1] = replace(parts[1], host="b")
    found = shared(parts, 4)
    assert found.layout == layout


def test_what_others_note_is_reported_once() -> None:
    parts = [
        replace(part([n]), notes=["all know", *["this one alone"] * (n == 1)], host="ab"[n == 1]) for n in range(3)
    ]
    found = shared(parts, 3)
    notes = RankGroup(memory_links(3)[0]).notes(found)
    assert notes == ["rank 1 (b): this one alone"]


def test_the_head_and_hops_add_to_it() -> None:
    plain = foreseen([part([0], 0), part([1], 0)])[0]
    assert foreseen([part([0], 0, head_s=0.5), part([1], 0)])[0] == pytest.approx(plain + 0.5)
    assert foreseen([part([0], 0), part([1], 0)], latency_s=0.25)[0] == pytest.approx(plain + 2 * 0.25)


def test_long_prompts_take_as_long_for_each_chunk_as_those_before() -> None:
    parts = [part([0, 2], 0), part([1, 3], 0)]
    n = 96
    half, whole, twice = (foreseen(parts, 50 * k + 1)[1] for k in (n // 2, n, 2 * n))
    assert whole - half == pytest.approx(0.04 * (n // 2), rel=0.1)
    assert twice - whole == pytest.approx(2 * (whole - half), rel=0.01)


def test_what_is_reported_comes_back_from_json() -> None:
    told = part([0, 2], head_s=0.5)
    back = RankPart(**json.loads(json.dumps(asdict(told))))
    assert shared([back], 3, 120) == replace(shared([told], 3, 120), parts=(back,))
    assert "token" not in shared([told], 3).record()["ranks"][0]
