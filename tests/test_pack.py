"""Packed copies, on real files: what is in them, and what happens when packing is cut off."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
import safetensors
from mlx.utils import tree_flatten

import zoo
from outcore.checkpoint import packed_bytes
from outcore.checkpoint import packed_store as store
from outcore.checkpoint.checkpoint import TensorInfo, read_header
from outcore.checkpoint.lazy_model import DTYPES, LazyModel
from outcore.checkpoint.manifest import is_packed
from outcore.checkpoint.pack import pack_overlay
from outcore.checkpoint.packed_bytes import array_bytes, file_content, packed_file
from outcore.checkpoint.packed_store import PackedStore, missing_bytes, open_model, open_packed, places
from outcore.errors import MissingFileError, StoreError, StoreSpaceError
from outcore.machine.cache_folder import USERS
from outcore.modules.layers import find_layers
from outcore_packs.full_copy import pack_model

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight")
LARGE = {
    "hidden_size": 256, "num_hidden_layers": 5, "num_experts": 8, "moe_intermediate_size": 256, "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTCORE_CACHE", str(folder))
    return folder


def original(folder: Path, model_type: str = "qwen3_5", **settings: Any) -> Path:
    """A checkpoint as its authors publish it, in bf16: experts fused, convolutions and norms in their own form."""
    config = copy.deepcopy(zoo.CONFIGS[model_type])
    config["text_config"].update(settings)
    model_class, args_class = mlx_lm.utils._get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    zoo.make_weights(model)
    weights: dict[str, mx.array] = {}
    for path, a in tree_flatten(model.parameters()):
        a = a.astype(mx.bfloat16)
        if "conv1d.weight" in path:
            a = mx.contiguous(a.moveaxis(1, 2))
        if path.endswith((*NORMS, ".k_norm.weight")):
            a = a - 1.0
        weights[path.replace("language_model.model", "model.language_model").replace("language_model.lm", "lm")] = a
    for path in [path for path in weights if path.endswith("switch_mlp.gate_proj.weight")]:
        stem = path.removesuffix("switch_mlp.gate_proj.weight")
        gate, up, down = (weights.pop(f"{stem}switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        weights[f"{stem}experts.gate_up_proj"] = mx.concatenate([gate, up], axis=-2)
        weights[f"{stem}experts.down_proj"] = down
    folder.mkdir()
    names = sorted(weights)
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        mx.save_safetensors(str(file), {name: weights[name] for name in part})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(folder: Path) -> dict[str, mx.array]:
    return dict(tree_flatten(mlx_lm.utils.load_model(folder)[0].parameters()))


def raw(a: mx.array) -> bytes:
    return np.array(mx.contiguous(a).reshape(-1).view(mx.uint8), copy=False).tobytes()


def on_disk(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)


def overlay_of(lazy: LazyModel) -> Path:
    return store.overlay(lazy)[0]


def state(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.iterdir() if p.name != USERS}


def assert_holds(found: dict[str, TensorInfo], expected: dict[str, mx.array]) -> None:
    for path, info in found.items():
        assert DTYPES[info.dtype] == expected[path].dtype and info.shape == expected[path].shape, path
        assert on_disk(info) == raw(expected[path]), path


def refusal(error: type[Exception], function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **named)
    assert caught.type is error
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600, message
    return message


# The layout


def test_files_are_as_predicted_and_every_tensor_begins_at_a_block(tmp_path: Path) -> None:
    store_ = pack_model(original(tmp_path / "m", "qwen3_5_moe"), None)
    lazy = open_model(tmp_path / "m")
    for file in store_.files:
        found = {name: info for name, info in read_header(file).items() if not name.startswith("__pad_")}
        specs = [(name, DTYPES[info.dtype], info.shape) for name, info in found.items()]
        assert packed_file(file.name, "", specs).places(file.parent) == list(found.values())
        assert all(info.offset % 4096 == 0 for info in found.values())
        assert file.stat().st_size % 4096 == 0
    assert [file.name for file in store_.files] == [f"layer_000{i}.safetensors" for i in range(4)] + [
        "non_layer.safetensors"
    ]
    assert lazy.origins.keys() == store_.tensors.keys()


def test_layout_keeps_scalars_empty_tensors_and_every_dtype(tmp_path: Path) -> None:
    dtypes = [mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32, mx.complex64]
    specs = [(f"a{i}", dtype, (3, i)) for i, dtype in enumerate(dtypes)] + [("scalar", mx.float32, ())]
    arrays = {name: mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype) for name, dtype, shape in specs}
    file = store.packed_file("layer_0000.safetensors", "layer", arrays)
    path = tmp_path / file.name
    path.write_bytes(b"".join(file_content(file, dict(arrays))))
    assert path.stat().st_size == file.nbytes
    found = mx.load(str(path))
    for name, dtype, shape in specs:
        assert found[name].dtype == dtype and found[name].shape == shape
        assert raw(found[name]) == raw(arrays[name])


def test_views_of_larger_arrays_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_bytes, "CHUNK", 300)
    fused = mx.random.normal((7, 10, 12)).astype(mx.bfloat16)
    parts = list(array_bytes("up", fused[:, 5:, :]))
    assert max(len(part) for part in parts) <= 300 and len(parts) > 1
    whole = np.array(fused.view(mx.uint16))
    assert b"".join(parts) == whole[:, 5:, :].tobytes()
    assert b"".join(array_bytes("strided", fused[:, 3, ::2][:, 1])) == whole[:, 3, 2].tobytes()
    assert b"".join(array_bytes("bytes", fused.view(mx.uint8)[0, 0, ::2])) == whole[0, 0].tobytes()[::2]
    assert b"".join(array_bytes("turned", fused.swapaxes(0, 2))) == whole.swapaxes(0, 2).tobytes()
    assert b"".join(array_bytes("spread", mx.broadcast_to(fused[0, 0, 0], (9,)))) == whole[0, 0, :1].tobytes() * 9


def test_a_tensor_named_like_padding_is_refused() -> None:
    refusal(StoreError, packed_file, "f", "", [("__pad_0", mx.float32, (1,))])


def test_every_file_opens_with_other_tools(tmp_path: Path) -> None:
    folder = original(tmp_path / "m", "qwen3_5_moe")
    expected = reference(folder)
    seen = set()
    for file in pack_model(folder, tmp_path / "out").files:
        arrays: Any = mx.load(str(file))
        found = dict(safetensors.deserialize(file.read_bytes()))
        assert found.keys() == arrays.keys()
        for name in found.keys() & expected.keys():
            assert tuple(found[name]["shape"]) == arrays[name].shape == expected[name].shape
            assert bytes(found[name]["data"]) == raw(arrays[name]) == raw(expected[name])
            seen.add(name)
    assert seen == expected.keys()


# Overlays


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_overlay_holds_what_sanitize_changed_bit_for_bit(tmp_path: Path, cache: Path, model_type: str) -> None:
    folder = original(tmp_path / "m", model_type)
    lazy = open_model(folder)
    layers = find_layers(lazy.model)
    found = places(lazy, layers)
    assert not cache.exists()  # foretelling writes nothing
    assert found.keys() == {f"{layer.path}.{p.path}" for layer in layers for p in layer.parameters}
    changed = {path for path, info in found.items() if info.file.parent != folder}
    assert any("conv1d" in path for path in changed)
    assert any("switch_mlp.up_proj" in path for path in changed) == (model_type == "qwen3_5_moe")
    missing = missing_bytes(lazy, layers)
    pack_overlay(lazy, layers)
    assert missing == sum(p.stat().st_size for p in overlay_of(lazy).glob("*.safetensors")) > 0
    assert missing_bytes(lazy, layers) == 0
    assert open_packed(overlay_of(lazy)).tensors.keys() == changed
    assert_holds(found, reference(folder))
    assert places(open_model(folder), layers) == found


def test_overlay_of_some_layers_grows_by_the_others(tmp_path: Path) -> None:
    folder = original(tmp_path / "m", "qwen3_5_moe")
    lazy = open_model(folder)
    layers = find_layers(lazy.model)
    pack_overlay(lazy, layers[2:])
    before = state(overlay_of(lazy))
    assert {"layer_0002.safetensors", "layer_0003.safetensors"} < before.keys()
    assert "layer_0001.safetensors" not in before
    assert missing_bytes(lazy, layers[2:]) == 0 < missing_bytes(lazy, layers)
    pack_overlay(lazy, layers)
    assert missing_bytes(lazy, layers) == 0
    assert state(overlay_of(lazy))["layer_0002.safetensors"] == before["layer_0002.safetensors"]
    assert_holds(places(lazy, layers), reference(folder))


def test_nothing_is_packed_for_a_converted_model(tmp_path: Path, cache: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5_moe", tmp_path / "m", quantize={"bits": 4, "group_size": 64})
    lazy = open_model(folder)
    pack_overlay(lazy, find_layers(lazy.model))
    assert missing_bytes(lazy, find_layers(lazy.model)) == 0
    assert not cache.exists()


def test_overlay_needs_memory_for_about_one_layer_and_leaves_the_model_unread(tmp_path: Path) -> None:
    lazy = open_model(original(tmp_path / "m", "qwen3_5_moe", **LARGE))
    layers = find_layers(lazy.model)
    packed = missing_bytes(lazy, layers)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pack_overlay(lazy, layers)
    peak = mx.get_peak_memory() - before
    assert packed > 9e6
    assert peak < 2 * packed / len(layers), (peak, packed)
    assert mx.get_active_memory() - before < 100_000


def test_damaged_overlay_file_is_found_and_packed_again(tmp_path: Path) -> None:
    folder = original(tmp_path / "m")
    lazy = open_model(folder)
    layers = find_layers(lazy.model)
    pack_overlay(lazy, layers)
    before = state(overlay_of(lazy))
    victim = overlay_of(lazy) / "layer_0000.safetensors"
    flip(victim, -5000)
    assert "changed since it was packed; pack again" in refusal(StoreError, open_packed, overlay_of(lazy))
    assert missing_bytes(lazy, layers) == victim.stat().st_size
    pack_overlay(lazy, layers)
    assert_holds(places(lazy, layers), reference(folder))
    after = state(overlay_of(lazy))
    assert {name for name in after if after[name] != before[name]} == {victim.name, "manifest.json"}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Packing that is cut off


class Cut(Exception):
    """Raised out of a progress callback."""


def cut_at(unit: str) -> Any:
    calls = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal calls
        calls += unit in what
        if calls == 3:  # in the middle of its file
            raise Cut

    return progress


def test_pack_that_was_cut_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = original(tmp_path / "m", "qwen3_5_moe")
    out = tmp_path / "out"
    with pytest.raises(Cut):
        pack_model(folder, out, progress=cut_at("layers.2"))
    assert {p.name for p in out.glob("*.safetensors*")} == {"layer_0000.safetensors", "layer_0001.safetensors"}
    assert not is_packed(out)
    refusal(MissingFileError, open_model, out)
    before = state(out)
    flip(out / "layer_0001.safetensors", -1)  # not as it was written: not kept
    units = []
    whole = pack_model(folder, out, progress=lambda what, *_: units.append(what))
    assert list(dict.fromkeys(units)) == [f"packing language_model.model.layers.{i}" for i in (1, 2, 3)] + [
        "packing non_layer"
    ]
    assert state(out)["layer_0000.safetensors"] == before["layer_0000.safetensors"]
    assert not (out / "manifest.partial.json").exists()
    assert_holds(whole.tensors, reference(folder))


def test_original_that_changes_meanwhile_is_not_packed(tmp_path: Path) -> None:
    folder = original(tmp_path / "m")
    lazy = open_model(folder)

    def progress(what: str, done: int, total: int) -> None:
        os.utime(folder / "model-00001-of-00002.safetensors")

    assert "changed while" in refusal(StoreError, pack_overlay, lazy, find_layers(lazy.model), None, progress)
    assert not is_packed(overlay_of(lazy))
    assert missing_bytes(lazy, find_layers(lazy.model)) > 0


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    gc.collect()  # lazy arrays hold their files open
    subprocess.run(["umount", folder], check=True)


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 << 20))
    message = refusal(StoreSpaceError, pack_model, original(tmp_path / "m"), small_disk / "out")
    assert "needs" in message and "1.05 MB are free" in message, message
    assert not list((small_disk / "out").glob("*.safetensors*"))


# Full copies


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("explicit", [True, False])
def test_full_copy_loads_with_the_same_parameters(tmp_path: Path, model_type: str, explicit: bool) -> None:
    folder = original(tmp_path / "m", model_type)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("not part of it")
    out = pack_model(folder, tmp_path / "out" if explicit else None).folder
    lazy = open_model(out if explicit else folder)
    assert lazy.checkpoint.folder == out
    expected = reference(folder)
    parameters = dict(tree_flatten(lazy.model.parameters()))
    assert parameters.keys() == expected.keys() == lazy.origins.keys()
    assert all(raw(parameters[path]) == raw(expected[path]) for path in expected)
    assert_holds(lazy.origins, expected)
    assert missing_bytes(lazy, find_layers(lazy.model)) == 0
    assert {p.name for p in out.iterdir() if p.suffix != ".safetensors"} - {USERS} == {
        ".lock", "manifest.json", "config.json", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip


def test_full_copy_carries_the_quantization_that_loading_worked_out(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m", quantize={"bits": 4, "group_size": 64})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    shutil.rmtree(folder)
    zoo.save_checkpoint("llama", folder, quantize={"bits": 4, "group_size": 32, "mode": "mxfp4"})
    (folder / "config.json").write_text(json.dumps(config))
    out = pack_model(folder, tmp_path / "out").folder
    lazy = open_model(out)
    written = json.loads((out / "config.json").read_text())
    assert written["quantization"] == lazy.config["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert_holds(lazy.origins, reference(folder))


def test_full_copy_needs_memory_for_about_one_tensor(tmp_path: Path) -> None:
    folder = original(tmp_path / "m", "qwen3_5_moe", **LARGE)
    total = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pack_model(folder, tmp_path / "out")
    assert total > 15e6
    assert mx.get_peak_memory() - before < 2 * total / LARGE["num_hidden_layers"]


def packed(tmp_path: Path) -> tuple[Path, PackedStore]:
    folder = original(tmp_path / "m")
    return folder, pack_model(folder, None)


def test_full_copy_is_written_once_unless_forced(tmp_path: Path) -> None:
    folder, whole = packed(tmp_path)
    before = state(whole.folder)
    pack_model(folder, None, progress=lambda *_: pytest.fail("something was done"))
    assert state(whole.folder) == before
    flip(whole.files[0], -5000)
    assert "changed since it was packed" in refusal(StoreError, pack_model, folder, None)
    with pytest.raises(Cut):
        pack_model(folder, None, force=True, progress=cut_at("layers.1"))
    assert not is_packed(whole.folder)
    again = pack_model(folder, None, force=True)
    after = state(whole.folder)
    assert all(after[file.name] != before[file.name] for file in again.files)
    assert_holds(again.tensors, reference(folder))


def test_damaged_copy_in_the_cache_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole = packed(tmp_path)
    flip(whole.files[1], -5000)
    with caplog.at_level(logging.WARNING, "outcore"):
        assert open_model(folder).checkpoint.folder == folder
    assert "layer_0001.safetensors" in caplog.text
    assert "layer_0001.safetensors" in refusal(StoreError, open_model, whole.folder)


def test_copied_folder_is_checked_by_its_checksums(tmp_path: Path) -> None:
    folder, whole = packed(tmp_path)
    moved = shutil.copytree(whole.folder, tmp_path / "moved", copy_function=shutil.copyfile)
    assert_holds(open_packed(moved).tensors, reference(folder))
    flip(moved / "layer_0002.safetensors", -5000)
    assert "layer_0002.safetensors" in refusal(StoreError, open_packed, moved)


def test_copy_of_another_version_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = original(tmp_path / "m")
    pack_model(folder, tmp_path / "out")
    flip(folder / "model-00001-of-00002.safetensors", -2)
    assert "packed from another model" in refusal(StoreError, pack_model, folder, tmp_path / "out")
    assert_holds(pack_model(folder, tmp_path / "out", force=True).tensors, reference(folder))


def test_folder_with_other_files_is_left_alone(tmp_path: Path, force: bool = True) -> None:
    folder = original(tmp_path / "m")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    (out / "layer_0000.safetensors").write_text("mine too")
    before = state(out)
    assert "holds other files" in refusal(StoreError, pack_model, folder, out, force=force)
    assert state(out) == before
    before = state(folder)
    assert "holds other files" in refusal(StoreError, pack_model, folder, folder, force=force)
    assert state(folder) == before


def test_copy_that_lacks_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    _, whole = packed(tmp_path)
    config = json.loads((whole.folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    (whole.folder / "config.json").write_text(json.dumps(config))
    assert "layers.4." in refusal(StoreError, open_model, whole.folder)


def test_overlay_is_no_model(tmp_path: Path) -> None:
    lazy = open_model(original(tmp_path / "m"))
    pack_overlay(lazy, find_layers(lazy.model))
    assert "holds only some tensors of" in refusal(StoreError, open_model, overlay_of(lazy))
    assert "packed copy already" in refusal(StoreError, pack_model, overlay_of(lazy), tmp_path / "out")


def test_model_that_mlx_lm_would_change_when_it_loads_it_again_is_not_packed(tmp_path: Path) -> None:
    # Its sanitize divides the head by its norm each time; the last bits differ.
    folder = zoo.save_checkpoint("baichuan_m1", tmp_path / "m")
    assert "'lm_head.weight'" in refusal(StoreError, pack_model, folder, tmp_path / "out")
    assert not is_packed(tmp_path / "out") and not list((tmp_path / "out").glob("*.safetensors"))
    refusal(StoreError, pack_model, folder, tmp_path / "out")  # the folder is still known as ours


def test_model_with_code_of_its_own_is_not_packed(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own.py"}))
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs")
    message = refusal(StoreError, pack_model, folder, tmp_path / "out", trust_remote_code=True)
    assert "model_file" in message and not (tmp_path / "out").exists()


# Manifests that lie


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PackedStore:
    folder = tmp_path_factory.mktemp("whole")
    return pack_model(original(folder / "m"), folder / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["files"].update({"../../etc/passwd": m["files"]["layer_0000.safetensors"]}), "do not use"),
        (lambda m: m["files"].update({"model.safetensors": m["files"]["layer_0000.safetensors"]}), "do not use"),
        (lambda m: m["files"].update({"layer_0009.safetensors": m["files"]["layer_0000.safetensors"]}), "cannot be"),
        (lambda m: m["files"]["layer_0000.safetensors"].update(bytes=True), "garbled"),
        (lambda m: m["files"]["layer_0000.safetensors"].update(bytes=5), "changed since"),
        (lambda m: m.update(files=[]), "garbled"),
        (lambda m: m.update(kind="other"), "garbled"),
        (lambda m: m.update(schema=4), "schema"),
        (lambda m: m.update(format="zip"), "not the manifest"),
    ],
)
def test_garbled_manifest_is_refused(whole: PackedStore, change: Any, says: str) -> None:
    path = whole.folder / "manifest.json"
    written = path.read_text()
    manifest = json.loads(written)
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert says in refusal(StoreError, open_packed, whole.folder)
    path.write_text(written)
    open_packed(whole.folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff", "[]"])
def test_manifest_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    refusal(StoreError, open_packed, tmp_path)
    assert not is_packed(tmp_path)


def test_manifest_tells_the_source(tmp_path: Path) -> None:
    folder, whole = packed(tmp_path)
    manifest = json.loads((whole.folder / "manifest.json").read_text())
    assert manifest["source"]["folder"] == folder.name and len(manifest["source"]["identity"]) == 32
