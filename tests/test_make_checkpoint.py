"""The synthetic checkpoints of make_checkpoint.py load in mlx-lm, compute, and are written in bounded memory."""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

BENCH = Path(__file__).parents[1] / "benchmarks"
make = importlib.import_module("make_checkpoint")
files = importlib.import_module("checkpoint_files")
random_weights = importlib.import_module("random_weights")


def build(folder: Path, shape: str, *options: str) -> Path:
    assert make.main([shape, str(folder), *options]) == 0
    return folder


def header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries and the offset at which its data starts."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder by name, as bytes of the file."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        entries, start = header(path)
        entries.pop("__metadata__")
        data = path.read_bytes()
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            found[name] = data[start + begin : start + end]
        assert start + max(e["data_offsets"][1] for e in entries.values()) == len(data)
    return found


def file_order(path: Path) -> list[str]:
    entries, _ = header(path)
    entries.pop("__metadata__")
    return sorted(entries, key=lambda name: entries[name]["data_offsets"])


@pytest.mark.parametrize("options", [("--bits", "4"), ("--mode", "mxfp8"), ("--group-size", "32")])
def test_a_config_alone_says_how_the_weights_would_be_quantized(options: tuple[str, ...], tmp_path: Path) -> None:
    alone = build(tmp_path / "alone", "llama-tiny", "--config-only", *options)
    whole = build(tmp_path / "whole", "llama-tiny", *options)
    said = [json.loads((folder / "config.json").read_text())["quantization"] for folder in (alone, whole)]
    assert said[0] == said[1]


FORMATS = [
    ("llama-tiny", ()),
    ("llama-tiny", ("--dtype", "float32", "--tie")),
    ("llama-tiny", ("--bits", "4")),
    ("llama-tiny", ("--bits", "3", "--group-size", "32", "--dtype", "float16")),
    ("llama-tiny", ("--mode", "mxfp4")),
    ("llama-tiny", ("--mode", "nvfp4")),
    ("llama-tiny", ("--mode", "mxfp8")),
    ("qwen3.5-tiny", ("--bits", "8")),
    ("qwen3.5-moe-tiny", ("--bits", "4")),
    ("qwen3.5-moe-tiny", ("--mode", "mxfp4", "--layers", "5")),
]


@pytest.mark.parametrize(("shape", "options"), FORMATS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_checkpoint_loads_strictly_and_generates(tmp_path: Path, shape: str, options: tuple[str, ...]) -> None:
    folder = build(tmp_path / "m", shape, *options)
    model, tokenizer = mlx_lm.load(str(folder))  # strict: a missing or a surplus tensor raises
    model.set_dtype(mx.float32)
    prompt = mx.array(tokenizer.encode("a b"))
    logits = model(prompt[None])[0]
    assert mx.isfinite(logits).all()
    assert mx.std(logits, axis=-1).min() > 0.05  # differs from token to token of the vocabulary
    assert mx.abs(logits[0] - logits[-1]).max() > 0.05  # and with the input
    tokens = [int(t) for t, _ in generate_step(prompt, model, max_tokens=3)]
    assert len(tokens) == 3


@pytest.mark.parametrize("options", [o for _, o in FORMATS if o[:1] in (("--bits",), ("--mode",))], ids="-".join)
def test_quantized_weights_have_the_deviation_of_plain_ones(tmp_path: Path, options: tuple[str, ...]) -> None:
    model, _ = mlx_lm.load(str(build(tmp_path / "m", "llama-tiny", *options)))
    layer = model.layers[0].mlp.gate_proj
    weight = mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
    ).astype(mx.float32)
    assert abs(float(weight.mean())) < 0.001
    assert 0.018 < float(weight.std()) < 0.022
    assert len(set(layer.scales.reshape(-1).tolist())) > 1


def test_same_seed_gives_the_same_tensors_in_every_layout(tmp_path: Path) -> None:
    by_layout = {
        layout: build(tmp_path / layout, "qwen3.5-tiny", "--bits", "4", "--layout", layout)
        for layout in ("hash", "layer", "hf")
    }
    tensors = {layout: tensor_bytes(folder) for layout, folder in by_layout.items()}
    assert tensors["hash"] == tensors["layer"] == tensors["hf"]
    other = build(tmp_path / "other", "qwen3.5-tiny", "--bits", "4", "--seed", "1")
    assert tensor_bytes(other) != tensors["hash"]

    order = {layout: file_order(folder / "model.safetensors") for layout, folder in by_layout.items()}
    layers = [int(name.split("layers.")[1].split(".")[0]) for name in order["layer"] if "layers." in name]
    assert layers == sorted(layers)
    scattered = [int(name.split("layers.")[1].split(".")[0]) for name in order["hash"] if "layers." in name]
    assert scattered != sorted(scattered)
    entries, start = header(by_layout["hf"] / "model.safetensors")
    assert start % 8 == 0
    codes = [name for name in order["hf"] if entries[name]["dtype"] == "U32"]
    assert codes == sorted(codes)


def test_shards_have_an_index_and_the_same_tensors(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", "llama-tiny")
    split = build(tmp_path / "split", "llama-tiny", "--shard-size", "300KB")
    assert tensor_bytes(split) == tensor_bytes(whole)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(map(len, tensor_bytes(whole).values()))
    for name, file in index["weight_map"].items():
        assert name in header(split / file)[0]
    mlx_lm.load(str(split))


def test_header_is_what_mlx_writes(tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "llama-tiny", "--bits", "4")
    arrays = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(tmp_path / "mlx.safetensors"), arrays, metadata={"format": "mlx"})
    entries, start = header(tmp_path / "mlx.safetensors")
    tensors = [
        random_weights.Tensor(name, entries[name]["dtype"], tuple(arrays[name].shape), arrays[name].nbytes, b"")
        for name in file_order(tmp_path / "mlx.safetensors")
    ]
    assert files.header_of(tensors, "hash") == (tmp_path / "mlx.safetensors").read_bytes()[:start]


def test_decay_keeps_float32_as_mlx_lm_keeps_it(tmp_path: Path) -> None:
    entries, _ = header(build(tmp_path / "m", "qwen3.5-tiny") / "model.safetensors")
    dtypes = {name.rpartition(".")[2]: entry["dtype"] for name, entry in entries.items() if "linear_attn" in name}
    assert dtypes["A_log"] == "F32"
    assert dtypes["dt_bias"] == "BF16"


def test_tokenizer_round_trips_and_decodes_every_id(tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "llama-tiny", "--vocab", "600")
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    text = "Line one\n  tabs\tand 漢字, é — 🙂 <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 600
    assert len({tokenizer.decode([i]) for i in range(259, 600)}) == 341
    detokenizer = tokenizer.detokenizer
    for token in range(600):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert " 599" in detokenizer.text
    assert tokenizer.eos_token_ids == {json.loads((folder / "config.json").read_text())["eos_token_id"]}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert tokenizer.decode(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


MEASURE = """
import resource, sys
from pathlib import Path

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss there keeps what the process before exec had
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

import make_checkpoint
before = peak()
for name, *more in ("plain",), ("quantized", "--dtype", "float32", "--bits", "8"):
    assert make_checkpoint.main(["llama-4gb", f"{sys.argv[1]}/{name}", "--vocab", "4096", "--layers", "2", *more]) == 0
print(peak() - before)
"""


def test_memory_stays_under_one_layer(tmp_path: Path) -> None:
    """Bound: BLOCK_BYTES (100 MB) over what the imports take; a layer is 122 MB, the bfloat16 checkpoint 277 MB."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < random_weights.BLOCK_BYTES
    written = sum(path.stat().st_size for path in (tmp_path / "plain").glob("*.safetensors"))
    assert written > 2.7 * random_weights.BLOCK_BYTES


def test_interrupted_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_tokenizer", interrupt)  # after the weights, before config.json
    assert make.main(["llama-tiny", str(tmp_path / "m")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "model.safetensors").write_bytes(b"half")
    mlx_lm.load(str(build(tmp_path, "llama-tiny")))
    assert not (tmp_path / ".partial").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("no-such-shape",), 1, "there is no shape 'no-such-shape'"),
        (("llama-tiny", "--vocab", "100"), 1, "259 is the smallest"),
        (("llama-tiny", "--mode", "mxfp4", "--bits", "8"), 1, "this quantization does not exist"),
        (("llama-tiny", "--bits", "4", "--group-size", "48"), 1, "no matrix has rows that groups of 48 divide"),
        (("llama-tiny", "--layers", "0"), 2, "--layers 0 is too small"),
        (("llama-tiny", "--shard-size", "2"), 2, "--shard-size 2: no unit"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    shape, *options = arguments
    try:
        got = make.main([shape, str(tmp_path / "m"), *options])
    except SystemExit as e:
        got = e.code
    assert got == status
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "m").exists()


def test_full_folder_and_full_disk_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert make.main(["llama-tiny", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: files.shutil._ntuple_diskusage(10**9, 10**9, 0))
    assert make.main(["llama-4gb", str(tmp_path / "m")]) == 1
    assert "needs 4.15 GB and its disk has 0.00 GB free" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_named_shapes_build_with_their_published_sizes() -> None:
    """Bytes of tensors: llama-4gb by its definition, Qwen3.5 0.8B as published at 8 bits (0.80 GB)."""

    def total(shape: str, quantize: dict[str, Any] | None) -> int:
        config = make.resize(make.SHAPES[shape], None, None, None, "bfloat16")
        model, _ = make.lazy_model(config, "bfloat16", quantize, 0)
        return sum(tensor.nbytes for tensor in random_weights.plan_tensors(model, 0))

    assert total("llama-4gb", None) == 4_154_724_352
    assert total("qwen3.5-0.8b", {"group_size": 64, "bits": 8, "mode": "affine"}) == pytest.approx(0.80e9, rel=0.005)
    for shape in make.SHAPES:
        assert total(shape, None) > 0
