"""What Outcore's patches need of MLX and mlx-lm, of which a program may have brought older ones along."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

from outcore.errors import UsageError

NEEDED = {"mlx": "0.32.2", "mlx-lm": "0.32.2"}
"""As in pyproject.toml; older ones have other functions, and other words for their arguments."""


def check_versions(version: Callable[[str], str] = metadata.version) -> None:
    """Refuse versions that are too old.

    Raises:
        UsageError: says which it needs.
    """
    for package, needed in NEEDED.items():
        try:
            found = version(package)
        except metadata.PackageNotFoundError:
            continue  # brought along without its description: whatever fails tells
        if _numbers(found) < _numbers(needed):
            raise UsageError(
                f"{package} {found} is here, and Outcore needs {needed} or newer: install it, or leave the program as "
                "it is and give it `outcore serve` as a remote model (docs/integrations.md)"
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
