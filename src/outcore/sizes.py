"""Sizes in bytes: as people read them, of slots, and of caches."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

MOST_BYTES = 2**63 - 1
ARRAY_BYTES = 2**31 - 1
"""Bytes of MLX's largest array of bytes: shapes are int32 (``OverflowError`` one byte beyond, MLX 0.32.4)."""


def format_size(n: int, *, round_up: bool = False) -> str:
    """Write `n` bytes with three digits and a decimal unit: `1.66 GB`, `131 MB`, `12 B`.

    Args:
        n: a byte count; negative ones keep their sign.
        round_up: never show less than `n`, so that a smallest budget works when the user types it back.
    """
    size = abs(n)
    if size < 1000:
        return f"{n} B"
    last_digit = 10 ** (len(str(size)) - 3)
    size += last_digit - 1 if round_up and n > 0 else last_digit // 2
    size -= size % last_digit
    magnitude = len(str(size)) - 1  # only after rounding: 999.9 MB is 1.00 GB
    power = min(4, magnitude // 3)
    decimals = max(0, 2 - magnitude + 3 * power)
    return f"{'-' if n < 0 else ''}{Decimal(size) / 1000**power:.{decimals}f} {' KMGT'[power]}B"


BLOCK = 4096
"""Bytes. Direct I/O moves whole blocks; 4096 is a multiple of every logical block size in use (512 and 4096)."""

PAGE = 2 << 20
"""Bytes of a large page. Slots that hold a few begin at one: direct reads into them run at the disk's full rate."""

GAP = 64 * 1024
"""Bytes. Two tensors of a unit that lie no further apart in a file are read as one extent; the gap is read too."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def slot_alignment(nbytes: int) -> int:
    """Bytes that a slot's address is a multiple of: a large page where the slot holds a few of them, else a block."""
    return PAGE if nbytes >= 4 * PAGE else BLOCK


def slot_bytes(nbytes: int) -> int:
    """Bytes of memory that a slot for units of ``nbytes`` takes: whole blocks, and room to begin where it should."""
    return round_up(nbytes, BLOCK) + slot_alignment(nbytes)


def most_unit(slot: int) -> int:
    """Bytes of the largest unit whose slot takes at most ``slot`` bytes of memory; 0 if there is none."""
    whole = slot // PAGE * PAGE - PAGE
    return whole if whole >= 4 * PAGE else max(0, min(4 * PAGE - BLOCK, slot // BLOCK * BLOCK - BLOCK))


KV_STEP = 256
"""Tokens by which mlx-lm's KV caches grow (``KVCache.step``)."""

Growing = tuple[int, int | None]
"""Bytes per token, and tokens at most (None: no limit)."""


def held_tokens(context: int, most: int | None = None) -> int:
    """Tokens that a cache has room for at most after ``context`` tokens and one more, in chunks of any sizes.

    A buffer grows when its ``n`` tokens are followed by ``k`` more than it has room for: to ``n``, and ``k`` rounded up
    to whole steps. That is less than a step beyond the ``n + k`` tokens that there are then.
    """
    tokens = context + KV_STEP
    return tokens if most is None else min(tokens, most)


def held_bytes(growing: Sequence[Growing], context: int) -> int:
    """Bytes of growing caches at most, after ``context`` tokens and one more."""
    return sum([each * held_tokens(context, most) for each, most in growing])
