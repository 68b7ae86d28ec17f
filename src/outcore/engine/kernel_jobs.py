"""What a process compiles of CUDA's kernels: numbers that are told to it.

This is imported before ``mlx.nn`` may be (``loading.kernel_job``).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Product:
    """A quantized product that stands for all that use the same kernels.

    Attributes:
        columns, inner: of the weights, as small as another kernel is not chosen for.
        dtype: of what they are multiplied with.
    """

    columns: int
    inner: int
    bits: int
    group_size: int
    mode: str
    dtype: str

    @staticmethod
    def like(columns: int, inner: int, bits: int, group_size: int, mode: str, dtype: mx.Dtype) -> Product:
        """The one that stands for a product of these sizes: kernels differ for columns that are a multiple of 128, and
        where the inner dimension is none of 64 or of the group's size (qmm.cu, qmm_naive.cu)."""
        block = max(64, group_size)
        inner = 4 * block + inner % block // group_size * group_size
        return Product(256 + columns % 128, inner, bits, group_size, mode, str(dtype).rpartition(".")[2])


@dataclass(frozen=True)
class KernelJob:
    """What one process compiles: all but quantized products, or one of these.

    Attributes:
        rows: tokens that are computed at once.
        product: None: all but products, and the token after those.
        sequences: that are answered side by side.
        share, shares: of the functions that MLX fuses, those whose number, in the order of their first calls, leaves
            this remainder. The last share looks up the token that follows, the one before it those of the prompt.
    """

    rows: int
    product: Product | None = None
    sequences: int = 1
    share: int = 0
    shares: int = 1
