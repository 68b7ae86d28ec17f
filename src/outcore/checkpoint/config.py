"""Checks a model folder's configuration files before mlx-lm or transformers open them."""

from __future__ import annotations

import glob
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..machine.small_files import CONFIG_BYTES, INDEX_BYTES, TOKENIZER_BYTES, check_small
from .checkpoint import read_object

CONFIG = "config.json"

_LAYERS = re.compile(r"(num|n)_([a-z_]+_)?(layers?|blocks?)|depth")
_COUNT = re.compile(r"(num|n)_[a-z_]+")
_MOST = 1 << 20  # Upper limit of any other count in a configuration: experts, heads, groups.

# Layers that a configuration may name beyond the number of tensors, since a layer can be used more than once.
_SLACK = 64

# Files that mlx-lm and transformers open by themselves. Other files in the folder do not matter.
_READ = re.compile(
    r"(.*config|.*\.index|tokenizer|special_tokens_map|added_tokens|vocab|chat_template|merges)\.(json|txt|jinja)"
    r"|.*\.(model|tiktoken|jinja|py)"
)

_MOST_BYTES = {CONFIG: CONFIG_BYTES, "generation_config.json": CONFIG_BYTES, "hf_quant_config.json": CONFIG_BYTES}


class LiteralFolder(type(Path())):  # type: ignore[misc]  # a Path is made as a PosixPath
    """A folder for mlx-lm, which globs in it and would take its own name for a pattern."""

    def __truediv__(self, name: Any) -> Path:
        return Path(glob.escape(str(self)) if "*" in str(name) else str(self)) / name


def read_config(folder: Path, tensors: int) -> dict[str, Any]:
    """Read a model's config.json, and refuse one with far more layers than tensors, each of which would be built.

    Args:
        tensors: number of tensors in the model's files.
    """
    check_files(folder)
    _, config = read_object(folder / CONFIG, CONFIG_BYTES)
    for name, value in _integers(config):
        most = tensors + _SLACK if _LAYERS.fullmatch(name) else _MOST if _COUNT.fullmatch(name) else None
        if most is not None and value > most:
            what = f"the model's files hold {tensors} tensors" if most != _MOST else f"the limit is {_MOST}"
            raise CheckpointError(f"{folder / CONFIG}: {name} is {str(value)[:20]}, but {what}; download it again")
    return config


def config_files(folder: Path) -> list[Path]:
    """Return the files of a model folder, other than weights, that mlx-lm and transformers open by themselves."""
    try:
        return sorted(path for path in folder.iterdir() if _READ.fullmatch(path.name))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error


def check_files(folder: Path) -> None:
    """Check that every file that mlx-lm or transformers opens is a regular file of plausible size."""
    for path in config_files(folder):
        most = INDEX_BYTES if path.name.endswith(".index.json") else _MOST_BYTES.get(path.name, TOKENIZER_BYTES)
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                check_small(path, most)
        except FileNotFoundError:  # a dangling link counts as missing
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _integers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    todo: list[Any] = [config]
    while todo:
        at = todo.pop()
        if isinstance(at, dict):
            yield from ((key, value) for key, value in at.items() if isinstance(value, int))
            todo += at.values()
        elif isinstance(at, list):
            todo += at
