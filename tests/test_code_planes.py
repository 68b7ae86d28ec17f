"""High bits of quantized codes, as weights of their own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from outcore_packs.stored_planes import BITS, high_plane, joined, low_plane


def unpacked(words: mx.array, bits: int) -> mx.array:
    """Codes, by MLX's own hand."""
    groups = (*words.shape[:-1], words.shape[-1] * 32 // bits // 64)
    return mx.dequantize(words, mx.ones(groups), mx.zeros(groups), 64, bits).astype(mx.uint8)


@pytest.mark.parametrize(("bits", "high"), [(b, h) for b in BITS for h in range(1, b)])
def test_every_code_is_cut_and_put_together_again(bits: int, high: int) -> None:
    words = mx.random.randint(0, 2**32, (3, 5, 16 * bits), dtype=mx.uint32, key=mx.random.key(bits))
    ones = mx.ones((3, 5, 8))
    upper, lower = high_plane(words, ones, ones, bits, high)[0], low_plane(words, bits, high)
    assert upper.shape == (3, 5, 16 * high) and lower.shape == (3, 5, 16 * (bits - high))
    codes = unpacked(words, bits)
    if high in BITS:
        assert mx.array_equal(unpacked(upper, high), codes >> (bits - high)).item()
    if bits - high in BITS:
        assert mx.array_equal(unpacked(lower, bits - high), codes & (2 ** (bits - high) - 1)).item()
    assert mx.array_equal(joined(upper, lower, bits, high), words).item()


@pytest.mark.parametrize(("bits", "high"), [(b, h) for b in BITS for h in BITS if h < b])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_high_bits_alone_are_the_middle_of_what_low_bits_could_make_of_them(
    bits: int, high: int, dtype: mx.Dtype
) -> None:
    made = mx.quantize(mx.random.normal((8, 256), key=mx.random.key(1)).astype(dtype), 64, bits)
    words, scales, biases = high_plane(*made, bits, high)
    assert words.shape == (8, 256 * high // 32) and scales.dtype == biases.dtype == dtype
    assert mx.array_equal(unpacked(words, high), unpacked(made[0], bits) >> (bits - high)).item()
    coarse = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 64, high)
    fine = mx.dequantize(made[0], made[1].astype(mx.float32), made[2].astype(mx.float32), 64, bits)
    off = mx.abs(coarse - fine).reshape(8, 4, 64) / mx.abs(made[1].astype(mx.float32))[..., None]
    # Half of what low bits span, and the bias's own rounding.
    rounding = 0.0 if dtype == mx.float32 else 2**-8 * mx.abs(biases / made[1]).max().item()
    assert off.max().item() <= (2 ** (bits - high) - 1) / 2 + rounding + 1e-3
    assert mx.abs((coarse - fine).mean()).item() < mx.abs(made[1]).max().item()
