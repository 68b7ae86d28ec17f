"""Pieces of the user's text, which the model continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outcore.errors import UsageError
from outcore.text import printable

# Bytes that surely have a token each, and how often pieces are drawn anew where text was too short.
BYTES, TRIES = 12, 50


def text_files(paths: Iterable[Path]) -> list[Path]:
    """Returns the files and, of folders, all files below them that hold text, in the order of their names.

    Raises:
        UsageError: a path is missing, or there is no text.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
        elif path.is_file():
            if not _is_text(path):
                raise UsageError(f"--input {printable(str(path))}: no text (UTF-8) in it")
            found.append(path)
        else:
            raise UsageError(f"--input {printable(str(path))}: no such file or folder")
    if not found:
        raise UsageError("--input: no text files there")
    return found


def _is_text(file: Path) -> bool:
    with file.open("rb") as f:
        start = f.read(4096)
    try:
        start[:-4].decode()
    except UnicodeDecodeError:
        return False
    return bool(start) and b"\0" not in start


def pieces(tokenizer: Any, files: Sequence[Path], count: int, tokens: int, seed: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns int32 (count, tokens): pieces that begin at random places of the texts, long texts more often.

    Only what is drawn is read and tokenized. A place where too little text follows gives none; others are drawn.

    Raises:
        UsageError: the files have too little text for a piece.
    """
    draw = np.random.default_rng(seed)
    sizes = np.array([file.stat().st_size for file in files], float)
    made: list[list[int]] = []
    for _ in range(TRIES):
        drawn = draw.choice(len(files), count - len(made), p=sizes / sizes.sum())
        texts = [_text_at(files[n], int(draw.random() * max(1.0, sizes[n] - tokens)), tokens) for n in drawn]
        found = tokenizer(texts, add_special_tokens=False)["input_ids"]
        made += [ids[1 : tokens + 1] for ids in found if len(ids) > tokens + 1]
        if len(made) == count:
            return np.array(made, np.int32)
    raise UsageError(f"--input: too little text; a piece has {tokens} tokens, and longer files are needed")


def _text_at(file: Path, at: int, tokens: int) -> str:
    with file.open("rb") as f:
        f.seek(at)
        return f.read(BYTES * tokens).decode(errors="ignore")
