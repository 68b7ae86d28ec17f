"""Folders that hold what one rank of several needs."""

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
from outcore.checkpoint.manifest import MANIFEST, read_manifest
from outcore.checkpoint.pack import pack_model
from outcore.cli.main import main
from outcore.errors import StoreError, UsageError
from outcore_cluster.folders import RankShares, pack_ranks
from rank_processes import RankProcesses
from test_pack import original
from test_random_state import adapter

TOKENS = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("packed")
    list(pack_ranks(llama, output, RankShares((1.0, 1.0))))
    return output


def told(two: RankProcesses, folders: list[Path], **options: Any) -> list[Any]:
    return two.run(rank_work.of_folders, folders, TOKENS, options)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "gemma4", "mixtral"])
def test_ranks_with_folders_of_their_own_give_one_ranks_text(
    model_type: str, two: RankProcesses, tmp_path: Path
) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    expected, _ = rank_work.text(None, folder, TOKENS)
    stores = list(pack_ranks(folder, tmp_path / "out", RankShares((1.0, 2.0))))
    shutil.rmtree(folder)
    for resident in (0, None):
        (found, did), (_, other) = told(two, [s.folder for s in stores], resident=resident)
        assert found == expected
        assert 0 < did["layers"] < other["layers"]


def test_a_folder_has_its_share_and_what_all_need(llama: Path, packed: Path) -> None:
    """Layers' bytes are divided; embeddings are everywhere, the head is the first rank's."""
    tensors = open_checkpoint(llama).tensors
    layers = {name: t.nbytes for name, t in tensors.items() if ".layers." in name}
    head = sum(t.nbytes for name, t in tensors.items() if name.startswith("lm_head"))
    assert head
    everywhere = sum(t.nbytes for t in tensors.values()) - sum(layers.values()) - head
    for rank in (0, 1):
        manifest = read_manifest(packed / f"rank-{rank}" / MANIFEST)
        assert manifest.share is not None
        mine = sum(n for name, n in layers.items() if manifest.share.owners[int(name.split(".")[2])] == rank)
        there = {name for file in manifest.files for name in _names(packed / f"rank-{rank}" / file)}
        own = sum(tensors[name].nbytes for name in there)
        assert own == mine + everywhere + (head if rank == 0 else 0)
        assert len(there) + sum(map(len, manifest.share.absent.values())) == len(tensors)


def _names(path: Path) -> set[str]:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    return {name for name in header if not name.startswith("__")}


def test_folders_that_do_not_fit_together_are_refused_by_name(
    two: RankProcesses, llama: Path, packed: Path, tmp_path: Path
) -> None:
    first, second = packed / "rank-0", packed / "rank-1"
    three = [s.folder for s in pack_ranks(llama, tmp_path / "three", RankShares((1.0, 1.0, 1.0)))]
    other = [s.folder for s in pack_ranks(llama, tmp_path / "other", RankShares((3.0, 1.0)))]
    zoo.save_checkpoint("llama", tmp_path / "model", seed=5)
    model = [s.folder for s in pack_ranks(tmp_path / "model", tmp_path / "models", RankShares((1.0, 1.0)))]
    for folders, says in (
        ([first, first], "rank 1 has the folder of rank 0 of 2: give it that of rank 1"),
        ([second, first], "rank 0 has the folder of rank 1 of 2"),
        ([first, three[1]], "rank 1 has the folder of rank 1 of 3, and there are 2"),
        ([first, other[1]], "rank 1 has a folder with other layers than that of rank 0"),
        ([first, model[1]], "rank 1 has a folder of another model than rank 0"),
    ):
        for said in told(two, folders):
            assert says in said
    expected, _ = rank_work.text(None, llama, TOKENS)
    assert told(two, [llama, second])[0][0] == expected, "one that has all of it may do without a folder of its own"


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
    assert compact.codings
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


def test_who_has_all_of_it_may_have_a_copy_of_what_was_packed(
    two: RankProcesses, llama: Path, packed: Path, tmp_path: Path
) -> None:
    """With times of its own; and another model's weights are found beside a folder, too."""
    copy, other = tmp_path / "copy", zoo.save_checkpoint("llama", tmp_path / "other", seed=5)
    shutil.copytree(llama, copy, copy_function=shutil.copyfile)
    expected, _ = rank_work.text(None, llama, TOKENS)
    assert told(two, [copy, packed / "rank-1"])[0][0] == expected
    for said in told(two, [other, packed / "rank-1"]):
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


def test_a_ranks_folder_alone_is_refused(packed: Path) -> None:
    with pytest.raises(StoreError, match="holds the layers of rank 1 of 2 alone"):
        outcore.load_model(packed / "rank-1", memory="1GB")


def test_what_is_packed_is_found_again_or_refused(llama: Path, packed: Path) -> None:
    before = (packed / "rank-0" / MANIFEST).stat().st_mtime_ns
    list(pack_ranks(llama, packed, RankShares((1.0, 1.0))))
    assert (packed / "rank-0" / MANIFEST).stat().st_mtime_ns == before
    with pytest.raises(StoreError, match="packed for rank 0 of 2, with other layers"):
        list(pack_ranks(llama, packed, RankShares((3.0, 1.0))))


@pytest.mark.parametrize("text", ["1", "2:1", "x", "2:0,1", "2:1,nan", ""])
def test_shares_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        RankShares.parsed(text)


def test_more_ranks_than_layers_are_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(llama), "--ranks", "40", "--output", str(tmp_path / "out")]) == 2
    assert "would have no layer" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_outcore_pack_ranks(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pack", str(llama), "--ranks", "2:1,3:blocks", "--json"]
    assert main(words) == 2
    assert "--output" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert f"give outcore launch's command --model {tmp_path};" in told.out + told.err
    found = json.loads(told.out.splitlines()[-1])
    assert [(Path(row["folder"]).name, row["layers"]) for row in found["ranks"]] == [("rank-0", 1), ("rank-1", 3)]
    share = read_manifest(tmp_path / "rank-0" / MANIFEST).share
    assert share is not None
    assert share.owners == [0, 1, 1, 1]
    # Nobody is sent to one of them, which alone is no model.
    assert main(["info", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "outcore launch" in said and "give " not in said
