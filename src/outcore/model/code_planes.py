"""Codes of quantized weights, cut into planes: high bits, which are a coarser model, and low bits, which refine it.

With MLX's affine quantization a weight is ``bias + scale * code`` (``mx.quantize``). Of its code's ``bits``, the
highest ``high`` alone say it to within ``2 ** low`` codes, where ``low = bits - high``. Its best guess is their middle,
``bias + scale * (2 ** low * code_high + (2 ** low - 1) / 2)``, which is affine in the high bits again.
"""

from __future__ import annotations

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
"""That MLX packs codes of."""


def unpacked(words: mx.array, bits: int) -> mx.array:
    """Codes, uint8 (..., n), of words, uint32 (..., n * bits / 32), as MLX packs them: one bit after the other, the
    lowest first."""
    stream = words.view(mx.uint8).reshape(*words.shape[:-1], -1, bits)
    # Eight codes are as many bytes as a code has bits.
    whole = mx.zeros(stream.shape[:-1], mx.uint64)
    for i in range(bits):
        whole = whole | (stream[..., i].astype(mx.uint64) << (8 * i))
    mask = mx.array((1 << bits) - 1, mx.uint64)
    codes = mx.stack([((whole >> (bits * i)) & mask).astype(mx.uint8) for i in range(8)], axis=-1)
    return codes.reshape(*words.shape[:-1], -1)


def packed(codes: mx.array, bits: int) -> mx.array:
    """Words, uint32 (..., n * bits / 32), of codes, uint8 (..., n): what ``unpacked`` undoes; n a multiple of 32."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(mx.uint64)
    whole = mx.zeros(eights.shape[:-1], mx.uint64)
    for i in range(8):
        whole = whole | (eights[..., i] << (bits * i))
    stream = mx.stack([((whole >> (8 * i)) & 255).astype(mx.uint8) for i in range(bits)], axis=-1)
    return stream.reshape(*codes.shape[:-1], -1).view(mx.uint32)


def high_plane(
    words: mx.array, scales: mx.array, biases: mx.array, bits: int, high: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The coarser weights of so many high bits, as ``mx.quantized_matmul`` takes them.

    Args:
        words: uint32 (..., n * bits / 32); ``scales`` and ``biases``: (..., n / group size), of any floating dtype.

    Returns:
        words of the high bits, and their scales and biases, of the same dtype.
    """
    low = bits - high
    shift = mx.array((2**low - 1) / 2, mx.float32)
    middle = biases.astype(mx.float32) + scales.astype(mx.float32) * shift
    return packed(unpacked(words, bits) >> low, high), scales * 2**low, middle.astype(biases.dtype)
