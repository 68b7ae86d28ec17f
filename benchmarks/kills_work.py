"""The work that `kills` interrupts, and the small models that it is done with."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils

import _support  # noqa: F401
import zoo
from outcore.cli.main import main
from outcore_calibrate import disk_rate as unread
from outcore_convert import convert as conversion

# All that the commands import, before anything is forked.
for _name in ("outcore_packs", "outcore.cli.generate", "outcore_batch", "outcore_calibrate", "outcore_convert"):
    importlib.import_module(_name if "." in _name else f"{_name}.command")

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "_norm.weight")
REQUESTS = 12


@dataclass(frozen=True)
class Kind:
    """A kind of work.

    Attributes:
        share: of all kills.
        run: does it in this process, with what it writes in a room: ``cache``, ``out.jsonl``.
        answer: what must not depend on a kill: from standard output, or from the room.
    """

    name: str
    share: float
    run: Callable[[Path, Path], None]
    answer: Callable[[str, Path], Any]


def make_world(folder: Path) -> None:
    """A hybrid model as its authors publish it, whose convolutions and norms mlx-lm's sanitize changes."""
    model = folder / "model"
    config = zoo.CONFIGS["qwen3_5"]
    text = config["text_config"] | {"vocab_size": 8192, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    zoo.CONFIGS["qwen3_5"] = config | {"text_config": text, "tie_word_embeddings": True}
    zoo.save_checkpoint("qwen3_5", model, dtype=mx.bfloat16)
    file = model / "model.safetensors"
    loaded: Any = mx.load(str(file))
    published = {path: _published(path, array) for path, array in loaded.items()}
    mx.eval(published)
    mx.save_safetensors(str(file), published)
    source = Path(str(resources.files("outcore_demo_model")))
    shutil.copy(source / "tokenizer.json", model)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    # Random weights may end a text anywhere.
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f(x):" + " x" * n}}
        for n in range(REQUESTS)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _published(path: str, array: mx.array) -> mx.array:
    if "conv1d.weight" in path:
        return mx.contiguous(array.moveaxis(1, 2))
    return array - 1.0 if path.endswith(NORMS) else array


def command(name: str, room: Path, *arguments: str) -> None:
    """Run a command with folders of the room's own for all that it keeps."""
    os.environ["OUTCORE_CACHE"] = str(room / "cache")
    # One for all: MLX keeps what it has compiled there.
    os.environ["TMPDIR"] = str(room.parent / "tmp")
    tempfile.tempdir = None
    mx.set_default_device(mx.cpu)
    if main([name, *arguments]):
        raise AssertionError(f"outcore {name} failed")


def _generate(models: Path, room: Path, *more: str) -> None:
    arguments = ["--model", str(models / "model"), "--memory", "1GB", "--resident", "1", "--max-tokens", "4", *more]
    command("generate", room, *arguments, "--prompt", "def f(x):", "--verbose", "F", "--json")


def _convert(models: Path, room: Path) -> None:
    """In files of a few tensors; what is done is counted after each job."""
    conversion.SYNC_S = 0.0
    vars(mlx_lm.utils)["make_shards"] = lambda weights: [
        {name: weights[name] for name in list(weights)[i : i + 20]} for i in range(0, len(weights), 20)
    ]
    command("convert", room, str(models / "model"), "-q", "--memory", "1GB", "--output", str(room / "cache" / "made"))


def _said(said: str, room: Path) -> Any:
    return json.loads(said.splitlines()[-1])["tokens"]


def _batch(models: Path, room: Path) -> None:
    arguments = ["--model", str(models / "model"), "--memory", "1GB", "--resident", "1", "--max-tokens", "3"]
    files = ["--input", str(models / "requests.jsonl"), "--output", str(room / "out.jsonl"), "--resume"]
    command("batch", room, *arguments, "--concurrency", "4", *files)


def _answers(said: str, room: Path) -> Any:
    lines = [json.loads(line) for line in (room / "out.jsonl").read_text().splitlines()]
    return sorted((line["custom_id"], line["response"]["body"]["choices"][0]["text"], line["error"]) for line in lines)


def _calibrate(models: Path, room: Path) -> None:
    # Nothing is to be measured rightly here.
    unread.SCRATCH_BYTES, unread.LEAST_SCRATCH = 48_000_000, 24_000_000
    command("calibrate", room)


def _known(said: str, room: Path) -> Any:
    return len(list((room / "cache" / "calibration").glob("*.json")))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("pack", 0.35, lambda models, room: command("pack", room, str(models / "model")), lambda said, room: None),
        Kind("overlay", 0.25, lambda models, room: _generate(models, room, "--draft", "none"), _said),
        Kind("draft", 0.2, lambda models, room: _generate(models, room, "--draft", "self:4"), _said),
        Kind("batch", 0.15, _batch, _answers),
        Kind("convert", 0.1, _convert, lambda said, room: None),
        Kind("calibrate", 0.05, _calibrate, _known),
    )
}
