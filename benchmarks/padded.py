"""A trained small model that weighs like a large one, quantized: its feed-forward layers get rows and columns of zeros,
which change no token.

    python benchmarks/padded.py MODEL OUT --width 230000 --bits 4

So a regime is measured in which weights are most of the memory, with text that can be drafted. It says nothing of how
well a large model is drafted for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model, quantize_model, save


def pad(module: nn.Module, width: int, columns: bool) -> None:
    """Rows, or columns, of zeros up to ``width``; of codes with scales and biases that are zero, too."""
    per = 32 // module.bits if isinstance(module, nn.QuantizedLinear) else 1
    keys = {"weight": width // per if columns else width}
    if per > 1:
        keys |= dict.fromkeys(("scales", "biases"), width // module.group_size if columns else width)
    for key, size in keys.items():
        rows, inner = module[key].shape
        module[key] = mx.pad(module[key], [(0, 0), (0, size - inner)] if columns else [(0, size - rows), (0, 0)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, required=True, help="of the feed-forward layers; a multiple of 64")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()
    model, config = load_model(args.model, lazy=True)
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and name in ("gate_proj", "up_proj", "down_proj"):
            pad(module, args.width, name == "down_proj")
    (config.get("text_config") or config)["intermediate_size"] = args.width
    if "quantization" not in config:
        with contextlib.redirect_stdout(None):
            model, config = quantize_model(model, config, args.group_size, args.bits)
    args.out.mkdir(parents=True, exist_ok=True)
    save(args.out, args.model, model, _tokenizer(args.model), config)
    nbytes = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(json.dumps({"bytes": nbytes, "width": args.width, "bits": args.bits}))


def _tokenizer(folder: Path) -> object:
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(folder)


if __name__ == "__main__":
    main()
