"""What transformers makes of its files whenever it is imported, made once for all processes that tests start.

``quick_start/sitecustomize.py`` says why, and is what those processes read it with.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import transformers
from transformers.utils import import_utils

MODELS = Path(transformers.__file__).parent / "models"


def for_processes(folder: Path) -> None:
    """Have the processes that this one starts find it."""
    kept = folder / "transformers"
    made = import_utils.create_import_structure_from_path(MODELS)
    kept.write_bytes(pickle.dumps(str(MODELS)) + pickle.dumps(made))
    os.environ["OUTCORE_TESTS_TRANSFORMERS"] = str(kept)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts one for each core when it is imported: 0.1 s
    os.environ["PYTHONPATH"] = python_path(Path(__file__).parent / "quick_start")


def python_path(*first: Path) -> str:
    """``PYTHONPATH`` with these folders before what is in it."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
