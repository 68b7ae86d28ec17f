"""No interrupt, fault or odd input changes a later answer: random ones, against mlx-lm."""

from __future__ import annotations

from pathlib import Path

import disturbances
from disturbances import Models, Round


def test_what_goes_on_after_a_disturbance_equals_mlx_lms(tmp_path: Path) -> None:
    """A few rounds; ``benchmarks/disturbances.py`` ran 10,000 (disturbances-cpu.json)."""
    rounds: list[Round] = []
    disturbances.run(Models(tmp_path, disturbances.TYPES[::4]), 3, 0, 3, rounds.append)
    assert [r for r in rounds if r.differs] == []
    assert any(r.happened for r in rounds)
