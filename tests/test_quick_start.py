"""Processes that tests start are quicker than a user's, and see nothing else."""

from __future__ import annotations

import subprocess
import sys

STRUCTURE = """
import importlib.util
import os
import transformers
from transformers.utils import import_utils as kept

spec = importlib.util.spec_from_file_location("transformers.utils.own_import_utils", kept.__file__)
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
models = os.path.join(os.path.dirname(transformers.__file__), "models")
assert hasattr(own.create_import_structure_from_path, "cache_info"), "transformers' own keeps what it made"
assert not hasattr(kept.create_import_structure_from_path, "cache_info")
found = own.define_import_structure(models)
assert "LlamaTokenizer" in str(found)
assert kept.define_import_structure(models) == found
"""
"""In a process that a test starts: its list of the models' modules, and the one that transformers makes."""


def test_transformers_list_of_its_modules_is_what_it_would_have_made() -> None:
    subprocess.run([sys.executable, "-c", STRUCTURE], check=True)
