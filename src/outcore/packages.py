"""Finds packages around the core by their entry points; the core imports none of them by name.

A package names a module as an entry point of the group that it joins:

    [project.entry-points."outcore.commands"]
    cluster = "outcore_cluster.commands"

Each group documents its modules where it is used (``cli/commands.py``, for example). Source trees and old editable
installs lack this metadata, so a package ``outcore_NAME`` next to the core joins each group for which it has a module
of the group's name.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

# Start of every entry point group's name.
PREFIX = "outcore."


@cache
def modules(group: str) -> dict[str, ModuleType]:
    """Imports the modules that packages provide for a group, such as ``commands``; keyed by entry point name.

    Raises:
        ModuleNotFoundError: a module exists and imports one that does not.
    """
    found = {}
    for name, module in (_in_source_tree(group) | _entry_points().get(PREFIX + group, {})).items():
        try:
            found[name] = importlib.import_module(module)
        except ModuleNotFoundError as e:
            # Missing, or left over from another version. A dependency that an existing module lacks is an error.
            if e.name is None or not f"{module}.".startswith(f"{e.name}."):
                raise
    return found


def _in_source_tree(group: str) -> dict[str, str]:
    here = Path(__file__).parents[1]
    files = [*here.glob(f"outcore_*/{group}.py"), *here.glob(f"outcore_*/{group}/__init__.py")]
    packages = sorted(file.relative_to(here).parts[0] for file in files)
    return {name.removeprefix("outcore_"): f"{name}.{group}" for name in packages}


@cache
def _entry_points() -> dict[str, dict[str, str]]:
    """Reads entry points by group, faster than ``importlib.metadata`` (40 ms)."""
    found: dict[str, dict[str, str]] = {}
    for folder in dict.fromkeys(sys.path):
        for file in Path(folder).glob("*.dist-info/entry_points.txt"):
            group = ""
            for line in file.read_text(encoding="utf-8").splitlines():
                name, there, module = line.partition("=")
                if line.startswith("["):
                    group = line.strip().strip("[]")
                elif there and group.startswith(PREFIX):
                    found.setdefault(group, {}).setdefault(name.strip(), module.strip())
    return found
