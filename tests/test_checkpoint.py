from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import zoo
from outcore.checkpoint import find_model
from outcore.checkpoint.checkpoint import ITEM_BYTES, open_checkpoint, read_header
from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.identity import identity_of
from outcore.decode import loader
from outcore.errors import CheckpointError, HeaderError, MissingFileError, OutcoreError, UsageError


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def save(path: Path, *names: str) -> Path:
    write(path, {name: entry(4 * i, 4 * i + 4) for i, name in enumerate(names)}, bytes(4 * len(names)))
    return path


def model(folder: Path, files: dict[str, tuple[str, ...]], index: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in files.items():
        save(folder / name, *tensors)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def refusal(error: type[OutcoreError], function: Any, *arguments: Any) -> str:
    """The message of exactly this class of error, which must be one line."""
    with pytest.raises(error) as caught:
        function(*arguments)
    message = str(caught.value)
    assert caught.type is error
    assert message.isprintable() and len(message) < 600, message
    return message


# Valid files


ARRAYS = {
    "a.weight": mx.random.normal((7, 5)).astype(mx.bfloat16),
    "b.scales": mx.random.normal((3, 2, 4)).astype(mx.float16),
    "b.weight": mx.random.randint(0, 2**31 - 1, (4, 8)).astype(mx.uint32),
    "c": mx.array(3.5),
    "e\u00e9 \n": mx.arange(5, dtype=mx.int64),
    "flag": mx.array([True, False, True]),
}


@pytest.mark.parametrize("metadata", [None, {"format": "mlx"}], ids=["null", "map"])
def test_offsets_of_a_file_by_mlx_point_at_the_arrays_bytes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), ARRAYS, metadata=metadata)
    raw = path.read_bytes()
    tensors = read_header(path)
    assert tensors.keys() == ARRAYS.keys()
    assert [t.dtype for t in map(tensors.__getitem__, ARRAYS)] == ["BF16", "F16", "U32", "F32", "I64", "BOOL"]
    for name, array in ARRAYS.items():
        tensor = tensors[name]
        assert (tensor.name, tensor.file, tensor.shape, tensor.nbytes) == (name, path, array.shape, array.nbytes)
        assert raw[tensor.offset :][: tensor.nbytes] == bytes(array.reshape(-1).view(mx.uint8))


def test_offsets_of_a_file_by_safetensors_point_at_the_arrays_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    generator = np.random.default_rng(0)
    dtypes = ["u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8"]
    arrays = {f"t.{t}": generator.integers(0, 100, (i + 1, 3)).astype(t) for i, t in enumerate(dtypes)}
    arrays["empty"] = np.zeros((0, 4), np.float32)
    arrays["scalar"] = np.array(2.0, np.float32)
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    raw = path.read_bytes()
    tensors = read_header(path)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert raw[tensors[name].offset :][: tensors[name].nbytes] == array.tobytes()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_taken_is_one_that_mlx_loads(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "m.safetensors", {"t": entry(0, 3 * ITEM_BYTES[dtype], [3], dtype)}, bytes(24))
    path.write_bytes(path.read_bytes()[: -24 + 3 * ITEM_BYTES[dtype] or None])
    assert read_header(path)["t"].nbytes == mx.load(str(path))["t"].nbytes


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2", "F4", "F6_E2M3", "F6_E3M2", "bf16", ""])
def test_a_dtype_that_mlx_cannot_load_is_refused(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "m.safetensors", {"t": entry(0, 8, [1], dtype)}, bytes(8))
    assert f"tensor 't': dtype '{dtype}' cannot be loaded by MLX" in refusal(HeaderError, read_header, path)
    with pytest.raises(RuntimeError):
        mx.eval(mx.load(str(path)))


def test_padded_and_empty_headers_are_fine(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "a", b"{}")) == {}
    padded = json.dumps({"__metadata__": {}, "t": entry(0, 2)}).encode() + b"   \n"
    assert read_header(write(tmp_path / "b", padded, bytes(2)))["t"].offset == 8 + len(padded)


# Hostile and damaged files

T = entry(0, 4)
TWINS = b'{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"t":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
HOSTILE = {
    "not an object": (b"[1, 2]", "byte 8"),
    "leading space": (b" {}", "byte 8"),
    "empty header": (b"", "byte 8"),
    "cut JSON": (b'{"t": {"dtype"', "not JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', "not JSON"),
    "two documents": (b"{} {}", "not JSON"),
    "deep nesting": (b'{"t":' + b"[" * 200_000, "not JSON"),
    "endless integer": (b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,' + b"9" * 10_000 + b"]}}", "not JSON"),
    "a name twice": (TWINS, "'t' twice"),
    "a key twice": (b'{"t":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "'dtype' twice"),
    "metadata list": ({"__metadata__": [], "t": T}, "__metadata__"),
    "metadata number": ({"__metadata__": {"a": 1}, "t": T}, "__metadata__"),
    "metadata string": ({"__metadata__": "format", "t": T}, "__metadata__"),
    "entry is a list": ({"t": [0, 4]}, "needs an object"),
    "no dtype": ({"t": {"shape": [4], "data_offsets": [0, 4]}}, "needs an object"),
    "no shape": ({"t": {"dtype": "U8", "data_offsets": [0, 4]}}, "needs an object"),
    "no offsets": ({"t": {"dtype": "U8", "shape": [4]}}, "needs an object"),
    "dtype number": ({"t": T | {"dtype": 3}}, "dtype '3'"),
    "dtype list": ({"t": T | {"dtype": ["U8"]}}, "cannot be loaded by MLX"),
    "shape number": ({"t": T | {"shape": 4}}, "shape must be"),
    "shape negative": ({"t": T | {"shape": [-2, -2]}}, "shape must be"),
    "shape float": ({"t": T | {"shape": [4.0]}}, "shape must be"),
    "shape boolean": ({"t": T | {"shape": [4, True]}}, "shape must be"),
    "shape beyond int32": ({"t": entry(0, 0, [0, 2**31])}, "shape must be"),
    "shape overflows 64 bits": ({"t": T | {"shape": [2**30, 2**30, 2**4 + 1]}}, "does not fill"),
    "shape overflows to size": ({"t": entry(0, 4, [2**16, 2**16, 2**16, 2**16])}, "does not fill"),
    "endless shape": ({"t": entry(0, 4, [2**30] * 200_000)}, "does not fill"),
    "shape too small": ({"t": T | {"shape": [3]}}, "does not fill its 4 bytes"),
    "shape empty": ({"t": T | {"shape": []}}, "does not fill"),
    "item size": ({"t": T | {"dtype": "F32"}}, "of F32 does not fill its 4 bytes"),
    "offsets swapped": ({"t": T | {"data_offsets": [4, 0]}}, "not a range"),
    "offsets negative": ({"t": T | {"data_offsets": [-4, 0]}}, "data_offsets must be"),
    "offsets float": ({"t": T | {"data_offsets": [0, 4.0]}}, "data_offsets must be"),
    "offsets boolean": ({"t": T | {"data_offsets": [False, 4]}}, "data_offsets must be"),
    "one offset": ({"t": T | {"data_offsets": [4]}}, "data_offsets must be"),
    "three offsets": ({"t": T | {"data_offsets": [0, 4, 8]}}, "data_offsets must be"),
    "offsets beyond 64 bits": ({"t": T | {"data_offsets": [2**64, 2**64 + 4]}}, "not a range"),
    "overlap": ({"a": entry(0, 3), "t": entry(2, 4)}, "'t' at byte"),
    "same bytes": ({"a": T, "t": T}, "overlaps"),
    "empty inside another": ({"a": T, "t": entry(2, 2, [0])}, "overlaps"),
    "hole": ({"a": entry(0, 2), "t": entry(3, 4)}, "hole from byte"),
    "hole at the start": ({"t": entry(1, 4)}, "hole from byte"),
    "file too long": ({"t": entry(0, 3)}, "cannot be trusted"),
    "file too short": ({"t": entry(0, 5)}, "looks half-downloaded"),
    "far past the end": ({"t": entry(0, 2**40, [2**20, 2**20])}, "half-downloaded"),
    "hostile name": ({"\x1b[2J\n\ud800" * 100: 3}, "needs an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_file_and_reason(tmp_path: Path, case: str) -> None:
    header, reason = HOSTILE[case]
    path = write(tmp_path / "model.safetensors", header, bytes(4))
    message = refusal(HeaderError, read_header, path)
    assert message.startswith(f"{path}: ") and reason in message


def test_whatever_a_mutated_header_says_it_is_refused_or_read_as_the_reference_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"a": mx.arange(6).reshape(2, 3), "b": mx.zeros((4,), mx.uint8)})
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    tokens = [*(bytes([c]) for c in b'09-"{}[],:\\ \x00\xff'), b"e5", b".5", b""]
    read = 0
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(generator.integers(1, 4)):
            at = int(generator.integers(0, len(raw)))
            raw[at : at + 1] = tokens[generator.integers(len(tokens))]
        path.write_bytes(raw)
        try:
            tensors = read_header(path)
        except HeaderError:
            continue
        read += 1
        reference = dict(safetensors.deserialize(bytes(raw)))
        assert tensors.keys() == reference.keys()
        for name, tensor in tensors.items():
            assert list(tensor.shape) == reference[name]["shape"]
            assert raw[tensor.offset :][: tensor.nbytes] == reference[name]["data"]
    assert read > 50


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1, 2**64 - 8])
def test_a_header_that_claims_too_much_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "m.safetensors", b"{}", length=length)
    with path.open("r+b") as file:
        file.truncate(200_000_000)  # sparse: the claim of 100 MB would fit
    assert f"claims a header of {length} bytes" in refusal(HeaderError, read_header, path)


def test_a_header_that_ends_past_the_file_looks_half_downloaded(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", b"{}", length=100_000_000)
    assert "half-downloaded: 10 bytes, the header alone needs 100000008" in refusal(HeaderError, read_header, path)
    path.write_bytes(path.read_bytes()[:7])
    assert "7 bytes, too short" in refusal(HeaderError, read_header, path)
    path.write_bytes(b"")
    assert "0 bytes, too short" in refusal(HeaderError, read_header, path)


def test_a_download_that_was_cut_off_tells_expected_and_actual_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"w": mx.zeros((1000, 1000))})
    whole = path.stat().st_size
    for size in (whole - 1, whole - 3_000_000):
        os.truncate(path, size)
        assert f"{size} bytes where the header says {whole}" in refusal(HeaderError, read_header, path)


def test_what_only_bears_the_name_of_a_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert "git lfs pull" in refusal(HeaderError, read_header, path)
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(100))
    assert "GGUF" in refusal(HeaderError, read_header, path)
    path.unlink()
    path.mkdir()
    assert "not a regular file" in refusal(HeaderError, read_header, path)
    path.rmdir()
    os.mkfifo(path)  # opening it would wait for ever
    assert "not a regular file" in refusal(HeaderError, read_header, path)


def test_a_missing_file_and_a_dangling_link_have_different_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert "missing; download" in refusal(MissingFileError, read_header, path)
    path.symlink_to(tmp_path / "blobs" / "abc")
    assert "links to" in refusal(MissingFileError, read_header, path)
    path.unlink()
    path.symlink_to(path)
    assert "cannot be read" in refusal(CheckpointError, read_header, path)


# Folders


def test_a_whole_folder_opens_with_all_shards(tmp_path: Path) -> None:
    files = {"model-00001-of-00002.safetensors": ("a", "b"), "model-00002-of-00002.safetensors": ("c",)}
    folder = model(tmp_path / "m", files, {"a": "model-00001-of-00002.safetensors"})
    save(folder / "consolidated.safetensors", "a")  # mlx-lm does not load it
    found = open_checkpoint(folder)
    assert [file.name for file in found.files] == sorted(files)
    assert {name: tensor.file.name for name, tensor in found.tensors.items()} == {
        name: file for file, names in files.items() for name in names
    }
    assert (found.folder, found.nbytes) == (folder, 12)


def test_the_files_are_those_that_mlx_lm_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("model", "model_extra", "model-old", "Model2", "consolidated", "my-model")
    folder = model(tmp_path / "m", {f"{name}.safetensors": (name,) for name in names})
    (folder / "config.json").write_text('{"model_type": "no such type"}')  # load_model stops there, files chosen
    loaded: list[str] = []
    monkeypatch.setattr(mlx_lm.utils.mx, "load", lambda path: loaded.append(Path(path).name) or {})
    with pytest.raises(ValueError, match="no such type"):
        mlx_lm.utils.load_model(folder)
    assert [file.name for file in open_checkpoint(folder).files] == sorted(loaded) != []


def test_the_hub_cache_layout_of_links_opens(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    model(blobs, {"model.safetensors": ("a",)})
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert open_checkpoint(snapshot).tensors["a"].file == snapshot / "model.safetensors"
    (blobs / "model.safetensors").unlink()
    assert "links to" in refusal(MissingFileError, open_checkpoint, snapshot)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in refusal(MissingFileError, open_checkpoint, tmp_path / "nope")
    path = save(tmp_path / "model.safetensors", "a")
    assert f"give its folder instead: {tmp_path}" in refusal(CheckpointError, open_checkpoint, path)
    assert "no config.json here" in refusal(MissingFileError, open_checkpoint, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 200_000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused_by_file(tmp_path: Path, name: str, text: str) -> None:
    folder = model(tmp_path / "m", {"model.safetensors": ("a",)})
    (folder / name).write_bytes(text.encode("latin-1"))
    assert refusal(CheckpointError, open_checkpoint, folder).startswith(f"{folder / name}: ")


def test_no_weights_tells_what_lies_there(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {})
    assert "no model*.safetensors here; download" in refusal(MissingFileError, open_checkpoint, folder)
    (folder / "pytorch_model.bin").touch()
    (folder / "llama-Q4.gguf").touch()
    assert "but llama-Q4.gguf, pytorch_model.bin; get" in refusal(MissingFileError, open_checkpoint, folder)


OUTSIDE = ["../model.safetensors", "/etc/passwd", "..", "", "a\\b", "C:x", "a\0b", "x" * 300]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leads_elsewhere_is_refused_by_name(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model.safetensors", "a")  # what the first name would reach
    folder = model(tmp_path / "m", {"model.safetensors": ("a",)}, {"a": name})
    assert "lead out of the folder" in refusal(CheckpointError, open_checkpoint, folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: Any) -> None:
    folder = model(tmp_path / "m", {"model.safetensors": ("a",)})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no weight_map" in refusal(CheckpointError, open_checkpoint, folder)


def test_all_missing_shards_of_an_index_are_named(tmp_path: Path) -> None:
    names = [f"model-{n:05}-of-00009.safetensors" for n in range(1, 10)]
    index = {f"t{n}": name for n, name in enumerate(names)}
    folder = model(tmp_path / "m", {names[0]: ("t0",), names[2]: ("t2",)}, index)
    (folder / names[8]).symlink_to("nowhere")
    message = refusal(MissingFileError, open_checkpoint, folder)
    assert "half-downloaded: 7 files missing" in message
    assert f"{names[1]}, {names[3]}" in message and "and 2 more" in message


def test_an_index_must_agree_with_the_files(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"model.safetensors": ("a",)}, {"a": "model.safetensors", "b": "model.safetensors"})
    assert "has no tensor 'b'" in refusal(MissingFileError, open_checkpoint, folder)
    index = {"a": "model-2.safetensors", "b": "model-2.safetensors"}
    model(folder, {"model-2.safetensors": ("b",)}, index)
    assert "model-2.safetensors: has no tensor 'a'" in refusal(MissingFileError, open_checkpoint, folder)
    model(folder, {"weights.safetensors": ("c",)}, {"c": "weights.safetensors"})
    assert "mlx-lm only loads model*.safetensors" in refusal(CheckpointError, open_checkpoint, folder)


def test_numbered_shards_without_an_index_must_be_whole(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"model-00002-of-00003.safetensors": ("b",)})
    message = refusal(MissingFileError, open_checkpoint, folder)
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in message
    model(folder, {"model-00001-of-00003.safetensors": ("a",), "model-00003-of-00003.safetensors": ("c",)})
    assert len(open_checkpoint(folder).files) == 3


def test_one_tensor_in_two_files_is_refused_naming_both(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"model-a.safetensors": ("w", "x"), "model-b.safetensors": ("w", "y")})
    message = refusal(CheckpointError, open_checkpoint, folder)
    assert "model-b.safetensors: tensor 'w' is also in model-a.safetensors" in message


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"model-a.safetensors": ("a",), "model-b.safetensors": ("b",)})
    os.truncate(folder / "model-b.safetensors", 40)
    assert refusal(HeaderError, open_checkpoint, folder).startswith(f"{folder / 'model-b.safetensors'}: ")


def test_identity_changes_with_what_the_weights_depend_on_and_with_nothing_else(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"model-a.safetensors": ("a", "b"), "model-b.safetensors": ("c",)})
    first = identity_of(open_checkpoint(folder))
    assert len(first) == 32 and first == identity_of(open_checkpoint(folder))
    (folder / "README.md").write_text("new")
    moved = folder.rename(tmp_path / "moved")
    assert identity_of(open_checkpoint(moved)) == first
    seen = {first}
    shard = moved / "model-b.safetensors"
    times = (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
    os.utime(shard, ns=(times[0], times[1] + 1))
    seen.add(identity_of(open_checkpoint(moved)))
    save(shard, "d")  # as long as before
    os.utime(shard, ns=times)
    seen.add(identity_of(open_checkpoint(moved)))
    shard.rename(moved / "model-c.safetensors")
    seen.add(identity_of(open_checkpoint(moved)))
    (moved / "config.json").write_text('{"model_type": "qwen3"}')
    seen.add(identity_of(open_checkpoint(moved)))
    assert len(seen) == 5


# Names


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_model, "download", lambda *_: pytest.fail("asked the Hub"))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "owner", tmp_path / "owner" / "name"):
        (folder / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner") == tmp_path / "owner"
    assert resolve_model(tmp_path) == tmp_path  # a path of any kind, as mlx-lm's
    with pytest.raises(UsageError, match="a folder's path or a name, not NoneType"):
        resolve_model(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3.2:3b", "Hub names are OWNER/NAME"),
        ("https://huggingface.co/mlx-community/Qwen3.5-9B-MLX-6bit", "name: mlx-community/Qwen3.5-9B-MLX-6bit"),
        ("http://hf.co/a/b/tree/main", "name: a/b"),
        ("huggingface.co/a/b", "name: a/b"),
        ("https://example.org/a", "name a Hub model"),
        ("bartowski/Llama-3.2-3B-Instruct-GGUF", "MLX version"),
        ("Llama-3.2-3B.Q4_K_M.gguf", "MLX version"),
    ],
)
def test_names_that_other_programs_know_get_a_hint_and_never_ask_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setattr("mlx_lm.utils._download", lambda *_, **__: pytest.fail("the Hub was asked"))
    assert hint in refusal(MissingFileError, resolve_model, name)


@pytest.mark.parametrize(
    "name", ["/no/such", "./no", "../no", "~/no", "~nobody-here/x", "a/b/c", "no.bin", "dangling", "/" + "x" * 5000]
)
def test_a_local_path_that_is_not_there_never_asks_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(find_model, "download", lambda *_: pytest.fail("asked the Hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "check" in refusal(MissingFileError, resolve_model, name)


def test_a_file_is_no_model_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert "MLX version" in refusal(CheckpointError, resolve_model, str(path))
    (tmp_path / "weights.bin").touch()
    assert "give a folder with config.json" in refusal(CheckpointError, resolve_model, str(tmp_path / "weights.bin"))
    for empty in ("", "  "):
        assert "no model given" in refusal(UsageError, resolve_model, empty)


def hub_error(name: str) -> Exception:
    kind = getattr(huggingface_hub.errors, name)
    error: Exception = kind.__new__(kind)
    error.args = (f"{name}:\nsomething over\n\nmany lines",)
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (hub_error("RepositoryNotFoundError"), "check the name"),
        (hub_error("GatedRepoError"), "https://huggingface.co/owner/name"),
        (hub_error("RevisionNotFoundError"), "has no revision 'v1'"),
        (hub_error("LocalEntryNotFoundError"), "could not be reached; check the network"),
        (hub_error("OfflineModeIsEnabled"), "could not be reached; unset HF_HUB_OFFLINE, or give a folder"),
        (hub_error("HFValidationError"), "check it"),
        (hub_error("HfHubHTTPError"), "could not be downloaded"),
        (hub_error("HTTPError"), "could not be downloaded"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("Data processing error: \n CAS service error"), "CAS service error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_the_hub_says_becomes_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str) -> None:
    def fail(*_: Any, **__: Any) -> Path:
        raise error

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", fail)
    message = refusal(MissingFileError, resolve_model, "owner/name", "v1")
    assert message.startswith("'owner/name': ") and advice in message


def test_a_name_without_an_owner_is_asked_for_and_if_it_is_not_there_the_network_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_lm.utils.snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_model("gpt2") == tmp_path
    for kind in ("RepositoryNotFoundError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"):

        def fail(*_: Any, kind: str = kind, **__: Any) -> Path:
            raise hub_error(kind)

        monkeypatch.setattr("mlx_lm.utils.snapshot_download", fail)
        message = refusal(MissingFileError, resolve_model, "llama3")
        assert "Hub names are OWNER/NAME" in message and "network" not in message


def test_a_download_is_what_mlx_lm_would_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert resolve_model("owner/name", "v1") == tmp_path
    assert asked == [
        (("owner/name",), {"revision": "v1", "allow_patterns": mlx_lm.utils.DEFAULT_ALLOW_PATTERNS}),
    ]


@pytest.mark.parametrize("resident", [0, None], ids=["streamed", "resident"])
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_changes_while_the_model_is_opened(
    how: str, resident: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    whole, session = file.read_bytes(), loader.Session

    def late(*args: Any, **kwargs: Any) -> Any:
        changed = whole[:-64] + bytes(64)
        if how == "written":
            file.write_bytes(changed)
        else:
            (tmp_path / "new").write_bytes(changed)
            (tmp_path / "new").replace(file)
        return session(*args, **kwargs)

    monkeypatch.setattr(loader, "Session", late)
    with pytest.raises(CheckpointError, match="was written to while the model was opened"):
        loader.load_model(folder, memory="1GB", context=32, resident=resident)
    monkeypatch.setattr(loader, "Session", session)
    model, _ = loader.load_model(folder, memory="1GB", context=32, resident=resident)
    model.outcore.close()


def test_the_error_for_another_folder_says_what_a_model_folder_holds(tmp_path: Path) -> None:
    outer = tmp_path / "models--own--m"
    inside = outer / "snapshots" / ("a" * 40)
    inside.parent.mkdir(parents=True)
    for open_it in (lambda: resolve_model(str(outer)), lambda: open_checkpoint(outer)):
        said = refusal(MissingFileError, open_it)
        assert "no config.json here; a model folder holds config.json, model*.safetensors and a tokenizer's" in said
    model(inside, {"model.safetensors": ("a",)})
    assert f"give {inside}" in refusal(MissingFileError, resolve_model, str(outer))


@pytest.mark.parametrize("how", ["written", "shorter"])
def test_a_file_that_changes_before_a_lazy_model_read_it_is_refused(how: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    model, _ = loader.load_model(folder, memory="1GB", context=32, lazy=True)
    expected, whole = zoo.build("llama")(mx.array([[1, 2]])), file.read_bytes()
    file.write_bytes(whole[:-64] + bytes(64) if how == "written" else whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="was written to while the model was opened"):
            model(mx.array([[1, 2]]))
    model.outcore.close()
    file.write_bytes(whole)
    model, _ = loader.load_model(folder, memory="1GB", context=32, lazy=True)
    assert mx.array_equal(model(mx.array([[1, 2]])), expected)
    file.write_bytes(whole[:-64] + bytes(64))
    assert mx.array_equal(model(mx.array([[1, 2]])), expected), "what was read is in memory"
    model.outcore.close()
