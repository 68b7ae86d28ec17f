"""Packages around the core, found by what they bring: the core imports none of them by name.

A package names a module as an entry point of the group that it joins:

    [project.entry-points."outcore.commands"]
    cluster = "outcore_cluster.commands"

What such a module has is said where the group is asked for (``cli/commands.py``, for example). A source tree, or an
editable install made before, has no such metadata of the packages beside the core. There ``outcore_NAME`` joins every
group of which it has a module by that name.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PREFIX = "outcore."
"""What the names of entry points' groups begin with."""


@cache
def modules(group: str) -> dict[str, ModuleType]:
    """The modules that packages bring for a group, such as ``commands``, by the packages' names for them.

    Raises:
        ModuleNotFoundError: a module is there, and imports one that is not.
    """
    found = {}
    for name, module in (_beside(group) | _entry_points().get(PREFIX + group, {})).items():
        try:
            found[name] = importlib.import_module(module)
        except ModuleNotFoundError as e:
            # Not there, or left over from another version. What a module that is there lacks is an error.
            if e.name is None or not f"{module}.".startswith(f"{e.name}."):
                raise
    return found


def _beside(group: str) -> dict[str, str]:
    """Modules of the packages that come with the core."""
    here = Path(__file__).parents[1]
    files = [*here.glob(f"outcore_*/{group}.py"), *here.glob(f"outcore_*/{group}/__init__.py")]
    packages = sorted(file.relative_to(here).parts[0] for file in files)
    return {name.removeprefix("outcore_"): f"{name}.{group}" for name in packages}


@cache
def _entry_points() -> dict[str, dict[str, str]]:
    """Names and modules that installed packages give, by group: what ``importlib.metadata`` finds in 40 ms."""
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
