"""Versions of what is installed, looked up once: a package's metadata is read and parsed each time that one asks, which
was a tenth of loading a small model."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def version(package: str) -> str:
    """As ``importlib.metadata.version``.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(package)
