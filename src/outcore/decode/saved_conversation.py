"""Saves conversations to files, as text and token ids, so that a chat can go on as if it had never ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checkpoint.manifest import first_fault
from ..errors import UsageError
from ..machine.small_files import INDEX_BYTES, parse_json, read_small
from ..text import shortened

FORMAT = "outcore-conversation"


class SavedTurn(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    message: str
    answer: str


class Saved(BaseModel):
    """A saved conversation.

    Attributes:
        model: the model's name when the conversation was saved.
        text: the decoded ``tokens``: readable, and different if another tokenizer decodes them.
        tokens: ids of the whole conversation, with what the chat template adds.
        random: MLX's random state when it was saved.
        held: how many of the tokens the caches held.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    format: Literal["outcore-conversation"]
    schema_number: Annotated[Literal[1], Field(alias="schema")]
    model: str
    turns: list[SavedTurn]
    text: str
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
    random: Annotated[int, Field(ge=0, lt=2**64)]
    held: Annotated[int, Field(ge=0, lt=2**31)] = 0


def _expanded(path: Path) -> Path:
    """Returns the path with ``~`` replaced by the home folder. Raises ``UsageError`` if that is impossible."""
    try:
        path = path.expanduser()
        path.exists()
    except (RuntimeError, ValueError) as e:
        raise UsageError(f"{shortened(str(path))}: {e}") from e
    return path


def save(path: Path, **fields: Any) -> None:
    """Writes a conversation atomically, readable by this user only; ``fields`` are those of ``Saved``.

    Raises:
        UsageError: the file exists and is not a conversation, or cannot be written.
    """
    saved = Saved.model_validate({"format": FORMAT, "schema": 1, **fields})
    path = Path(os.path.realpath(_expanded(path)))
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    try:
        if path.exists() and not _is_conversation(path):
            raise UsageError(f"{path}: exists and is not a saved conversation; give another name")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as out:
                out.write(json.dumps(saved.model_dump(by_alias=True), indent=1))
                out.flush()
                os.fsync(fd)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"{path}: cannot be written ({e.strerror})") from e


def load(path: Path, tokenizer: TokenizerWrapper, vocabulary: int | None) -> Saved:
    """Reads a conversation that was saved with the same tokenizer.

    Args:
        vocabulary: tokens that the model has embeddings for; None: unknown.

    Raises:
        UsageError: the file is not a conversation, or one with another model.
    """
    path = _expanded(path)
    try:
        found = Saved.model_validate(parse_json(read_small(path, INDEX_BYTES)))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror})") from e
    except ValidationError as e:
        raise UsageError(f"{path}: no conversation that outcore chat saved ({first_fault(e)})") from e
    except ValueError as e:
        raise UsageError(f"{path}: no conversation that outcore chat saved (not JSON)") from e
    beyond = vocabulary is not None and max(found.tokens, default=0) >= vocabulary
    if beyond or tokenizer.decode(found.tokens) != found.text:
        raise UsageError(f"{path}: saved with {found.model[:200]}, whose tokens are not this model's")
    found.held = min(found.held, len(found.tokens))
    return found


def _is_conversation(path: Path) -> bool:
    try:
        found = parse_json(read_small(path, INDEX_BYTES))
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT
