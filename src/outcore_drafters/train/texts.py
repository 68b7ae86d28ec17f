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

# Of all text, one in so many blocks of bytes is held out: no piece to train on begins in it or reaches into it.
HELD_OUT, BLOCK = 20, 1 << 14


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


def pieces(
    tokenizer: Any, files: Sequence[Path], count: int, tokens: int, seed: Sequence[int], *, held_out: bool
) -> np.ndarray[Any, Any]:
    """Returns int32 (count, tokens): pieces that begin at random places of the texts, long texts more often.

    Only what is drawn is read and tokenized. A place where too little text follows gives none; others are drawn.

    Args:
        held_out: draw from the blocks that are held out, of which other pieces have nothing. Of texts that have fewer
            than ``HELD_OUT`` blocks together, all pieces are drawn from everywhere.

    Raises:
        UsageError: the files have too little text for a piece.
    """
    draw = np.random.default_rng(seed)
    starts = np.cumsum([0, *(file.stat().st_size for file in files)])
    made: list[list[int]] = []
    for _ in range(TRIES):
        places = _places(draw, int(starts[-1]), count - len(made), BYTES * tokens, held_out)
        drawn = np.searchsorted(starts, places, side="right") - 1
        texts = [_text_at(files[n], int(at - starts[n]), tokens) for n, at in zip(drawn, places, strict=True)]
        found = tokenizer(texts, add_special_tokens=False)["input_ids"]
        made += [ids[1 : tokens + 1] for ids in found if len(ids) > tokens + 1]
        if len(made) == count:
            return np.array(made, np.int32)
    raise UsageError(f"--input: too little text; a piece has {tokens} tokens, and longer files are needed")


def _places(draw: np.random.Generator, size: int, count: int, piece: int, held_out: bool) -> np.ndarray[Any, Any]:
    """Returns random places (count,) in ``size`` bytes from which ``piece`` bytes lie in blocks that are held out, or
    in others."""
    cycles, rest = divmod(size, HELD_OUT * BLOCK)
    if not cycles or piece >= BLOCK:
        return draw.integers(0, size, count)
    first, length = ((HELD_OUT - 1) * BLOCK, BLOCK) if held_out else (0, (HELD_OUT - 1) * BLOCK)
    each = length - piece
    last = max(0, min(rest - first, length) - piece)  # places in the cycle that the text ends in
    cycle, at = np.divmod(draw.integers(0, cycles * each + last, count), each)
    return cycle * HELD_OUT * BLOCK + first + at


def _text_at(file: Path, at: int, tokens: int) -> str:
    with file.open("rb") as f:
        f.seek(at)
        return f.read(BYTES * tokens).decode(errors="ignore")
