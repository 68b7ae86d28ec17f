"""Models of types that only mlx-vlm knows: what is said without it, and their text streamed with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outcore import CheckpointError, UnsupportedModelError, load_model
from outcore.modules.hooks import swap
from outcore_vision import model_types

ROOT = Path(__file__).parents[1]


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.zeros((2, 2))})
    return folder


@pytest.mark.parametrize("kind", ["klear", "llava-qwen2", "nemotron_h_puzzle"])
def test_without_mlx_vlm_the_error_names_the_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_types, "_models", lambda: None)
    with pytest.raises(UnsupportedModelError, match=rf"{kind} needs mlx-vlm: pip install 'outcore\[vision\]'"):
        load_model(checkpoint(tmp_path / "model", model_type=kind))


def test_types_that_neither_library_knows_are_told_as_before(tmp_path: Path) -> None:
    for kind in ("no_such_type", "no/such"):
        with pytest.raises(CheckpointError, match=f"Model type {kind} not supported"):
            load_model(checkpoint(tmp_path / kind.replace("/", "-"), model_type=kind))


def test_the_core_names_mlx_vlm_nowhere_and_does_not_import_it() -> None:
    for file in (ROOT / "src" / "outcore").rglob("*.py"):
        said = file.read_text(encoding="utf-8").lower()
        assert "mlx_vlm" not in said and "mlx-vlm" not in said and "outcore_vision" not in said, file
    code = "import sys, outcore.cli.main as m; m.main(['--help']); sys.exit('mlx_vlm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


TYPES = ["klear", "dots_ocr"]
"""Experts, and a language model beside a tower."""


@pytest.mark.parametrize("kind", TYPES)
def test_streamed_logits_equal_mlx_vlms(kind: str, tmp_path: Path) -> None:
    """``benchmarks/vision_types.py`` runs all types so."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_types

    row = vision_types.survey(kind, tmp_path, "float32")
    assert row["equal"], row
    assert row["streamed"] == row["layers"] - 1 and row["told_apart"]


@pytest.mark.parametrize("kind", ["inkling", "moondream3", "qwen3_omni_moe", "zaya1_vl"])
def test_experts_without_a_switch_of_the_usual_form_are_read_one_by_one(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    import vision_types
    import vision_zoo

    folder = vision_zoo.save_checkpoint(kind, tmp_path / "model")
    expected, _ = vision_types.theirs(folder)
    for found in vision_types.one_by_one(folder, expected, most=0):
        # What is read ahead when counting begins and ends may be a unit more or less.
        assert found["interrupts"] and found["read"] == pytest.approx(found["trunk"] + found["missed"], rel=0.1), found
    if kind == "zaya1_vl":  # its adapters for images are not among the weights
        from outcore_vision.tower import tower_of

        with (
            load_model(folder, memory="1GB")[0].outcore as session,
            pytest.raises(UnsupportedModelError, match="images"),
        ):
            tower_of(session.profile.lazy.model)


def test_quantized_weights_used_beside_their_modules_call(tmp_path: Path) -> None:
    """In parts: these gave other logits, and NaN. The function runs in the module's call, where its weights are."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    from mlx_vlm.models.qwen4_exp.language import _row_invariant_quantized_projection as project

    import vision_types

    row = vision_types.survey("qwen4_exp", tmp_path, "float32", quantize={"bits": 4, "group_size": 32})
    assert row["equal"] and row["split"] == row["experts"] == row["layers"], row

    from outcore_vision.switches import SINGLE

    linear, x, noted = nn.Linear(64, 32, bias=False).to_quantized(32, 4), mx.ones((1, 3, 64)), list[Any]()
    expected, weights = project(linear, x), dict(linear)
    for key in weights:
        linear[key] = mx.zeros((0,))

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        linear.update(weights)
        noted.append(getattr(original, "func", None))
        return original(*args, **kwargs)

    swap(linear, "Streamed", call)
    assert mx.array_equal(project(linear, x), expected).item() and noted == [SINGLE]

    from mlx_vlm.models.glm5_next.language import linear as short

    noted.clear()  # a few tokens, which mlx-vlm computes one by one: one call, as in longer passes
    assert mx.array_equal(short(linear, x), expected).item() and len(noted) == 1


def test_the_best_tokens_are_chosen_for_each_length() -> None:
    """mlx-vlm compiles the choice for all lengths, with where the first one parts: then others' were not the best."""
    pytest.importorskip("mlx_vlm", reason="needs the extra vision", exc_type=ImportError)
    from outcore_vision.text_model import text_classes

    text_classes("hy_v4")
    from mlx_vlm.models.hy_v4.indexer import _partition_scores as choose

    for length in (8, 24):  # a shorter one would end the process
        best = mx.random.permutation(length)
        given = mx.ones((1, 1, 1, 1)), best[None, None, :, None].astype(mx.float32), mx.ones((1, 1, 1))
        chosen = choose(3, False)(*given)[..., -3:]
        assert sorted(best[chosen.flatten()].tolist()) == [length - 3, length - 2, length - 1]
