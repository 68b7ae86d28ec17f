"""Python that starts for a test: transformers' list of its own modules is taken from a file instead of being made.

When it is imported, transformers reads 3,300 files to learn which classes are in them (``import_utils`` in 5.24): half
of what ``import mlx_lm.utils`` takes. ``quick_transformers`` has written down once a run what comes of that. And
garbage is not looked for as often: while modules are imported that takes a quarter of the time, and finds none.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "transformers.utils.import_utils"


class Quick:
    """Finds one module, and has it know the list when it was executed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                know(module)

            loader.exec_module = executed
        return spec


def know(module: ModuleType) -> None:
    """Give the module the list, a copy at each call; what it was not made for is looked through as ever."""
    import pickle  # here: other processes that start do without these two
    from pathlib import Path

    made = module.create_import_structure_from_path
    models = Path(str(module.__file__)).parents[1] / "models"
    with Path(os.environ["OUTCORE_TESTS_TRANSFORMERS"]).open("rb") as file:
        where, kept = pickle.load(file), file.read()
    if where == str(models):
        paths = {str(models), str(models / "__init__.py")}
        module.create_import_structure_from_path = lambda path: (  # type: ignore[attr-defined]
            pickle.loads(kept) if str(path) in paths else made(path)
        )


if os.environ.get("OUTCORE_TESTS_TRANSFORMERS"):
    sys.meta_path.insert(0, Quick)
    gc.set_threshold(500_000, 20, 20)
