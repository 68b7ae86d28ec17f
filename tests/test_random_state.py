"""Nothing of ours touches the caller's random state: a seed gives the same text on the first run and on every other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import outcore
import zoo
from outcore.calibration.random_model import rig
from outcore.cli.main import main
from outcore.generation.sampling import make_sampler
from outcore.loading.loader import load_model
from outcore.loading.preparation import prepare
from outcore.model.pack import pack_model
from outcore.system.random_state import random_state_kept
from test_pack import original


def state() -> tuple[Any, ...]:
    key: Any = mx.random.state
    return key[0].tolist(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()


def adapter(model: Path, folder: Path) -> Path:
    loaded = mlx_lm.utils.load_model(model)[0]
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    linear_to_lora_layers(loaded, 4, parameters)
    folder.mkdir()
    weights = {k: v for k, v in tree_flatten(loaded.parameters()) if ".lora_" in k}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": '
        '{"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}}'
    )
    return folder


def resident(folder: Path, more: Path) -> None:
    load_model(folder, memory="1GB", draft="none")[0].outcore.close()


def overlay(folder: Path, more: Path) -> None:
    model, _ = load_model(folder, resident=0, memory="1GB", draft="none")
    assert model.outcore.plan.streams
    model.outcore.close()


def own_draft(folder: Path, more: Path) -> None:
    load_model(folder, resident=1, memory="1GB", draft="self:4")[0].outcore.close()


def other_draft(folder: Path, more: Path) -> None:
    load_model(folder, resident=1, memory="1GB", draft=str(folder))[0].outcore.close()


def packing(folder: Path, more: Path) -> None:
    pack_model(folder, more / "out")


def planning(folder: Path, more: Path) -> None:
    prepare(folder, memory="1GB")


def adapting(folder: Path, more: Path) -> None:
    load_model(folder, memory="1GB", adapter_path=str(adapter(folder, more / "adapter")))[0].outcore.close()


def rigging(folder: Path, more: Path) -> None:
    with rig(prepare(folder, memory="1GB").profile, 1) as made:
        made.head(2)


@pytest.mark.parametrize(
    "work", [resident, overlay, own_draft, other_draft, packing, planning, rigging], ids=lambda f: f.__name__
)
def test_the_random_state_is_the_same_before_and_after(tmp_path: Path, work: Callable[[Path, Path], None]) -> None:
    folder = original(tmp_path / "m")
    mx.random.seed(2**40 + 5)
    mx.random.uniform()  # a state that no small seed gives
    before = state()
    work(folder, tmp_path)
    assert state() == before


def test_an_adapter_draws_nothing_either(tmp_path: Path) -> None:
    folder = original(tmp_path / "m")
    there = adapter(folder, tmp_path / "adapter")
    before = state()
    load_model(folder, memory="1GB", adapter_path=str(there))[0].outcore.close()
    assert state() == before


def test_what_is_drawn_after_a_failure_is_what_would_have_been_drawn(tmp_path: Path) -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), random_state_kept():
        mx.random.uniform()
        raise ZeroDivisionError
    assert state() == before


def test_each_thread_has_its_own(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    seen: list[Any] = []

    def load() -> None:
        mx.random.seed(3)
        seen.append(state())
        load_model(folder, memory="1GB")[0].outcore.close()
        seen.append(state())

    mx.random.seed(4)
    before = state()
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen[0] == seen[1] and state() == before


def test_a_seed_gives_one_text_before_and_after_loading_and_on_first_and_later_runs(
    quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(cache: str, before: bool) -> list[int]:
        monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / cache))
        if before:
            mx.random.seed(11)
        model, tokenizer = outcore.load(str(quick_model), memory="1GB", draft="none")
        if not before:
            mx.random.seed(11)
        with model.outcore:
            answer = outcore.stream_generate(
                model, tokenizer, "def f(x):", max_tokens=12, sampler=make_sampler(1.0, 1.0, 0.0, 1)
            )
            return [r.token for r in answer]

    first = text("a", True)
    assert first == text("a", True) == text("a", False) == text("b", False)
    mx.random.seed(12)
    assert len(set(first)) > 3


def test_outcore_generate_says_the_same_on_the_first_run_with_a_seed(
    quick_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(quick_model), "--memory", "1GB", "--resident", "3", "--draft", "self:4"]
    arguments += ["--temp", "1", "--seed", "5", "--prompt", "def f", "--max-tokens", "1", "--verbose", "F"]
    said = []
    for _ in range(2):
        assert main(arguments) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
