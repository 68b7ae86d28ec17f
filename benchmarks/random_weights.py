"""Random values for the tensors of a synthetic checkpoint: made for speed, decided by seed, shape and format alone.

Matrices are normal with a standard deviation of 0.02; quantized ones have uniform codes (mxfp8: normal) and scales that
dequantize to the same deviation around zero. Vectors (norms, biases) keep the value that the model class gives them,
except a recurrent layer's decay. One block of random numbers a kind is drawn from the seed, and each tensor is that
block read in a circle, from an offset that depends on seed and name. The block's length is a prime, so no two rows of a
matrix are equal; but what is larger than the block repeats it at a shift, which a compressing file system may notice.
What is held is the blocks; no tensor is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

Bytes = npt.NDArray[np.uint8]

STD = 0.02
BLOCK = 2_097_143  # elements of a random block: the largest prime below 2**21
BLOCK_BYTES = 100_000_000
"""Bytes at most of all blocks of a checkpoint, with what drawing them needs."""
# safetensors' names, in the order in which its own writer sorts dtypes (safetensors/src/tensor.rs, `Dtype`)
DTYPES = {"uint8": "U8", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32"}


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
