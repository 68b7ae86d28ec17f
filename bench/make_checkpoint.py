"""Writes an mlx-lm checkpoint with a real model's shapes and random weights: a model to measure without a network.

    python bench/make_checkpoint.py qwen3.5-9b models/qwen-9b-8bit --bits 8

The folder loads with `mlx_lm.load`: config.json, safetensors in shards with their index, and a byte-level tokenizer.
Names, shapes and dtypes are read from mlx-lm's own model class, built lazily and quantized lazily as
`mlx_lm.convert` does it; no matrix is ever evaluated.

What the numbers are. Matrices are normal with a standard deviation of 0.02; quantized ones have uniform codes (mxfp8:
normal) and scales that dequantize to the same deviation around zero. Vectors (norms, biases) keep the value that the
model class gives them, except a recurrent layer's decay. They are made for speed: one block of random numbers a kind is
drawn from the seed, and each tensor is that block read in a circle, from an offset that depends on seed and name. The
block's length is a prime, so no two rows of a matrix are equal; but what is larger than the block repeats it at a
shift, which a compressing file system may notice. Only seed, shape and format decide a tensor's bytes; layout and
shards do not.

Memory. Headers are computed from shapes and the data is streamed, so what is held is the blocks (BLOCK_BYTES at most,
with what drawing them needs) and the headers, beside what importing mlx-lm takes and the tokenizer's table (0.5 kB an
entry); no tensor is.

Interruption. Everything is written to `OUT_DIR/.partial` and moved out at the end, config.json last: a folder
with a config.json is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import math
import os
import random
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, quantize_model, save_config
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shapes import SHAPES, Config, layer_types

Layout = Literal["hash", "layer", "hf"]
Bytes = npt.NDArray[np.uint8]

STD = 0.02
BLOCK = 2_097_143  # elements of a random block: the largest prime below 2**21
BLOCK_BYTES = 100_000_000
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# safetensors' names, in the order in which its own writer sorts dtypes (safetensors/src/tensor.rs, `Dtype`)
DTYPES = {"uint8": "U8", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32"}


class MakeError(Exception):
    """A checkpoint that cannot be made. The message is one line and says what to do."""


class Quantization(NamedTuple):
    """How one module is quantized: `mode` as in `mx.quantize`, `bits` a code."""

    mode: str
    bits: int


class Fill(NamedTuple):
    """A tensor's values as a stretch of a random block: which block, and the element to start at."""

    kind: str
    dtype: str
    quantization: Quantization | None
    start: int


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors file; `data` is its bytes where it is small, else where to copy them from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: bytes | Fill


def parse_size(text: str) -> int:
    """Bytes of `2GB`, `500MB`, `5GiB` (GB is 1e9, GiB 2**30).

    Raises:
        argparse.ArgumentTypeError: there is no such unit, or no number.
    """
    units = {f"{p}{b}": n for i, p in enumerate("KMGT", 1) for b, n in (("B", 1000**i), ("IB", 1024**i))} | {"B": 1}
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2].upper() not in units or match[1].count(".") > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write a number and a unit, as in 2GB or 5GiB")
    return int(float(match[1]) * units[match[2].upper()])


# ---- what to write: the model's parameters ----------------------------------------------------------------------


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


def plan_tensors(model: Any, seed: int) -> list[Tensor]:
    """Every parameter of a lazy model, in the model's order, with what to fill it with."""
    quantized = {
        path: Quantization(getattr(module, "mode", "affine"), module.bits)
        for path, module in model.named_modules()
        if "scales" in module
    }
    return [
        plan_tensor(name, value, quantized.get(name.rpartition(".")[0]), seed)
        for name, value in tree_flatten(model.parameters())
    ]


def plan_tensor(name: str, value: Any, quantization: Quantization | None, seed: int) -> Tensor:
    """One parameter: vectors and convolutions as bytes, matrices as a stretch of a block."""
    path, _, leaf = name.rpartition(".")
    dtype = str(value.dtype).rpartition(".")[2]
    # The digest is of the module's path, so that scales and biases start alike: they belong together.
    digest = int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest())
    data: bytes | Fill
    if value.ndim >= 2 and quantization is not None and leaf in ("weight", "scales", "biases"):
        data = Fill(leaf, dtype, quantization, digest % BLOCK)
    elif value.ndim >= 2 and mx.issubdtype(value.dtype, mx.floating) and "conv" not in path:
        data = Fill("matrix", dtype, None, digest % BLOCK)
    else:
        data = small_values(leaf, value, np.random.default_rng(digest), dtype)
    return Tensor(name, DTYPES[dtype], tuple(value.shape), value.nbytes, data)


def small_values(leaf: str, value: Any, rng: np.random.Generator, dtype: str) -> bytes:
    """Bytes of a vector or a short convolution: the model class's own where those do, else ones that make sense."""
    shape = tuple(value.shape)
    if leaf == "A_log":  # decay rates 1 to 16, as Mamba-2 starts with
        return encode(np.log(rng.uniform(1, 16, shape)), dtype).tobytes()
    if leaf == "dt_bias":  # softplus of it is a step of about 0.001 to 0.1, as Mamba starts with
        return encode(rng.uniform(-7, -2, shape), dtype).tobytes()
    if value.ndim >= 2 and mx.issubdtype(value.dtype, mx.floating):  # a convolution that keeps its input's size
        return encode(rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:])), dtype).tobytes()
    return np.array(value.reshape(-1).view(mx.uint8)).tobytes()


# ---- random values ----------------------------------------------------------------------------------------------


def encode(values: npt.NDArray[np.floating[Any]], dtype: str) -> Bytes:
    """The bytes of `values` in an MLX dtype; bfloat16, which numpy lacks, rounds to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype).reshape(-1).view(np.uint8)
    bits = values.astype(np.float32).reshape(-1).view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16).view(np.uint8)


def decode_float(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a small float's code without its sign (e2m1, e4m3), from the OCP microscaling formats' paper."""
    exponent, mantissa = divmod(code, 1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    unit = math.ldexp(1, max(exponent, 1) - bias - mantissa_bits)
    return (mantissa + (1 << mantissa_bits if exponent else 0)) * unit


def mixed_codes(rng: np.random.Generator, values: list[float], target: float) -> Bytes:
    """Codes of the two of `values` (ascending) around `target`, in the mix whose mean square is `target` squared."""
    high = next(i for i, v in enumerate(values) if v >= target)
    low, top = values[high - 1] ** 2, values[high] ** 2
    return np.where(rng.random(BLOCK) < (target**2 - low) / (top - low), high, high - 1).astype(np.uint8)


def draw_block(kind: str, dtype: str, quantization: Quantization | None, seed: int) -> Bytes:
    """BLOCK elements of random values for one kind of tensor, as bytes."""
    rng = np.random.default_rng([seed, *f"{kind}{quantization and quantization.mode}".encode()])
    if quantization is None:
        normal = rng.standard_normal(BLOCK, dtype=np.float32)
        normal *= STD
        return encode(normal, dtype)
    mode, bits = quantization
    fp8 = [decode_float(code, 4, 3) for code in range(127)]  # 127 is not a number
    if kind == "weight" and mode == "mxfp8":
        # An fp8 code has no uniform reading: quantiles of a normal distribution, by table
        quantiles = np.sort(np.random.default_rng(seed).standard_normal(1 << 16)) * (fp8[-1] / 7)
        edges = (np.array(fp8[1:]) + np.array(fp8[:-1])) / 2
        table = (np.searchsorted(edges, np.abs(quantiles)) + 128 * (quantiles < 0)).astype(np.uint8)
        return table[rng.integers(0, 1 << 16, BLOCK * 4, dtype=np.uint16)]
    if kind == "weight":
        return rng.integers(0, 1 << 32, BLOCK, dtype=np.uint32).view(np.uint8)
    if mode == "affine":
        rng = np.random.default_rng([seed, bits])  # the same draw for scales and for biases
        scales = rng.uniform(0.8, 1.2, BLOCK) * (STD / math.sqrt((4**bits - 1) / 12))
        return encode(scales if kind == "scales" else scales * (-((1 << bits) - 1) / 2), dtype)
    fp4 = [decode_float(code, 2, 1) for code in range(8)]
    rms = fp8[-1] / 7 if mode == "mxfp8" else math.sqrt(sum(v * v for v in fp4) / len(fp4))
    powers = [math.ldexp(1, code - 127) for code in range(255)]  # e8m0
    return mixed_codes(rng, fp8 if mode == "nvfp4" else powers, STD / rms)


class Blocks:
    """The random blocks of one checkpoint, drawn when first used."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._drawn: dict[tuple[str, str, Quantization | None], Bytes] = {}

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces of at most one block."""
        if isinstance(tensor.data, bytes):
            yield memoryview(tensor.data)
            return
        kind, dtype, quantization, start = tensor.data
        key = (kind, dtype, quantization)
        if kind == "weight" and quantization is not None and quantization.mode != "mxfp8":
            key = (kind, dtype, Quantization("codes", 0))  # all codes are drawn alike
        block = self._drawn.get(key)
        if block is None:
            block = self._drawn.setdefault(key, draw_block(*key, self.seed))
        position, left = start * (len(block) // BLOCK), tensor.nbytes
        while left:
            piece = block.data[position : position + left]
            yield piece
            left -= len(piece)
            position = 0


# ---- files ------------------------------------------------------------------------------------------------------


def split_shards(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Tensors in order, in shards of at most `limit` bytes or one tensor, as `mlx_lm.utils.make_shards` splits."""
    shards: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def arrange(shard: list[Tensor], layout: Layout, salt: str) -> list[Tensor]:
    """The order of a shard's tensors in its file."""
    if layout == "layer":
        return shard
    ordered = sorted(shard, key=lambda t: t.name)
    if layout == "hash":
        random.Random(salt).shuffle(ordered)
        return ordered
    rank = list(DTYPES.values())
    return sorted(ordered, key=lambda t: -rank.index(t.dtype))


def header_of(tensors: list[Tensor], layout: Layout) -> bytes:
    """A safetensors header with its length in front.

    `mx.save_safetensors` (looked at in 0.32.4) sorts names and keys and does not pad, so that data starts at any byte;
    the `safetensors` library pads with spaces to a multiple of 8. The `hf` layout does the latter.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for t in tensors:
        end = offset + t.nbytes
        entries[t.name] = {"data_offsets": [offset, end], "dtype": t.dtype, "shape": list(t.shape)}
        offset = end
    text = json.dumps(dict(sorted(entries.items())), separators=(",", ":")).encode()
    if layout == "hf":
        text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, header: bytes, tensors: list[Tensor], blocks: Blocks, wrote: Callable[[int], None]) -> None:
    """Streams one safetensors file to disk and syncs it; `wrote` is told of each piece's bytes."""
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for piece in blocks.chunks(tensor):
                file.write(piece)
                wrote(len(piece))
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer that fills the vocabulary: 256 bytes, the special tokens, then ` 259`, ` 260`, ...

    The fillers are never the result of encoding, as there are no merges; a random model's output decodes to numbers.
    Their letters are all in the byte alphabet, which mlx-lm's streaming detokenizer relies on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *SPECIALS])}
    vocab.update((f"Ġ{i}", i) for i in range(len(vocab), vocab_size))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262_144,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_checkpoint(
    folder: Path,
    config: Config,
    tensors: list[Tensor],
    *,
    shard_size: int,
    layout: Layout,
    seed: int,
    progress: Progress,
) -> tuple[int, int]:
    """Writes the whole model folder.

    Returns:
        Bytes of the safetensors files, and their number.

    Raises:
        MakeError: the folder is not empty, or the disk has not enough room.
    """
    made = not folder.exists()
    partial = folder / ".partial"  # inside, as the folder may be a mount point of its own
    if not made and any(path != partial for path in folder.iterdir()):
        raise MakeError(f"{folder} is not empty; remove it or name another folder")
    shards = split_shards(tensors, shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    shards = [arrange(shard, layout, f"{seed}:{name}") for shard, name in zip(shards, names, strict=True)]
    total = sum(t.nbytes for t in tensors)
    size = total + sum(len(header_of(shard, layout)) for shard in shards)
    if partial.exists():
        shutil.rmtree(partial)
    room = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if room < size + 100_000_000:  # the tokenizer, and some air
        raise MakeError(f"{folder} needs {size / 1e9:.2f} GB and its disk has {room / 1e9:.2f} GB free; free some")
    partial.mkdir(parents=True)
    try:
        task = progress.add_task(folder.name, total=total)
        blocks = Blocks(seed)
        for name, shard in zip(names, shards, strict=True):
            write_shard(partial / name, header_of(shard, layout), shard, blocks, lambda n: progress.advance(task, n))
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
        write_tokenizer(partial, config.get("text_config", config)["vocab_size"])
        save_config(config, partial / "config.json")
        for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial)
        if made and not any(folder.iterdir()):
            folder.rmdir()
    return size, len(shards)


# ---- command ----------------------------------------------------------------------------------------------------


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        description="Write an mlx-lm checkpoint with a real model's shapes and random weights.",
        epilog=f"Shapes: {', '.join(SHAPES)}. A path to a config.json of any model that mlx-lm knows works too.",
    )
    parser.add_argument("shape", metavar="SHAPE", help="a shape's name (see below), or the path of a config.json")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder to write; must be empty or not exist")
    parser.add_argument("--bits", type=int, help="quantize to this many bits (affine: 2, 3, 4, 5, 6 or 8)")
    parser.add_argument("--group-size", type=int, help="weights that share a scale (default: 64, or what the mode has)")
    parser.add_argument(
        "--mode", choices=["affine", "mxfp4", "nvfp4", "mxfp8"], help="quantize in this mode (default: affine)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="type of what is not quantized, and of affine scales (default: %(default)s)",
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
        type=parse_size,
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
    for option in ("layers", "seed", "shard_size", "group_size"):
        value = getattr(args, option)
        if value is not None and value < (0 if option == "seed" else 1):
            parser.error(f"--{option.replace('_', '-')} {value} is too small")
    quantize = None
    if args.bits or args.mode or args.group_size:
        quantize = {"group_size": args.group_size, "bits": args.bits, "mode": args.mode or "affine"}
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
                shard_size=args.shard_size,
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
