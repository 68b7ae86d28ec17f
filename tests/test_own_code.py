"""Models with code of their own in their folder (``model_file``): once it is edited, nothing of the old is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import outcore
import zoo
from outcore.cli.main import main
from outcore.decode import prefix_cache
from outcore_prefix import prefix_cache as prompts
from stand_ins import TokensOnly

OWN = """
import runpy
from pathlib import Path
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs
FACTOR = 1.0 + runpy.run_path(str(Path(__file__).parent / "PART"))["MORE"]


class Model(llama.Model):
    def sanitize(self, weights):
        weights = super().sanitize(weights)
        return {k: v * FACTOR if k.endswith("up_proj.weight") else v for k, v in weights.items()}
"""

MADE = ["overlay", "self draft"]
"""Kinds of what is kept of a model, as ``outcore cache ls`` calls them."""

IDS = [3 + (7919 * i) % 50 for i in range(20)]
"""More than a block of the prefix cache here."""


@pytest.fixture
def edited(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model's folder, and the file of its code that is edited."""
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    part = request.param if request.param != "own.py" else "part.py"
    (folder / "parts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(folder)
    (folder / part).write_text("MORE = 0.5\n")
    (folder / "own.py").write_text(OWN.replace("PART", part))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py", "max_position_embeddings": 2048}))
    return folder, folder / request.param


def edit(file: Path) -> None:
    code = file.read_text().replace("1.0 + ", "1.75 + ").replace("MORE = 0.5", "MORE = 1.25")
    assert code != file.read_text()
    file.write_text(code)


def text(folder: Path, ids: list[int], **options: Any) -> tuple[bool, int]:
    """Whether tokens and log-probabilities are mlx-lm's, and how much of the prompt was found."""
    theirs = mlx_lm.utils.load_model(folder, trust_remote_code=True)[0]
    steps = generate_step(mx.array(ids), theirs, max_tokens=4, prefill_step_size=16)
    wanted = [(int(token), np.array(logprobs)) for token, logprobs in steps]
    given: dict[str, Any] = {"memory": "1GB", "context": 64, "prompt": 32, "prefill_step_size": 16} | options
    model = outcore.load_model(folder, trust_remote_code=True, govern=False, **given)[0]
    with model.outcore as session:
        found = list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=4, prefill_step_size=16))
        tokens = [r.token for r in found] == [token for token, _ in wanted]
        same = all(np.array_equal(np.array(r.logprobs), w) for r, (_, w) in zip(found, wanted, strict=True))
        return tokens and same, session.metrics.prompt_found


@pytest.mark.parametrize("edited", ["linked/part.py"], indirect=True)
def test_prompts_that_the_old_code_computed_are_not_found(
    edited: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = edited
    for module in (prompts, prefix_cache):
        monkeypatch.setattr(module, "GRID", 16)
    monkeypatch.setattr(prompts, "STATE_SHARE", 1e6)
    options: dict[str, Any] = {"prefix_cache": "on", "draft": "none"}
    assert text(folder, IDS, **options) == (True, 0)
    equal, found = text(folder, IDS, **options)
    assert equal and found > 0
    edit(file)
    assert text(folder, IDS, **options) == (True, 0)


@pytest.mark.parametrize("edited", ["own.py"], indirect=True)
def test_weights_and_drafts_that_the_old_code_made_are_made_anew(
    edited: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = edited

    def kept() -> list[str]:
        capsys.readouterr()
        assert main(["cache", "ls", "--json"]) == 0
        kinds = [e["kind"] for e in json.loads(capsys.readouterr().out)["entries"]]
        return sorted(kind for kind in kinds if kind in MADE)

    assert text(folder, IDS, resident=0, draft="self:4") == (True, 0)
    assert kept() == MADE
    edit(file)
    assert text(folder, IDS, resident=0, draft="self:4") == (True, 0)
    assert kept() == sorted(MADE * 2)


@pytest.mark.parametrize("edited", ["own.py"], indirect=True)
def test_code_is_named_by_the_models_own_configuration_alone(edited: tuple[Path, Path]) -> None:
    folder, _ = edited
    with pytest.raises(outcore.UnsupportedModelError, match=r"config\.json"):
        outcore.load_model(folder, trust_remote_code=True, model_config={"model_file": "own.py"})
