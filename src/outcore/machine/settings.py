"""Settings that apply to every command: ``OUTCORE_*`` variables and a configuration file.

    # ~/.config/outcore/config.toml, or $OUTCORE_CONFIG
    memory = "4GB"
    model = "mlx-community/Qwen3-8B-4bit"
    cache = "/Volumes/fast/outcore"
    monitor = "off"

    [models]  # short names, accepted wherever a model is named
    qwen = "mlx-community/Qwen3-8B-4bit"

A flag overrides a variable (``OUTCORE_MEMORY``, ``OUTCORE_MODEL``, ``OUTCORE_CACHE``, ``OUTCORE_MONITOR``), which
overrides the file. Python programs use only the cache folder, the monitor setting and the short names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import PlatformDirs

from ..errors import UsageError
from ..text import one_line, shortened
from .small_files import read_small

# Whether running processes can be monitored.
ON, OFF = "on", "off"

# Keys of the file, with an example of each.
KEYS = {"memory": "4GB", "model": "mlx-community/Qwen3-8B-4bit", "cache": "~/outcore", "monitor": OFF}

# Key of the file whose table gives short names to models.
MODELS = "models"

# Variable for the number of ranks that divide this host's memory.
SHARED_BY = "OUTCORE_MEMORY_SHARED_BY"

# Most bytes of a configuration file: a device given as one would never end.
LONGEST = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A setting's value, and where it comes from: a variable, or a configuration file and its key."""

    value: str
    source: str


def setting(key: str) -> Setting | None:
    """Returns the setting for one of ``KEYS``, from its variable or the file; None if neither has it.

    Raises:
        UsageError: the file or the value cannot be used.
    """
    variable = f"OUTCORE_{key.upper()}"
    if value := os.environ.get(variable):
        return _checked(key, Setting(value, variable))
    return settled().get(key)


def settled() -> dict[str, Setting]:
    """Returns all settings of the configuration file.

    Raises:
        UsageError: it cannot be used.
    """
    path, values = _file()
    found = {}
    for key, value in values.items():
        if key == MODELS:
            continue  # ``short_names`` checks them
        if key not in KEYS:
            raise UsageError(f"{path}: unknown key {shortened(key)}; the keys are {', '.join((*KEYS, MODELS))}")
        if not isinstance(value, str) or not value:
            raise UsageError(f'{path}: {key}: give text in quotation marks, such as {key} = "{KEYS[key]}"')
        if key == "cache" and not value.startswith(("/", "~")):
            raise UsageError(f"{path}: cache: {shortened(value)}: give the whole path, from / or ~ on")
        found[key] = _checked(key, Setting(value, f"{path}: {key}"))
    return found


def short_names() -> dict[str, str]:
    """Returns the folder or Hub name for each short name of a model; raises UsageError as ``settled`` does."""
    path, values = _file()
    names = values.get(MODELS, {})
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        raise UsageError(f'{path}: [{MODELS}]: give lines such as qwen = "{KEYS["model"]}"')
    return names


def _file() -> tuple[Path, dict[str, Any]]:
    own = os.environ.get("OUTCORE_CONFIG")
    if own == os.devnull:
        return Path(own), {}
    try:
        path = Path(own).expanduser() if own else PlatformDirs("outcore").user_config_path / "config.toml"
    except RuntimeError as e:  # there is no home folder
        if own:
            raise UsageError(f"OUTCORE_CONFIG: {shortened(own)}: {e}") from e
        return Path(), {}
    return path, _read(path, named=bool(own))


def _read(path: Path, *, named: bool) -> dict[str, Any]:
    import tomllib  # takes 10 ms, and few users have a file

    try:
        return tomllib.loads(read_small(path, LONGEST).decode())
    except FileNotFoundError:
        if named:
            raise UsageError(f"OUTCORE_CONFIG: {path}: no such file") from None
        return {}
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path}: not TOML: {one_line(e)}") from e


def _checked(key: str, found: Setting) -> Setting:
    if key == "monitor" and found.value not in (ON, OFF):
        raise UsageError(f"{found.source}: {shortened(found.value)}: give {ON} or {OFF}")
    if key == "memory":
        from ..options import budget_bytes  # takes 10 ms, and few users set it

        budget_bytes(found.value, lambda: 100, f"{found.source}:")
    return found
