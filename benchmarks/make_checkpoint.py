"""Writes an mlx-lm checkpoint with a real model's shapes and random weights: a model to measure without a network.

    python benchmarks/make_checkpoint.py qwen3.5-9b models/qwen-9b-8bit --bits 8

The folder loads with `mlx_lm.load`: config.json, safetensors in shards with their index, and a byte-level tokenizer.
Names, shapes and dtypes are read from mlx-lm's own model class, built lazily and quantized lazily as
`mlx_lm.convert` does it; no matrix is ever evaluated.

What the numbers are, says `random_weights`. Only seed, shape and format decide a tensor's bytes; layout and shards do
not.

Memory. What is held is blocks of random numbers (BLOCK_BYTES at most, with what drawing them needs) and the headers,
beside what importing mlx-lm takes and the tokenizer's table (0.5 kB an entry); no tensor is.

Interruption. A folder with a config.json is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes, quantize_model
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from checkpoint_files import SPECIALS, MakeError, write_checkpoint
from outcore.checks import parse_size
from outcore.errors import UsageError
from random_weights import plan_tensors
from shapes import DRAFTERS, SHAPES, Config, layer_types

# Group size and bits of each mode, if others are not asked for, as mlx_lm.convert has them.
QUANTIZED = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


def resize(config: Config, layers: int | None, vocab: int | None, tied: bool | None, dtype: str) -> Config:
    """A copy of `config` with the sizes that the user asked for, our tokenizer's ids and the dtype's name."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    if layers is not None:
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = layer_types(layers, text.get("full_attention_interval", 4))
    if vocab is not None:
        text["vocab_size"] = vocab
    if tied is not None:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = tied
    if text["vocab_size"] < 256 + len(SPECIALS):
        raise MakeError(f"a vocabulary of {text['vocab_size']} is too small; {256 + len(SPECIALS)} is the smallest")
    text["dtype" if text is not config else "torch_dtype"] = dtype
    text["eos_token_id"] = config["eos_token_id"] = 256 + SPECIALS.index("<|im_end|>")
    text["bos_token_id"] = None
    return config


def lazy_model(config: Config, dtype: str, quantize: dict[str, Any] | None, seed: int) -> tuple[Any, Config]:
    """mlx-lm's model of `config`, cast and quantized as `mlx_lm.convert` does it but not evaluated, and its config."""
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    # from_dict may write into what it is given (qwen3_5 renames rope_type), which is not for config.json
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    keeps = getattr(model, "cast_predicate", lambda _: True)
    target = getattr(mx, dtype)

    def cast(path: str, value: Any) -> Any:
        return value.astype(target) if keeps(path) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if quantize is not None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it prints the bits per weight
                model, config = quantize_model(model, config, **quantize)
        except ValueError as e:
            raise MakeError(f"this quantization does not exist: {e}") from e
        if not any("scales" in module for _, module in model.named_modules()):
            raise MakeError(
                f"no matrix has rows that groups of {quantize['group_size']} divide; use another group size"
            )
    return model, config


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        description="Write an mlx-lm checkpoint with a real model's shapes and random weights.",
        epilog=f"Shapes: {', '.join(SHAPES)}. A path to a config.json of any model that mlx-lm knows works too. With "
        f"--config-only also drafters: {', '.join(DRAFTERS)}.",
    )
    parser.add_argument("shape", metavar="SHAPE", help="a shape's name (see below), or the path of a config.json")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder to write; must be empty or not exist")
    parser.add_argument("--bits", type=int, help="quantize to this many bits (affine: 2, 3, 4, 5, 6 or 8)")
    parser.add_argument("--group-size", type=int, help="weights that share a scale (default: 64, or what the mode has)")
    parser.add_argument("--mode", choices=list(QUANTIZED), help="quantize in this mode (default: affine)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="type of what is not quantized, and of affine scales (default: %(default)s)",
    )
    parser.add_argument(
        "--config-only", action="store_true", help="write config.json only, as for outcore plan --device"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: the shape's)")
    parser.add_argument("--vocab", type=int, help="vocabulary size (default: the shape's; at least 259)")
    parser.add_argument(
        "--tie",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="embeddings that are the head as well (default: the shape's)",
    )
    parser.add_argument(
        "--shard-size",
        default="2GB",
        metavar="SIZE",
        help="most bytes of tensors in one file; mlx_lm.convert takes 5GiB (default: %(default)s)",
    )
    parser.add_argument(
        "--layout",
        choices=["hash", "layer", "hf"],
        default="hash",
        help="order of the tensors inside a file: scattered as MLX saves them, layer by layer, or by dtype and name as "
        "the safetensors library saves them (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    return parser


def load_shape(name: str) -> Config:
    """The config of a named shape or of a config.json."""
    if name in SHAPES:
        return SHAPES[name]
    if Path(name).is_file():
        config: Config = json.loads(Path(name).read_text())
        return {key: value for key, value in config.items() if not key.startswith("quantization")}
    raise MakeError(f"there is no shape {name!r}; choose one of {', '.join(SHAPES)}, or name a config.json")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    for option in ("layers", "seed", "group_size"):
        value = getattr(args, option)
        if value is not None and value < (0 if option == "seed" else 1):
            parser.error(f"--{option.replace('_', '-')} {value} is too small")
    try:
        shard_size = parse_size(args.shard_size, flag="--shard-size")
    except UsageError as e:
        parser.error(str(e))
    quantize = None
    if args.bits or args.mode or args.group_size:
        mode = args.mode or "affine"
        group_size, bits = QUANTIZED[mode]
        quantize = {"group_size": args.group_size or group_size, "bits": args.bits or bits, "mode": mode}
    if args.config_only:
        config = DRAFTERS.get(args.shape) or load_shape(args.shape) | ({"quantization": quantize} if quantize else {})
        args.out_dir.mkdir(parents=True)
        (args.out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return 0
    begin = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        config = resize(load_shape(args.shape), args.layers, args.vocab, args.tie, args.dtype)
        model, config = lazy_model(config, args.dtype, quantize, args.seed)
        tensors = plan_tensors(model, args.seed)
        del model
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            size, shards = write_checkpoint(
                args.out_dir,
                config,
                tensors,
                shard_size=shard_size,
                layout=args.layout,
                seed=args.seed,
                progress=progress,
            )
    except (MakeError, OSError) as e:
        print(f"make_checkpoint: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"make_checkpoint: interrupted; {args.out_dir} holds no model", file=sys.stderr)
        return 130
    speed = size / 1e9 / (time.perf_counter() - begin)
    print(f"{args.out_dir}: {size} bytes, {shards} shard{'s' * (shards != 1)}, {speed:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
