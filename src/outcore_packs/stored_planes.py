"""Cuts the codes of quantized weights into two planes: the high bits form a coarser model, the low bits refine it.

With MLX's affine quantization a weight is ``bias + scale * code`` (``mx.quantize``). The ``high`` highest of a code's
``bits`` bits determine the code to within ``2 ** low``, where ``low = bits - high``. The best estimate is the middle of
that range, ``bias + scale * (2 ** low * code_high + (2 ** low - 1) / 2)``, which is affine in the high bits again.

MLX packs codes bit by bit, the lowest first, so eight codes take as many bytes as a code has bits. Codes are cut and
joined eight at a time, as fields of one integer. Three steps move the fields: the upper four, then the upper two of
each four, then the upper one of each two.

A packed copy stores a weight as two planes: first all low bits, then all high bits, in as many bytes as before. A model
that drafts with the high bits keeps them in memory and streams only the low bits. Nothing is on disk twice, and both
planes joined give all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.manifest import Coded
from outcore.machine.device import on_cpu
from outcore.modules.layers import Layer, named_modules

BITS = (2, 3, 4, 5, 6, 8)  # sizes of codes that MLX packs

Join = Callable[[mx.array, mx.array], mx.array]


def high_plane(
    words: mx.array, scales: mx.array, biases: mx.array, bits: int, high: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the words, scales and biases of the coarser weights, as ``mx.quantized_matmul`` takes them.

    Args:
        words: uint32 (..., n * bits / 32). ``scales``, ``biases``: (..., n / group size), of any floating dtype.
    """
    low = bits - high
    scales = scales * 2**low
    return high_words(words, bits, high), scales, middle(scales, biases, low)


def middle(scales: mx.array, biases: mx.array, low: int) -> mx.array:
    """Returns the biases of the coarser weights, from their ``scales`` and the whole weights' ``biases``."""
    return _middle(low)(scales, biases)


@cache
def _middle(low: int) -> Join:
    share = (2**low - 1) / 2 ** (low + 1)

    def between(scales: mx.array, biases: mx.array) -> mx.array:
        return (biases.astype(mx.float32) + scales.astype(mx.float32) * share).astype(biases.dtype)

    return mx.compile(between)


def high_words(words: mx.array, bits: int, high: int) -> mx.array:
    """Returns the high bits, uint32 (..., n * high / 32), packed as MLX packs codes; n is a multiple of 32."""
    return _cut(bits, high, bits - high)(words)


def low_plane(words: mx.array, bits: int, high: int) -> mx.array:
    """Returns the low bits, uint32 (..., n * low / 32), packed as MLX packs codes; n is a multiple of 32."""
    return _cut(bits, bits - high, 0)(words)


def joined(high_words: mx.array, low_words: mx.array, bits: int, high: int) -> mx.array:
    """Joins the high and the low plane to words, uint32 (..., n * bits / 32); not evaluated."""
    return _joined(bits, high, on_cpu())(high_words, low_words)


@cache
def _joined(bits: int, high: int, fused: bool) -> Join:
    """Makes the function that ``joined`` calls: on a CPU one that MLX fuses (4 bit, 2 of them high, one core: 3.7 GB/s
    of words; unfused 0.1), on a GPU a kernel."""
    low, wide = bits - high, _wide(bits)

    def join(highs: mx.array, lows: mx.array) -> mx.array:
        highs, lows = _eights(highs, high, wide), _eights(lows, low, wide)
        return _words((_moved(highs, high, bits, wide) << low) | _moved(lows, low, bits, wide), bits)

    return mx.compile(join) if fused else joining_kernel(bits, high)


def joining_kernel(bits: int, high: int) -> Join:
    """Makes a GPU kernel that joins planes. Each thread joins 32 codes, which are as many words as a code has bits."""
    kernel = gpu_kernel(f"joined_{bits}_{high}", ("high", "low", "count"), joining_source(bits, high))

    def join(highs: mx.array, lows: mx.array) -> mx.array:
        count = highs.size // high
        shape = (*highs.shape[:-1], highs.shape[-1] // high * bits)
        return kernel([highs, lows, mx.array([count], mx.uint32)], count, shape)

    return join


def gpu_kernel(
    name: str, inputs: Sequence[str], source: str
) -> Callable[[list[mx.array], int, tuple[int, ...]], mx.array]:
    """Makes a Metal or CUDA kernel with a uint32 output. Call it with inputs, number of threads and output shape.

    Args:
        source: in C that both accept; each thread runs it with its number in ``at`` and writes to ``out``.
    """
    # Names as in the documentation of ``mx.fast.cuda_kernel`` and ``mx.fast.metal_kernel``.
    metal = mx.metal.is_available()
    made: Any = mx.fast.metal_kernel if metal else mx.fast.cuda_kernel
    index = "thread_position_in_grid.x" if metal else "cooperative_groups::this_grid().thread_rank()"
    source = f"unsigned int at = {index};\n{source}"
    kernel = made(name=f"outcore_{name}", input_names=list(inputs), output_names=["out"], source=source)

    def run(arrays: list[mx.array], threads: int, shape: tuple[int, ...]) -> mx.array:
        block, dtypes = (min(threads, 256), 1, 1), [mx.uint32]
        (out,) = kernel(
            inputs=arrays, output_shapes=[shape], output_dtypes=dtypes, grid=(threads, 1, 1), threadgroup=block
        )
        result: mx.array = out
        return result

    return run


def joining_source(bits: int, high: int) -> str:
    """Returns the kernel's source: C that both CUDA and Metal accept, without loops."""
    low = bits - high
    lines = ["if (at >= count[0]) return;"]
    for name, size in (("high", high), ("low", low)):
        lines += [f"unsigned int {name}{i} = {name}[{size} * at + {i}];" for i in range(size)]
    parts: list[list[str]] = [[] for _ in range(bits)]
    for code in range(32):
        value = f"(({_field('high', code, high)} << {low}) | {_field('low', code, low)})"
        word, shift = divmod(code * bits, 32)
        parts[word].append(f"({value} << {shift})" if shift else value)
        if shift + bits > 32:
            parts[word + 1].append(f"({value} >> {32 - shift})")
    lines += [f"out[{bits} * at + {i}] = {' | '.join(part)};" for i, part in enumerate(parts)]
    return "\n".join(lines) + "\n"


def _field(name: str, code: int, size: int) -> str:
    """Returns the C expression for code number ``code``, of ``size`` bits, in the words ``name0``, ``name1``, ..."""
    word, shift = divmod(code * size, 32)
    value = f"({name}{word} >> {shift})" if shift else f"{name}{word}"
    if shift + size > 32:
        value = f"({value} | ({name}{word + 1} << {32 - shift}))"
    return f"({value} & {(1 << size) - 1}u)"


@cache
def _cut(bits: int, kept: int, skipped: int) -> Callable[[mx.array], mx.array]:
    """Returns a function that keeps, of each code, ``kept`` bits above the lowest ``skipped``.

    Fused for speed and memory: unfused, intermediate results of a 512 MB head took 4 to 10 GB.
    """
    wide = _wide(bits)

    def cut(words: mx.array) -> mx.array:
        fields = (_eights(words, bits, wide) >> skipped) & mx.array(_runs(0, kept, bits, 8), wide)
        return _words(_moved(fields, bits, kept, wide), kept)

    return mx.compile(cut)


@cache
def _wide(bits: int) -> mx.Dtype:
    return mx.uint32 if bits <= 4 else mx.uint64


# By bits of a code: the integer type of exactly eight codes.
_WHOLE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _eights(words: mx.array, bits: int, wide: mx.Dtype) -> mx.array:
    """Returns packed codes as integers of dtype ``wide``, each with eight of a row's n codes: (..., n / 8)."""
    if bits in _WHOLE:
        return words.view(_WHOLE[bits]).astype(wide)
    stream = words.view(mx.uint8).reshape(*words.shape[:-1], -1, bits)
    whole = stream[..., 0].astype(wide)
    for i in range(1, bits):
        whole = whole | (stream[..., i].astype(wide) << (8 * i))
    return whole


def _words(eights: mx.array, bits: int) -> mx.array:
    if bits in _WHOLE:
        return eights.astype(_WHOLE[bits]).view(mx.uint32)
    stream = mx.stack([(eights >> (8 * i)).astype(mx.uint8) for i in range(bits)], axis=-1)
    return stream.reshape(*eights.shape[:-1], -1).view(mx.uint32)


def _runs(begin: int, size: int, stride: int, count: int) -> int:
    """Returns a mask with ``count`` runs of ``size`` bits, one every ``stride`` bits, the first at ``begin``."""
    return sum(((1 << size) - 1) << (begin + stride * i) for i in range(count))


def _moved(x: mx.array, before: int, after: int, wide: mx.Dtype) -> mx.array:
    """Moves eight fields, of which one begins every ``before`` bits, so that one begins every ``after`` bits."""
    near, far = sorted((before, after))
    if near == far:
        return x
    for upper in (4, 2, 1) if after > before else (1, 2, 4):
        # In each pair of runs of ``upper`` fields the upper run moves.
        size, stride, by = upper * near, 2 * upper * far, upper * (far - near)
        stay = mx.array(_runs(0, size, stride, 4 // upper), wide)
        move = mx.array(_runs(size if after > before else upper * far, size, stride, 4 // upper), wide)
        moving = x & move
        x = (x & stay) | (moving << by if after > before else moving >> by)
    return x


# Planes pay only if at least this fraction of a layer's bytes can be cut; the rest of the layer stays in memory.
ENOUGH = 0.75

CUT_BYTES = 4 << 20  # Bytes of words that are cut at a time.


def could_be_cut(shape: tuple[int, ...], bits: int, high: int) -> bool:
    """Whether words of this shape are rows of whole blocks of 32 codes, of which ``high`` bits can be cut off."""
    known = bits in BITS and 0 < high < bits
    return known and len(shape) == 2 and min(shape) > 0 and shape[1] % bits == 0 and shape[0] * shape[1] < 1 << 30


def cut_modules(layer: Layer, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """Returns a layer's modules whose codes can be cut because they have more than ``high`` bits, with paths; none if
    these are too small a part of the layer."""
    found = {id(m): (path, m) for path, m in named_modules(layer.module) if _can_be_cut(m, high)}
    nbytes = sum(m.weight.nbytes + m.scales.nbytes + m.biases.nbytes for _, m in found.values())
    return list(found.values()) if nbytes >= ENOUGH * layer.nbytes else []


def _can_be_cut(module: nn.Module, high: int) -> bool:
    if type(module) is not nn.QuantizedLinear or module.mode != "affine" or module.bits <= high:
        return False
    # float16 scales, multiplied by a power of two for the draft, might overflow.
    whole = module.weight.ndim == 2 and module.weight.dtype == mx.uint32 and module.weight.shape[0] > 1
    return whole and module.scales.dtype != mx.float16


@dataclass(frozen=True)
class Planes:
    """Cuts and joins the codes of one weight.

    Attributes:
        shape: of the words, uint32.
        bits: bits of a code. ``high``: how many of these are in the second plane.
    """

    shape: tuple[int, ...]
    bits: int
    high: int
    nbytes: int = 0

    dtype: ClassVar[str] = "U32"
    words: ClassVar[str] = "<u4"
    stored: ClassVar[None] = None

    @classmethod
    def found(cls, stored: tuple[int, ...], coded: Coded, _: Any) -> Planes:
        rows, columns = stored
        shape = rows, columns // 4
        if not could_be_cut(shape, coded.bits, coded.high):
            raise ValueError("of another form")
        return cls(shape, coded.bits, coded.high)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[0], self.shape[1] * 4

    def encoded(self, words: Any) -> Iterator[memoryview]:
        step = max(1, CUT_BYTES // (words.shape[1] * 4))
        for cut in (low_plane, high_words):
            for begin in range(0, len(words), step):
                plane = cut(mx.array(words[begin : begin + step]), self.bits, self.high)
                mx.eval(plane)
                yield np.array(plane, copy=False).reshape(-1).view(np.uint8).data

    @property
    def low_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * 4 // self.bits * (self.bits - self.high)

    def decode(self, stored: mx.array) -> mx.array:
        """Returns the words, uint32, not evaluated. ``stored``: the two planes, uint8, with as many bytes."""
        flat = stored.reshape(-1)
        parts = (flat[self.low_bytes :], flat[: self.low_bytes])
        high, low = (part.view(mx.uint32).reshape(self.shape[0], -1) for part in parts)
        return joined(high, low, self.bits, self.high)

    def places(self, stored: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
        """Returns where the low and the high plane of a stored tensor are, as uint32 tensors."""
        (rows, words), low = self.shape, self.low_bytes
        blocks = words // self.bits
        lows, highs = (rows, blocks * (self.bits - self.high)), (rows, blocks * self.high)
        file, begin, left = stored.file, stored.offset + low, stored.nbytes - low
        return (
            TensorInfo(f"{stored.name}.low", file, "U32", lows, stored.offset, low),
            TensorInfo(f"{stored.name}.high", file, "U32", highs, begin, left),
        )
