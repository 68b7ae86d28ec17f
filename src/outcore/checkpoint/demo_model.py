"""Where the demo model lies: it is a package of its own, ``outcore-demo-model``, so that Outcore's stays small."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path

from ..errors import MissingFileError

PACKAGE = "outcore_demo_model"


def demo_model() -> AbstractContextManager[Path]:
    """Its folder, which is there for as long as the block runs.

    Raises:
        MissingFileError: the package is not installed.
    """
    try:
        folder = resources.files(PACKAGE)
    except ModuleNotFoundError as e:
        raise MissingFileError(
            "the demo model is a package of its own, which is not installed: pip install outcore-demo-model; in a "
            "checkout pip install ./demo-model"
        ) from e
    return resources.as_file(folder)
