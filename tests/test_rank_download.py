"""Each rank downloads of a model of the Hub the shards that hold what it needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import rank_work
import zoo
from fake_hub import COMMIT
from outcore.checkpoint.checkpoint import read_header
from rank_processes import RankProcesses

TOKENS = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("llama"), shard_bytes=40_000)


def shards(folder: Path) -> set[str]:
    return {p.name for p in folder.glob("*.safetensors")}


def told(two: RankProcesses, source: Path, machines: Path, tells: Any = (True, True), **options: Any) -> Any:
    return two.run(rank_work.downloaded, source, machines, TOKENS, options, tells)


def test_ranks_fetch_the_shards_of_their_own_layers(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    expected, _ = rank_work.text(None, llama, TOKENS)
    whole = shards(llama)
    assert len(whole) > 6
    first, second = told(two, llama, tmp_path, resident=0)
    assert first["text"] == expected
    for rank, found in enumerate((first, second)):
        assert set(found["there"]) < whole
        assert f"{len(found['there'])} of {len(whole)} files hold what this machine needs" in found["said"][0]
        for name in whole:
            # Layers are in turn, from the second rank on; the head is the first one's.
            unneeded = [
                (".layers." in tensor and (int(tensor.split(".")[2]) + 1) % 2 != rank)
                or (rank == 1 and tensor.startswith("lm_head"))
                for tensor in read_header(llama / name)
            ]
            assert (name in found["there"]) == (not all(unneeded))
    assert set(first["there"]) | set(second["there"]) == whole
    again = told(two, llama, tmp_path)
    assert again[0]["text"] == expected
    assert [found["fetched"] for found in again] == [[], []]


def test_a_rank_that_has_the_model_keeps_it(two: RankProcesses, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "machine-0" / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(llama, folder)
    expected, _ = rank_work.text(None, llama, TOKENS)
    first, second = told(two, llama, tmp_path)
    assert first["text"] == expected
    assert first["fetched"] == first["said"] == []
    assert set(second["there"]) < shards(llama)


@pytest.mark.parametrize(
    ("model_type", "tells", "says"),
    [
        ("llama", (True, False), "is not known before"),
        ("llama one file", (True, True), "is not known before"),
        ("mixtral", (True, True), "changed as they are loaded"),
    ],
)
def test_what_cannot_be_known_before_is_downloaded_whole(
    model_type: str, tells: tuple[bool, bool], says: str, two: RankProcesses, tmp_path: Path
) -> None:
    size = None if "one" in model_type else 40_000
    folder = zoo.save_checkpoint(model_type.split()[0], tmp_path / "model", shard_bytes=size)
    if model_type == "mixtral":
        _as_published(folder)
    expected, _ = rank_work.text(None, folder, TOKENS)
    both = told(two, folder, tmp_path, tells)
    assert both[0]["text"] == expected
    for found in both:
        assert says in found["said"][0]
        assert set(found["there"]) == shards(folder)


def _as_published(folder: Path) -> None:
    """Experts one by one, as the original has them, which ``sanitize`` stacks."""
    import mlx.core as mx

    for file in folder.glob("*.safetensors"):
        found: dict[str, mx.array] = {}
        weights = mx.load(str(file))
        for name, array in weights.items():  # type: ignore[union-attr]
            if ".switch_mlp." in name:
                before, _, after = name.partition(".switch_mlp.")
                part, key = after.split(".")
                short = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
                found |= {f"{before}.experts.{n}.{short}.{key}": array[n] for n in range(array.shape[0])}
            else:
                found[name] = array
        mx.eval(found)
        mx.save_safetensors(str(file), found, {"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
