"""Checks numbers and words that a user gives. Errors name the argument in Python and the flag on the command line."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from .errors import UsageError
from .sizes import MOST_BYTES
from .text import meant, shortened

# Largest count: MLX's shapes and indices are 32 bits.
COUNT = 2**31 - 1

# Smallest temperature except 0: dividing log-probabilities by less overflows float32.
LEAST_TEMPERATURE = 1e-30


def whole(name: str, value: Any, least: int = 1, most: int = COUNT) -> int:
    """Returns a whole number given as an int (also NumPy's) or an integral float; ``True`` is refused.

    Raises:
        UsageError: another type, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{shown_value(name, value)}: a whole number is needed") from None
    if not least <= number <= most:
        bounds = f"must be at least {least}" if number < least else f"must be at most {most}"
        raise UsageError(f"{shown_value(name, value)}: {bounds}")
    return number


def real(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Returns a finite number.

    Raises:
        UsageError: another type, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UsageError(f"{shown_value(name, value)}: a number is needed")
    if not least <= value <= most or math.isinf(value):
        bounds = f"must be at least {least:g}" if value < least else "a finite number is needed"
        bounds = f"must be from {least:g} to {most:g}" if math.isfinite(least) and math.isfinite(most) else bounds
        raise UsageError(f"{shown_value(name, value)}: {bounds}")
    return float(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """Returns ``value`` if it is one of the known words.

    Raises:
        UsageError: it is not.
    """
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise UsageError(f"{shown_value(name, value)}: choose one of {', '.join(words)}")
    return value


def not_endless(name: str, path: Path) -> Path:
    """Returns the path of a file to read whole, unless it is a device such as /dev/zero, which has no end.

    Raises:
        UsageError: it is a device.
    """
    try:
        endless = path.is_char_device()
    except OSError:
        endless = False  # opening it reports the reason
    if endless:
        raise UsageError(f"{shown_value(name, path)}: a device; give a file, or a pipe")
    return path


def shown_value(name: str, value: Any) -> str:
    """Returns a flag with its value, or an argument with its value, as the user wrote it."""
    return f"{name} {shortened(value)}" if name.startswith("-") else f"{name}={shortened(repr(value))}"


# K, M, G and T alone are decimal, as in mlx-lm's own sizes.
_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_ACCEPTED = "a number and one of B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
_SIZE = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)
_MOST_CHARACTERS = 40


def parse_size(text: str, *, flag: str = "--memory") -> int:
    """Parses a size such as `1.5GB`, `512MiB`, `800 MB` or `4G`, in any case, into whole bytes.

    Args:
        flag: the option or argument, named in the error.

    Raises:
        UsageError: no unit, an unknown unit, no number, or a size outside 1 byte to 2**63 - 1.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _MOST_CHARACTERS else None
    sign, number, unit = match.groups() if match is not None else ("", "0", "")
    nbytes = int(Decimal(number) * _UNITS.get(unit.upper(), 1))
    if match is None:
        why = f"not a size; write {_ACCEPTED}, such as 4GB"
    elif sign == "-":
        why = "a size cannot be negative"
    elif unit and unit.upper() not in _UNITS:
        why = f"unknown unit {unit}; write {_ACCEPTED}"
    elif not unit and nbytes:
        why = f"no unit; write {f'{number}GB or {number}GiB' if nbytes < _UNITS['MB'] else f'{number}B for bytes'}"
    elif nbytes == 0:
        why = "a size must be at least one byte, such as 4GB"
    elif nbytes > MOST_BYTES:
        why = "more bytes than any machine can address; write a smaller size"
    else:
        return nbytes
    shown = text if len(text) <= _MOST_CHARACTERS and text.isprintable() else f"{text[:_MOST_CHARACTERS]!r}..."
    raise UsageError(f"{flag} {shown if text.strip() else repr(text)}: {why}")


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses unknown keyword arguments.

    Raises:
        TypeError: names the first one, and the closest known name.
    """
    words = list(known)
    for name in names:
        if name not in words:
            raise TypeError(f"unexpected keyword argument {name!r}{meant(name, words)}")
