"""Folders of a model on several machines: they are the same, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import outcore
import rank_work
import zoo
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.identity import BLOCK, block_of
from outcore.checkpoint.manifest import MANIFEST
from outcore.errors import StoreError
from outcore_packs.full_copy import pack_model
from rank_processes import RankProcesses
from test_pack import original
from test_random_state import adapter

TOKENS = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def told(two: RankProcesses, folders: list[Path], **options: Any) -> list[Any]:
    return two.run(rank_work.of_folders, folders, TOKENS, options)


def test_other_weights_of_the_same_architecture_are_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    other = zoo.save_checkpoint("llama", tmp_path / "other", seed=5)
    for said in told(two, [llama, other]):
        assert "rank 1 has other weights than rank 0" in said
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy, copy_function=shutil.copyfile)  # with times of its own
    expected, _ = rank_work.text(None, llama, TOKENS)
    assert told(two, [llama, copy])[0][0] == expected


def flip(file: Path, at: int, nbytes: int) -> None:
    """Change so many bytes of a file where they are."""
    with file.open("r+b") as opened:
        opened.seek(at)
        old = opened.read(nbytes)
        opened.seek(at)
        opened.write(bytes(byte ^ 1 for byte in old))


def test_packed_copies_of_other_weights_are_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    """By their manifests, whatever times their originals had; an original and a packed copy are compared, too."""
    other = zoo.save_checkpoint("llama", tmp_path / "other", seed=5)
    again = tmp_path / "again"
    shutil.copytree(llama, again, copy_function=shutil.copyfile)
    packs = [pack_model(model, tmp_path / f"packed-{n}").folder for n, model in enumerate((llama, again, other))]
    expected, _ = rank_work.text(None, llama, TOKENS)
    for folders in ([packs[0], packs[1]], [llama, packs[1]], [packs[1], llama]):
        assert told(two, folders)[0][0] == expected
    for folders in ([packs[0], packs[2]], [llama, packs[2]], [packs[2], again]):
        for said in told(two, folders):
            assert "rank 1 has other weights than rank 0" in said


def test_packed_copies_that_differ_in_a_few_bytes_are_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    """Blocks would not tell them apart: the manifest's checksums do."""
    changed = tmp_path / "changed"
    shutil.copytree(llama, changed)
    tensor = next(t for n, t in open_checkpoint(changed).tensors.items() if ".layers." in n and t.nbytes > 2 * BLOCK)
    flip(tensor.file, tensor.offset + (block_of(0, tensor.nbytes)[0] + BLOCK) % tensor.nbytes, 1)
    packs = [pack_model(model, tmp_path / f"packed-{n}").folder for n, model in enumerate((llama, changed))]
    for said in told(two, packs):
        assert "rank 1 has other weights than rank 0" in said


def test_codings_cannot_be_compared(two: RankProcesses, tmp_path: Path) -> None:
    """A compact copy runs beside what it was made from, and is refused beside a copy of that: it may be of another."""
    model, again = zoo.save_checkpoint("llama", tmp_path / "model", dtype=mx.bfloat16), tmp_path / "again"
    shutil.copytree(model, again, copy_function=shutil.copyfile)
    compact = pack_model(model, tmp_path / "compact", coding="compact")
    assert compact.manifest.codings
    expected, _ = rank_work.text(None, model, TOKENS)
    assert told(two, [model, compact.folder])[0][0] == expected
    for said in told(two, [again, compact.folder]):
        assert "rank 1 has a copy with --coding compact, rank 0 one with plain" in said


def test_weights_that_are_changed_as_they_are_loaded_are_compared(two: RankProcesses, tmp_path: Path) -> None:
    """Of an original ``qwen3_5`` one is added to norms: they exist nowhere on disk as they are used."""
    first, second = original(tmp_path / "first"), tmp_path / "second"
    shutil.copytree(first, second)
    tensor = next(t for n, t in open_checkpoint(second).tensors.items() if n.endswith("1.input_layernorm.weight"))
    flip(tensor.file, tensor.offset, tensor.nbytes)
    for said in told(two, [first, second]):
        assert "rank 1 has other weights than rank 0" in said


def test_other_adapters_are_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    adapters = [str(adapter(llama, tmp_path / f"adapter-{n}")) for n in (0, 1)]
    same = two.run(rank_work.each_with_options, llama, TOKENS, [{"adapter_path": adapters[0]}] * 2)
    assert len(same[0][0]) == TOKENS
    for paths in (adapters, [adapters[0], None]):
        for said in two.run(rank_work.each_with_options, llama, TOKENS, [{"adapter_path": p} for p in paths]):
            assert "rank 1 has other weights than rank 0" in said


def test_adapters_that_are_applied_in_another_way_are_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    """Where they were trained may differ."""
    first = adapter(llama, tmp_path / "first")

    def copy(name: str, change: Callable[[dict[str, Any]], Any]) -> str:
        folder = Path(shutil.copytree(first, tmp_path / name))
        about = json.loads((folder / "adapter_config.json").read_text())
        change(about)
        (folder / "adapter_config.json").write_text(json.dumps(about, indent=2))
        return str(folder)

    def texts(other: str) -> list[Any]:
        options = [{"adapter_path": path} for path in (str(first), other)]
        return two.run(rank_work.each_with_options, llama, TOKENS, options)

    same = texts(copy("elsewhere", lambda about: about.update(data="elsewhere", seed=7)))
    assert len(same[0][0]) == TOKENS
    for said in texts(copy("louder", lambda about: about["lora_parameters"].update(scale=3.0))):
        assert "rank 1 has another adapter_config.json than rank 0: copy the adapter's folder from there" in said


@pytest.mark.parametrize(
    ("file", "what"),
    [("config.json", "another config.json"), ("tokenizer_config.json", "another tokenizer, or template,")],
)
def test_other_files_beside_the_weights_are_refused(
    file: str, what: str, two: RankProcesses, llama: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    path = other / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"more": 1}))
    for said in told(two, [llama, other]):
        assert f"rank 1 has {what} than rank 0" in said


def test_other_code_of_the_models_own_is_refused(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    folders = []
    for name, more in (("a", ""), ("b", "# edited\n"), ("c", "")):
        folder = Path(shutil.copytree(llama, tmp_path / name))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
        (folder / "own.py").write_text(f"from mlx_lm.models.llama import Model, ModelArgs\n{more}")
        folders.append(folder)
    expected, _ = rank_work.text(None, llama, TOKENS)
    assert told(two, [folders[0], folders[2]], trust_remote_code=True)[0][0] == expected
    for said in told(two, folders[:2], trust_remote_code=True):
        assert "rank 1 has other code of the model's own than rank 0: copy the model's folder from there" in said


def test_a_part_of_a_model_that_an_earlier_version_packed_for_a_rank_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = pack_model(llama, tmp_path / "rank-1").folder
    manifest = json.loads((folder / MANIFEST).read_text())
    share = {"rank": 1, "ranks": 2, "owners": [0, 1], "absent": {}}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"schema": 3, "share": share}))
    with pytest.raises(StoreError, match="schema '3', this Outcore reads 1 to 2"):
        outcore.load_model(folder, memory="1GB")
