"""Prompt caches that ``mlx_lm.cache_prompt`` saved: read by mlx-lm, and believed only as far as the model agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, load_prompt_cache
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import CheckpointError, UsageError
from .checkpoint import read_header
from .manifest import first_fault
from .mlx_lm_compat import BaseCache

_MOST = 2**31 - 1
"""Tokens: an MLX shape is int32."""


class Settings(BaseModel):
    """Settings of a tokenizer, as ``mlx_lm.cache_prompt`` notes them. Any other could name files, or code."""

    model_config = ConfigDict(strict=True, extra="forbid")
    trust_remote_code: bool | None = None
    eos_token: Annotated[str, Field(max_length=1000)] | None = None


class _About(BaseModel):
    """What the file says of itself: the model's name as it was given, and the tokenizer's settings as JSON."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: Annotated[str, Field(max_length=10_000)] | None = None
    tokenizer_config: Annotated[str, Field(max_length=100_000)] = "{}"


def open_prompt_cache(path: Path, model: str) -> tuple[list[Any], dict[str, Any]]:
    """A prompt cache for the model of that name, and the settings of the tokenizer that it was made with.

    Raises:
        UsageError: the file is no prompt cache, or was made with another model.
    """
    where = f"--prompt-cache-file {path}"
    try:
        read_header(path)
        _check_numbers(path)
        cache, about = load_prompt_cache(str(path), return_metadata=True)
        said = _About.model_validate(about or {})
        settings = Settings.model_validate_json(said.tokenizer_config)
        _check(cache)
    except CheckpointError as e:
        raise UsageError(f"--prompt-cache-file {e}") from e
    except ValidationError as e:
        raise UsageError(f"{where}: {first_fault(e)}; make it again with mlx_lm.cache_prompt") from e
    except Exception as e:  # mlx-lm looks at nothing before it uses it
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise UsageError(f"{where}: no prompt cache of mlx_lm.cache_prompt ({why})") from e
    if said.model is not None and said.model != model:
        raise UsageError(f"--prompt-cache-file: made with {said.model[:200]}, not with {model}")
    return cache, settings.model_dump(exclude_none=True)


def _check_numbers(file: Path) -> None:
    """Refuse names that would be places of a list longer than there are names: MLX fills it up, whatever it takes."""
    found: Any = mx.load(str(file), return_metadata=True)
    names = [*found[0], *found[1]]
    for name in names:
        for part in name.split("."):
            if part.isdigit() and int(part) > len(names):
                raise ValueError(f"it names part {part[:20]}, and has {len(names)}")


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for c in caches:
        yield from _flat(c.caches) if isinstance(c, CacheList) else [c]


def _check(caches: Sequence[Any]) -> None:
    if not caches:
        raise ValueError("it holds nothing")
    for c in _flat(caches):
        if not isinstance(c, BaseCache):
            raise TypeError(f"{type(c).__name__} is no cache")
        for name in ("offset", "_idx", "keep", "max_size", "start_position", "chunk_size", "bits", "group_size"):
            value = getattr(c, name, 0)
            if type(value) is not int or not 0 <= value <= _MOST:
                raise ValueError(f"{name} is {str(value)[:40]}")
        if isinstance(c, KVCache | QuantizedKVCache):
            keys = c.keys[0] if isinstance(c.keys, list | tuple) else c.keys
            if not isinstance(keys, mx.array) or keys.ndim != 4 or keys.shape[0] != 1 or keys.shape[2] < c.offset:
                raise ValueError(f"keys do not hold the {c.offset} tokens that they should")
