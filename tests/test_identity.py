"""Two models whose files have the same names, sizes and times are two models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outcore.checkpoint import identity
from outcore.checkpoint import packed_store as store
from outcore.checkpoint.checkpoint import open_checkpoint, read_header
from outcore.checkpoint.identity import identity_of
from outcore.checkpoint.pack import pack_overlay
from outcore.checkpoint.packed_store import open_model, places
from outcore.decode.preparation import prepare
from outcore.modules.layers import find_layers
from outcore_drafts.low_bit_copy import low_bit_copy
from outcore_packs.full_copy import pack_model
from test_pack import assert_holds, original, reference
from test_random_state import adapter


def timeless(folder: Path) -> Path:
    """As reproducible archives and the layers of container images keep files."""
    for path in folder.iterdir():
        os.utime(path, ns=(0, 0))
    return folder


def twins(tmp_path: Path, change: str) -> tuple[Path, Path]:
    """Two folders of one name that differ in one tensor."""
    (tmp_path / "a").mkdir()
    first = original(tmp_path / "a" / "model")
    second = shutil.copytree(first, tmp_path / "b" / "model")
    info = next(t for name, t in sorted(open_checkpoint(second).tensors.items()) if change in name)
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        data = np.frombuffer(file.read(info.nbytes), np.uint8)
        file.seek(info.offset)
        file.write((data ^ 1).tobytes())
    folders = [timeless(first), timeless(second)]
    stats = [sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in f.iterdir()) for f in folders]
    assert stats[0] == stats[1]
    return first, second


@pytest.mark.parametrize("change", ["conv1d.weight", "input_layernorm.weight"])
def test_a_model_of_the_same_names_sizes_and_times_gets_an_overlay_of_its_own(tmp_path: Path, change: str) -> None:
    first, second = twins(tmp_path, change)
    for folder in (first, second):
        lazy = open_model(folder)
        layers = find_layers(lazy.model)
        pack_overlay(lazy, layers)
        assert_holds(places(lazy, layers), reference(folder))


def test_a_full_copy_in_the_cache_is_not_taken_for_another_model_of_the_same_names_sizes_and_times(
    tmp_path: Path,
) -> None:
    first, second = twins(tmp_path, "up_proj.weight")
    copy = pack_model(first, None)
    assert open_model(first).checkpoint.folder == copy.folder
    assert open_model(second).checkpoint.folder == second


def test_any_tensor_that_differs_as_a_whole_is_seen(tmp_path: Path) -> None:
    shapes = {"scalar": (), "row": (7,), "page": (32, 32), "large": (300, 400), "empty": (0, 3), "last": (5,)}
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def written(changed: str) -> str:
        arrays = {
            name: mx.array(np.random.default_rng(i).normal(size=shape) + (name == changed)).astype(mx.float32)
            for i, (name, shape) in enumerate(shapes.items())
        }
        mx.save_safetensors(str(folder / "model.safetensors"), arrays)
        timeless(folder)
        return identity_of(open_checkpoint(folder))

    found = {name: written(name) for name in ("", *shapes)}
    assert found.pop("empty") == found[""]
    assert len(set(found.values())) == len(found)


def test_a_copy_made_under_an_older_kind_of_identity_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = original(tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(identity, "VERSION", b"")
        old = pack_model(folder, None)
    assert open_model(folder).checkpoint.folder == folder
    new = pack_model(folder, None)
    assert new.folder != old.folder
    assert open_model(folder).checkpoint.folder == new.folder


def test_a_draft_is_of_the_adapter_that_it_was_made_with(tmp_path: Path) -> None:
    folder = original(tmp_path / "m")
    there = adapter(folder, tmp_path / "adapter")

    def draft() -> Path:
        return low_bit_copy(prepare(folder, memory="1GB", adapter_path=str(there)).profile, 4).folder

    first = draft()
    moved = there.rename(tmp_path / "moved")
    moved.rename(there)
    assert draft() == first
    file = there / "adapters.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    info = next(iter(read_header(file).values()))
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + info.nbytes] = bytes(info.nbytes)[::-1].replace(b"\0", b"\1")
    file.write_bytes(data)
    os.utime(file, ns=times)
    assert draft() != first


def test_another_mlx_gets_copies_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = pack_model(original(tmp_path / "m"), None)
    monkeypatch.setattr(store, "version", lambda _: "0.99")
    assert open_model(tmp_path / "m").checkpoint.folder == tmp_path / "m" != copy.folder
