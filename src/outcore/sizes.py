"""Sizes in bytes: formatting, alignment of slots, and growth of KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

MOST_BYTES = 2**63 - 1
# Bytes of MLX's largest uint8 array: shapes are int32 (``OverflowError`` one byte beyond, MLX 0.32.4).
ARRAY_BYTES = 2**31 - 1


def format_size(n: int, *, round_up: bool = False) -> str:
    """Formats bytes with three digits and a decimal unit: `1.66 GB`, `131 MB`, `12 B`.

    Args:
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


# Bytes. Direct I/O moves whole blocks; 4096 is a multiple of every logical block size in use (512 and 4096).
BLOCK = 4096

# Bytes of a large page. Slots of several pages begin at one, so that direct reads run at the disk's full rate.
PAGE = 2 << 20

# Bytes. Two tensors of a unit no further apart in a file are read as one extent, including the gap.
GAP = 64 * 1024


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def slot_alignment(nbytes: int) -> int:
    """Returns a slot's address alignment in bytes: a large page if the slot holds several, else a block."""
    return PAGE if nbytes >= 4 * PAGE else BLOCK


def slot_bytes(nbytes: int) -> int:
    """Returns bytes of memory for a slot that holds units of ``nbytes``: whole blocks plus room to align the start."""
    return round_up(nbytes, BLOCK) + slot_alignment(nbytes)


def most_unit(slot: int) -> int:
    """Returns bytes of the largest unit whose slot takes at most ``slot`` bytes; 0 if there is none."""
    whole = slot // PAGE * PAGE - PAGE
    return whole if whole >= 4 * PAGE else max(0, min(4 * PAGE - BLOCK, slot // BLOCK * BLOCK - BLOCK))


# Tokens by which mlx-lm's KV caches grow (``KVCache.step``).
KV_STEP = 256

# A cache that grows: its bytes per token, and the most tokens that it holds (None: unlimited).
Growing = tuple[int, int | None]


def held_tokens(context: int, most: int | None = None) -> int:
    """Returns the size in tokens, at most, of a KV cache's buffer that has grown to hold ``context`` + 1 tokens.

    When ``k`` more tokens exceed a buffer of ``n``, it grows to ``n`` plus ``k`` rounded up to whole steps: less than
    one step beyond the ``n + k`` tokens in use.
    """
    tokens = context + KV_STEP
    return tokens if most is None else min(tokens, most)


def held_bytes(growing: Sequence[Growing], context: int) -> int:
    """Returns the bytes, at most, of caches that have grown to hold ``context`` + 1 tokens."""
    return sum([each * held_tokens(context, most) for each, most in growing])
