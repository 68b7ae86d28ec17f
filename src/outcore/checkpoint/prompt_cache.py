"""Reads and writes prompt caches in the format of ``mlx_lm.cache_prompt``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import CheckpointError, MissingFileError, UsageError
from ..modules.cache_check import impossible
from ..modules.hooks import flat
from ..modules.mlx_lm_compat import BaseCache
from .checkpoint import read_header
from .manifest import first_fault


class TokenizerSettings(BaseModel):
    """The tokenizer settings that ``mlx_lm.cache_prompt`` stores. Others are refused, since they could name files or
    code."""

    model_config = ConfigDict(strict=True, extra="forbid")
    trust_remote_code: bool | None = None
    eos_token: Annotated[str, Field(max_length=1000)] | None = None


class _About(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    model: Annotated[str, Field(max_length=10_000)] | None = None
    tokenizer_config: Annotated[str, Field(max_length=100_000)] = "{}"


def open_prompt_cache(path: Path, model: str | None) -> tuple[list[Any], dict[str, Any], str | None]:
    """Open a prompt cache that was made with this model.

    Args:
        model: the model's name; None: accept any.

    Returns:
        The caches, the tokenizer's settings, and the model's name in the file, if it has one.

    Raises:
        UsageError: the file is no prompt cache, or was made with another model.
    """
    where = f"--prompt-cache-file {path}"
    try:
        read_header(path)
        _check_numbers(path)
        cache, about = load_prompt_cache(str(path), return_metadata=True)
        metadata = _About.model_validate(about or {})
        settings = TokenizerSettings.model_validate_json(metadata.tokenizer_config)
        for c in flat(cache):
            if not isinstance(c, BaseCache) or (why := impossible(c)) is not None:
                raise ValueError(f"a {type(c).__name__} {why if isinstance(c, BaseCache) else 'is no cache'}")
        if not cache:
            raise ValueError("it has no caches")
    except CheckpointError as e:
        missing = f"{where}: no such file; outcore cache-prompt makes one"
        raise UsageError(missing if isinstance(e, MissingFileError) else f"--prompt-cache-file {e}") from e
    except ValidationError as e:
        raise UsageError(f"{where}: {first_fault(e)}; make it again with mlx_lm.cache_prompt") from e
    except Exception as e:  # mlx-lm checks nothing before it uses it
        why = " ".join(str(e).split())[:200] or type(e).__name__
        what = "not a prompt cache that this mlx-lm can load: make it again with mlx_lm.cache_prompt"
        raise UsageError(f"{where}: {what} ({why})") from e
    if metadata.model is not None and model is not None and not _same(metadata.model, model):
        raise UsageError(f"--prompt-cache-file: made with {metadata.model[:200]}, not with {model}; use that model")
    return cache, settings.model_dump(exclude_none=True), metadata.model


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return Path(one).expanduser().samefile(Path(other).expanduser())
    except (OSError, RuntimeError, ValueError):  # no such file, no such user (~name), a zero byte
        return False


def _check_numbers(file: Path) -> None:
    """Raise ``ValueError`` for a name with a list index above the number of names: MLX would make a list that long."""
    found: Any = mx.load(str(file), return_metadata=True)
    names = [*found[0], *found[1]]
    for name in names:
        for part in name.split("."):
            if part.isdigit() and int(part) > len(names):
                raise ValueError(f"a tensor name has the index {part[:20]}, and the file only {len(names)} names")


_SUFFIX = ".safetensors"


class PromptCacheFile:
    """Saves a prompt cache atomically: an existing file stays until the new one is complete.

    Args:
        name: gets the suffix ``.safetensors`` if it lacks it, as in MLX.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise UsageError("--prompt-cache-file: give a name")
        self.path = Path(name if name.endswith(_SUFFIX) else f"{name}{_SUFFIX}")
        self._target = Path(os.path.realpath(self.path))  # renaming onto a link would replace the link
        self._partial = self._target.with_name(f".{self._target.name[:200]}.{os.getpid()}.partial")

    def __enter__(self) -> PromptCacheFile:
        try:
            if self._target.exists():
                open_prompt_cache(self._target, None)
            self._partial.open("xb").close()
        except UsageError as e:
            what = "exists and is not a prompt cache; give another name"
            raise UsageError(f"--prompt-cache-file {self.path}: {what}") from e
        except OSError as e:
            raise self._cannot(e) from e
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def save(self, cache: list[Any], model: str, settings: Mapping[str, Any]) -> int:
        """Write the file; returns its size in bytes.

        Args:
            model: its name, as the user gave it.
            settings: the tokenizer's.
        """
        try:
            with self._partial.open("wb") as out:
                save_prompt_cache(out, cache, {"model": model, "tokenizer_config": json.dumps(settings)})
                out.flush()
                os.fsync(out.fileno())
            self._partial.rename(self._target)
            return self._target.stat().st_size
        except OSError as e:
            raise self._cannot(e) from e

    def _cannot(self, error: OSError) -> UsageError:
        return UsageError(f"--prompt-cache-file {self.path}: cannot be written ({error.strerror})")
