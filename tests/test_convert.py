"""``outcore convert``: each file is the one that ``mlx_lm.convert`` writes, whatever cut it off before."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

import outcore
import zoo
from outcore.cli.main import main
from outcore.disk import disk_calls
from outcore.errors import BudgetError, CheckpointError, StoreError, StoreSpaceError, UsageError
from outcore_convert import convert as ours
from outcore_convert.recipe import Settings
from test_pack import original

TENSORS = 9
"""Of a file, where models have several: layers' matrices and their scales are then in different ones."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are converted a few rows at a time, and what is done is counted after each job."""
    monkeypatch.setattr(ours, "LEAST_PART", 1000)
    monkeypatch.setattr(ours, "MOST_PART", 3000)
    monkeypatch.setattr(ours, "SYNC_S", 0.0)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(weights: dict[str, Any]) -> list[dict[str, Any]]:
        names = list(weights)
        return [{name: weights[name] for name in names[i : i + TENSORS]} for i in range(0, len(names), TENSORS)]

    monkeypatch.setattr(mlx_lm.utils, "make_shards", shards)


def model(folder: Path, demo_model: Path, model_type: str = "llama", published: bool = False) -> Path:
    """A small model in bf16. ``published``: as its authors have it, with what ``sanitize`` changes."""
    if published and model_type == "qwen3_moe":
        zoo.save_checkpoint(model_type, folder, dtype=mx.bfloat16)
        found: Any = mx.load(str(folder / "model.safetensors"))
        for name in [name for name in found if "switch_mlp" in name]:
            for i, expert in enumerate(found.pop(name)):
                found[name.replace("switch_mlp", f"experts.{i}")] = mx.contiguous(expert)
        mx.save_safetensors(str(folder / "model.safetensors"), found)
        (folder / "model.safetensors.index.json").unlink()
    elif published and model_type == "deepseek_v3":
        zoo.save_checkpoint(model_type, folder, dtype=mx.bfloat16)
        in_fp8(folder / "model.safetensors")
    elif published:
        original(folder, model_type)
    else:
        zoo.save_checkpoint(model_type, folder, dtype=mx.bfloat16, shard_bytes=100_000)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


def in_fp8(file: Path) -> None:
    """Stores matrices in eight bits and a scale for each block, under the name of their type, as DeepSeek does."""
    found: Any = mx.load(str(file))
    for name in [name for name in found if name.endswith("_proj.weight") and found[name].ndim == 2]:
        blocks = tuple(-(-n // 128) for n in found[name].shape)
        found[name] = mx.to_fp8(found[name] * 4)
        found[f"{name}_scale_inv"] = mx.random.uniform(0.1, 0.5, blocks, key=mx.random.key(len(found)))
    mx.save_safetensors(str(file), found)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = data[8:end].replace(b'"U8"', b'"F8_E4M3"')
    file.write_bytes(len(head).to_bytes(8, "little") + head + data[end:])


def theirs(folder: Path, output: Path, **how: Any) -> dict[str, bytes]:
    importlib.import_module("mlx_lm.convert").convert(str(folder), str(output), **how)
    return content(output)


def convert(folder: Path, output: Path, budget: int = 10**10, **how: Any) -> ours.Converted:
    return ours.convert(folder, output, Settings(**how), budget, progress=lambda what, done, total: None)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def differing(folder: Path, expected: dict[str, bytes]) -> list[str]:
    found = content(folder)
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


WAYS: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", False, {"quantize": True, "q_mode": "mxfp4"}),
    ("llama", False, {"quantize": True, "q_mode": "nvfp4"}),
    ("llama", False, {"quantize": True, "q_mode": "mxfp8", "dtype": "float32"}),
    ("llama", False, {"quantize": True, "quant_predicate": "mixed_3_4", "dtype": "float16"}),
    ("gemma3_text", False, {"quantize": True, "quant_predicate": "mixed_2_6"}),  # its head is its embeddings
    ("qwen3_5", True, {"dtype": "float16"}),
    ("qwen3_moe", True, {"quantize": True, "q_bits": 3, "q_group_size": 32}),
    ("qwen3_5_moe", True, {"quantize": True, "q_bits": 8}),
    ("deepseek_v3", True, {"quantize": True}),
]


@pytest.mark.parametrize(("model_type", "published", "how"), WAYS, ids=[f"{w[0]}-{i}" for i, w in enumerate(WAYS)])
def test_every_file_is_mlx_lms(
    model_type: str, published: bool, how: dict[str, Any], tmp_path: Path, demo_model: Path
) -> None:
    folder = model(tmp_path / "m", demo_model, model_type, published)
    expected = theirs(folder, tmp_path / "theirs", **how)
    convert(folder, tmp_path / "ours", **how)
    assert differing(tmp_path / "ours", expected) == []
    assert {path.name for path in tmp_path.iterdir() if "ours" in path.name} == {"ours"}


@pytest.mark.usefixtures("several")
def test_a_quantized_model_in_several_files_is_dequantized_and_runs(tmp_path: Path, demo_model: Path) -> None:
    folder = model(tmp_path / "m", demo_model)
    expected = theirs(folder, tmp_path / "theirs", quantize=True)
    assert main(["convert", "--hf-path", str(folder), "-q", "--mlx-path", str(tmp_path / "ours")]) == 0
    assert differing(tmp_path / "ours", expected) == []
    assert len([name for name in expected if name.endswith("safetensors")]) > 3
    outcore_model, _ = outcore.load(str(tmp_path / "ours"), memory="1GB", draft="none")
    mlx_model, _ = mlx_lm.utils.load(str(tmp_path / "theirs"))
    tokens = mx.array([[3, 1, 4, 1, 5]])
    assert mx.array_equal(outcore_model(tokens), mlx_model(tokens))
    outcore_model.outcore.close()
    back = theirs(tmp_path / "theirs", tmp_path / "theirs back", dequantize=True)
    convert(tmp_path / "ours", tmp_path / "back", dequantize=True)
    assert differing(tmp_path / "back", back) == []


class Killed(BaseException):
    pass


class Killing(disk_calls.DiskCalls):
    """Ends the process, as it were, at one of the writes, of which half is done then."""

    def __init__(self, at: int) -> None:
        self.at, self.writes, self.written = at, 0, 0

    def write(self, fd: int, data: memoryview) -> int:
        self.writes += 1
        if self.writes == self.at:
            super().write(fd, data[: len(data) // 2])
            raise Killed
        self.written += len(data)
        return super().write(fd, data)


@pytest.mark.usefixtures("several")
def test_a_conversion_that_was_killed_goes_on_and_makes_no_file_again(tmp_path: Path, demo_model: Path) -> None:
    folder, work = model(tmp_path / "m", demo_model), tmp_path / "ours.partial"
    with disk_calls.using(calls := Killing(10**9)):
        convert(folder, tmp_path / "expected", quantize=True)
    whole, moment, expected = calls.written, calls.writes * 3 // 10, content(tmp_path / "expected")
    finished: dict[str, int] = {}
    written = 0
    for _ in range(3):
        with disk_calls.using(calls := Killing(moment)), pytest.raises(Killed):
            convert(folder, tmp_path / "ours", quantize=True)
        written += calls.written
        assert not (tmp_path / "ours").exists() and (work / ours.STATE).exists()
        now = {path.name: path.stat().st_ino for path in work.glob("*.safetensors")}
        assert now.items() >= finished.items() and len(now) > len(finished)
        finished = now
    with pytest.raises(StoreError, match="begun for another model, with other flags"):
        convert(folder, tmp_path / "ours", quantize=True, q_bits=8)
    with disk_calls.using(calls := Killing(10**9)):
        made = convert(folder, tmp_path / "ours", quantize=True)
    assert differing(tmp_path / "ours", expected) == []
    assert made.kept_bytes > 0 and whole <= written + calls.written < 1.3 * whole
    assert (tmp_path / "ours" / next(iter(finished))).stat().st_ino in finished.values()
    # The last moment: the output has its name, and the state is still there.
    (tmp_path / "ours" / ours.STATE).write_text(json.dumps({"key": key_of(folder, tmp_path), "jobs": 1}))
    convert(folder, tmp_path / "ours", quantize=True)
    assert differing(tmp_path / "ours", expected) == []


def key_of(folder: Path, tmp_path: Path) -> str:
    checkpoint = ours.open_checkpoint(folder)
    with ours._begun(checkpoint, tmp_path / "key", Settings(quantize=True)) as work:
        return str(json.loads((work / ours.STATE).read_text())["key"])


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = model(tmp_path / "m", demo_model), tmp_path / "ours"
    before = content(tmp_path)

    def refused(error: type[Exception], text: str, run: Callable[[], object]) -> None:
        with pytest.raises(error, match=text):
            run()
        assert content(tmp_path) == before and not output.with_name("ours.partial").exists()

    refused(BudgetError, "too little for this model: model.* give --memory", lambda: convert(folder, output, 10**6))
    refused(UsageError, "cannot convert it so", lambda: convert(folder, output, quantize=True, q_bits=7))
    refused(StoreError, "is there already", lambda: convert(folder, tmp_path / "m"))
    with monkeypatch.context() as patched:
        patched.setattr(ours.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1000))
        refused(StoreSpaceError, "needs .* more, but only 1.00 KB are free", lambda: convert(folder, output))
    with ours._begun(ours.open_checkpoint(folder), output, Settings()) as work:
        at_work = content(tmp_path)
        with pytest.raises(StoreError, match="another process converts into it"):
            convert(folder, output)
        assert content(tmp_path) == at_work and (work / ours.STATE).exists()
        work.rename(output)  # it has its name, and that is not known to be on the disk
        with pytest.raises(StoreError, match="another process converts into it"):
            convert(folder, output)
        assert (output / ours.STATE).exists()
        shutil.rmtree(output)
    (folder / "tokenizer.json").write_text("{}")
    before = content(tmp_path)
    refused(CheckpointError, "tokenizer cannot be loaded", lambda: convert(folder, output))
    assert main(["convert", str(folder), "-q", "-d"]) == 2
    assert main(["convert", str(demo_model / "drafter"), "--mlx-path", str(output)]) == 2
    assert "drafter: a drafter, not a model; --draft-bits quantizes it as it loads" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_last_file_is_no_bug(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "m", demo_model)
    (folder / "odd.py").mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers, which is written in Rust, does

    with monkeypatch.context() as patched:
        patched.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
        with pytest.raises(StoreSpaceError, match=r"the disk is full .* what is finished is kept"):
            convert(folder, tmp_path / "ours")
    made = convert(folder, tmp_path / "ours")
    assert made.kept_bytes == made.bytes and (tmp_path / "ours" / "tokenizer.json").exists()
