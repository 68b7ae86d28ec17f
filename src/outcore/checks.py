"""The rule by which numbers and words that a user gives are checked.

What is no count, or no known word, is refused by its name: an argument's in Python, a flag's on the command line.
"""

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

COUNT = 2**31 - 1
"""The most that is counted to: MLX's shapes and indices are 32 bits."""

LEAST_TEMPERATURE = 1e-30
"""The least temperature but 0: log-probabilities divided by less leave float32."""


def whole(name: str, value: Any, least: int = 1, most: int = COUNT) -> int:
    """A whole number: an int, of NumPy too, or a float that is one; ``True`` is none.

    Args:
        name: the flag or argument, named in the error.

    Raises:
        UsageError: another kind of value, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{shown_value(name, value)}: a whole number is needed") from None
    if not least <= number <= most:
        bounds = f"at least {least}" if number < least else f"at most {most}"
        raise UsageError(f"{shown_value(name, value)}: {bounds}")
    return number


def real(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number.

    Raises:
        UsageError: another kind of value, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UsageError(f"{shown_value(name, value)}: a number is needed")
    if not least <= value <= most or math.isinf(value):
        bounds = f"at least {least:g}" if value < least else "a finite number is needed"
        bounds = f"from {least:g} to {most:g}" if math.isfinite(least) and math.isfinite(most) else bounds
        raise UsageError(f"{shown_value(name, value)}: {bounds}")
    return float(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """One of these words.

    Raises:
        UsageError: another one.
    """
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise UsageError(f"{shown_value(name, value)}: choose one of {', '.join(words)}")
    return value


def not_endless(name: str, path: Path) -> Path:
    """A file to read whole, if it has an end: devices such as /dev/zero have none.

    Raises:
        UsageError: it is a device.
    """
    try:
        endless = path.is_char_device()
    except OSError:
        endless = False  # whoever opens it tells why it cannot be
    if endless:
        raise UsageError(f"{shown_value(name, path)}: a device; give a file, or a pipe")
    return path


def shown_value(name: str, value: Any) -> str:
    """As it was given: a flag with its value, or an argument."""
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
    """Read a size such as `1.5GB`, `512MiB`, `800 MB` or `4G`, in any case, as bytes (fractions of one are dropped).

    Args:
        text: what the user typed.
        flag: the option or argument that it was typed for, named in the error.

    Raises:
        UsageError: no unit, an unknown unit, no number, or a size that is not between 1 byte and 2**63 - 1.
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
    """Refuse keyword arguments that there are none of.

    Raises:
        TypeError: names the first of them, and which may have been meant.
    """
    words = list(known)
    for name in names:
        if name not in words:
            raise TypeError(f"unexpected keyword argument {name!r}{meant(name, words)}")
