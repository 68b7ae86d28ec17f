"""The inner core by itself: its example streams what mlx-lm computes, and it loads nothing outside its list."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

import zoo

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [7, 3, 9, 4, 1, 8]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "qwen3_moe"])
def test_the_example_streams_the_tokens_of_mlx_lm(model_type: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import minimal
    finally:
        sys.path.pop(0)
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    engine = minimal.load(folder, minimal.smallest(folder))
    assert engine.plan.streamed and not engine.plan.resident
    said = list(minimal.tokens(engine, PROMPT, 12))
    engine.close()
    model, _ = load_model(folder)
    assert said == [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=12)]


def test_it_needs_nothing_outside_of_the_inner_cores_list() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (inner,) = [c["modules"] for c in contracts if c["name"].startswith("the inner core")]
    code = "import sys; sys.path.insert(0, 'examples'); import minimal; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {"outcore", "outcore.version", *(name.rpartition(".")[0] for name in inner)}
    assert {m for m in done.stdout.split() if m.split(".")[0] == "outcore"} <= {*inner, *packages}
