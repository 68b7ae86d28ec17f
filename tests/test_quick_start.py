"""Processes that tests start are quicker than a user's, and see nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

STRUCTURE = """
import os
import transformers
from transformers.utils import import_utils

made = import_utils.create_import_structure_from_path
print(hasattr(made, "cache_info"))
found = import_utils.define_import_structure(os.path.join(os.path.dirname(transformers.__file__), "models"))
for needed, modules in sorted((sorted(needed), modules) for needed, modules in found.items()):
    print(needed, sorted((module, sorted(names)) for module, names in modules.items()))
"""


def structure(**env: str) -> tuple[str, str]:
    """Whether the function is transformers' own, which keeps what it made; and what it says of the models' modules."""
    command = [sys.executable, "-c", STRUCTURE]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, check=True)
    own, _, found = done.stdout.partition("\n")
    return own, found


def test_transformers_list_of_its_modules_is_what_it_would_have_made() -> None:
    own, found = structure(OUTCORE_TESTS_TRANSFORMERS="")
    kept, given = structure()
    assert (own, kept) == ("True", "False")
    assert given == found and "LlamaTokenizer" in found
