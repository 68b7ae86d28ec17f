"""No interrupt, fault or odd input changes a later answer: random ones, against mlx-lm."""

from __future__ import annotations

from pathlib import Path

import pytest

import disturbances
from disturbances import Models, Round


@pytest.mark.parametrize("seed", range(2))
def test_what_goes_on_after_a_disturbance_equals_mlx_lms(seed: int, tmp_path: Path) -> None:
    """A few rounds of each seed; ``benchmarks/disturbances.py`` ran 10,000 (disturbances-cpu.json)."""
    rounds: list[Round] = []
    types = disturbances.TYPES[seed::4]
    disturbances.run(Models(tmp_path, types), 4, seed, 4, rounds.append)
    assert [r for r in rounds if r.differs] == []
    assert any(r.happened for r in rounds)
