"""MLX, and what needs it: imported when a command runs, not when its flags are only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .main import _look_for_compiler, _uninterrupted


@contextmanager
def importing_mlx() -> Iterator[None]:
    """Around those imports: Ctrl-C takes effect at their end."""
    with _uninterrupted():
        yield
        _look_for_compiler()
