"""The rule by which numbers and words that a user gives are checked.

What is no count, or no known word, is refused by its name: an argument's in Python, a flag's on the command line.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UsageError
from .text import shortened

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
    if not least <= value <= most or value in (math.inf, -math.inf):
        if math.isfinite(least) and math.isfinite(most):
            raise UsageError(f"{shown_value(name, value)}: from {least:g} to {most:g}")
        bounds = f"at least {least:g}" if value < least else "a finite number is needed"
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
