"""Byte counts as people type and read them: `GB` is 1e9 bytes, `GiB` is 2**30."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import UsageError

# K, M, G and T alone are decimal, as in mlx-lm's own sizes.
_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_ACCEPTED = "a number and one of B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
_SIZE = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)
MOST_BYTES = 2**63 - 1
ARRAY_BYTES = 2**31 - 1
"""Bytes of MLX's largest array of bytes: shapes are int32 (``OverflowError`` one byte beyond, MLX 0.32.4)."""
_MOST_CHARACTERS = 40


def parse_size(text: str, *, flag: str = "--memory") -> int:
    """Read a size such as `1.5GB`, `512MiB`, `800 MB` or `4G`, in any case, as bytes (fractions of one are dropped).

    Args:
        text: what the user typed.
        flag: the option or argument that it was typed for, named in the error.

    Raises:
        UsageError: no unit, an unknown unit, no number, or a size that is not between 1 byte and 2**63 - 1.
    """
    shown = text if len(text) <= _MOST_CHARACTERS and text.isprintable() else f"{text[:_MOST_CHARACTERS]!r}..."
    where = f"{flag} {shown}" if text.strip() else f"{flag} {text!r}"
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MOST_CHARACTERS else None
    if match is None:
        raise UsageError(f"{where}: not a size; write {_ACCEPTED}, such as 4GB")
    sign, number, unit = match.groups()
    if sign == "-":
        raise UsageError(f"{where}: a size cannot be negative")
    if not unit and not Decimal(number):
        raise UsageError(f"{where}: a size must be at least one byte, such as 4GB")
    if not unit:
        raise UsageError(f"{where}: no unit; write {_with_unit(number)}")
    if unit.upper() not in _UNITS:
        raise UsageError(f"{where}: unknown unit {unit}; write {_ACCEPTED}")
    nbytes = int(Decimal(number) * _UNITS[unit.upper()])
    if nbytes == 0:
        raise UsageError(f"{where}: a size must be at least one byte")
    if nbytes > MOST_BYTES:
        raise UsageError(f"{where}: more bytes than any machine can address; write a smaller size")
    return nbytes


def _with_unit(number: str) -> str:
    """What somebody may have meant who wrote no unit: a number of gigabytes, or of bytes."""
    if Decimal(number) < _UNITS["MB"]:
        return f"{number}GB or {number}GiB"
    nbytes = int(Decimal(number))
    return f"{nbytes}B for bytes" + (f", {format_size(nbytes)}" if nbytes <= MOST_BYTES else "")


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
