"""High bits of quantized codes, as weights of their own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from outcore.model.code_planes import BITS, high_plane, packed, unpacked


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_are_those_that_mlx_packs(bits: int, group: int) -> None:
    words, scales, biases = mx.quantize(mx.random.normal((3, 5, 384), key=mx.random.key(bits)), group, bits)
    codes = unpacked(words, bits)
    assert codes.shape == (3, 5, 384)
    plain = mx.dequantize(words, mx.ones_like(scales), mx.zeros_like(biases), group, bits)
    assert mx.array_equal(codes.astype(mx.float32), plain).item()
    assert mx.array_equal(packed(codes, bits), words).item()


@pytest.mark.parametrize("bits", BITS)
def test_every_code_comes_back(bits: int) -> None:
    codes = mx.arange(1024).astype(mx.uint8).reshape(2, 512) & ((1 << bits) - 1)
    assert mx.array_equal(unpacked(packed(codes, bits), bits), codes).item()


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
