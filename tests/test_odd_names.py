"""Folders whose names mean something to globbing: their own weights are read, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

import outcore
import zoo
from outcore.checkpoint.checkpoint import LiteralFolder
from outcore.checkpoint.packed_store import open_model
from outcore.decode.loader import load_model
from outcore_packs.full_copy import pack_model
from test_pack import assert_holds, original, raw, reference
from test_random_state import adapter

# A name, and another folder that it would match as a pattern.
NAMES = [
    ("model[1]", "model1"),
    ("mo*el", "model"),
    ("mode?", "model"),
    ("[m]odel", "model"),
    ("**", "model"),
    ("m[!x]", "ma"),
]


@pytest.mark.parametrize(("name", "other"), NAMES)
def test_a_folder_named_like_a_pattern_is_opened_itself(tmp_path: Path, name: str, other: str) -> None:
    zoo.save_checkpoint("llama", tmp_path / other, seed=1)
    folder = zoo.save_checkpoint("llama", tmp_path / name, seed=2)
    expected = dict(tree_flatten(zoo.build("llama", seed=2).parameters()))
    lazy = open_model(folder)
    found = dict(tree_flatten(lazy.model.parameters()))
    assert all(raw(found[path]) == raw(expected[path]) for path in expected)
    assert lazy.origins.keys() == expected.keys()
    assert {info.file.parent for info in lazy.origins.values()} == {folder}


def test_no_file_of_a_folder_that_the_name_matches_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save_checkpoint("llama", tmp_path / "model1")
    folder = zoo.save_checkpoint("llama", tmp_path / "model[1]")
    opened: list[str] = []
    load = mlx_lm.utils.mx.load
    monkeypatch.setattr(mlx_lm.utils.mx, "load", lambda path, *rest: opened.append(path) or load(path, *rest))
    open_model(folder)
    assert opened == [str(folder / "model.safetensors")]


def test_it_is_packed_streamed_adapted_and_drafted_for_as_any_other(tmp_path: Path, quick_model: Path) -> None:
    twin = original(tmp_path / "model1")
    folder = tmp_path / "model[1]"
    shutil.copytree(twin, folder)
    shutil.rmtree(twin)
    original(twin, num_hidden_layers=2)
    whole = pack_model(folder, tmp_path / "out[1]")
    assert_holds(whole.tensors, reference(shutil.copytree(folder, tmp_path / "plain")))
    there = adapter(tmp_path / "plain", tmp_path / "adapter[1]")
    for at in (folder, whole.folder):
        model, _ = load_model(at, resident=0, memory="1GB", draft="self:4", adapter_path=str(there))
        ids = mx.array([[1, 2, 3]])
        expected = mlx_lm.utils.load_adapters(mlx_lm.utils.load_model(tmp_path / "plain")[0], str(there))(ids)
        with model.outcore:
            assert raw(model(ids)) == raw(expected)


def test_its_tokenizer_is_its_own(tmp_path: Path, quick_model: Path) -> None:
    folder = shutil.copytree(quick_model, tmp_path / "model[1]")
    shutil.copytree(quick_model, tmp_path / "model1")
    (tmp_path / "model1" / "tokenizer.json").write_text("{}")
    model, tokenizer = outcore.load(str(folder), memory="1GB")
    with model.outcore:
        assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"


def test_a_literal_folder_is_the_same_folder_for_everything_but_a_pattern(tmp_path: Path) -> None:
    folder = LiteralFolder(tmp_path / "a[1]")
    assert folder / "config.json" == tmp_path / "a[1]" / "config.json"
    assert str(folder / "model*.safetensors") == str(tmp_path / "a[[]1]" / "model*.safetensors")
    assert folder == tmp_path / "a[1]" and str(folder) == str(tmp_path / "a[1]")
