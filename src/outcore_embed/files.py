"""Files of texts and of vectors. A file of vectors is whole after each reading of the weights, so a run can go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from outcore.checks import not_endless
from outcore.errors import OutputError, UsageError
from outcore.text import half_character, one_line

# Bytes of a .npy file before its numbers: the header is written anew after each reading.
HEADER = 128

FIRST = b"\x93NUMPY\x01\x00"


@dataclass(frozen=True)
class Text:
    """A line of the input. ``id``: what a JSON line calls itself; None: nothing."""

    text: str
    id: str | None = None


def read_texts(path: Path) -> list[Text]:
    """Reads texts, without blank lines; - is standard input.

    Raises:
        UsageError: the file cannot be read, or a line is no text.
    """
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read()
        else:
            with not_endless("--input", path).open("rb") as file:
                raw = file.read()
    except OSError as e:
        raise UsageError(f"--input {path}: cannot be read: {e.strerror or e}") from e
    lines = [(n, line) for n, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").splitlines(), 1) if line.strip()]
    objects = bool(lines) and lines[0][1].lstrip().startswith(b"{")
    return [_text(line, objects, f"--input {path}, line {n}") for n, line in lines]


def _text(line: bytes, objects: bool, where: str) -> Text:
    try:
        text: Any = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not UTF-8 text") from None
    if not objects:
        return Text(text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{where}: not JSON, as the first line is: {one_line(e)}") from None
    found = found if isinstance(found, dict) else {}
    body = found["body"] if isinstance(found.get("body"), dict) else found
    text = next((body[name] for name in ("text", "input") if name in body), None)
    if not isinstance(text, str) or not text.strip() or half_character(text) is not None:
        raise UsageError(f'{where}: a JSON object with "text" or "input", a string that is not empty, is needed')
    named = found.get("custom_id", found.get("id"))
    return Text(text, None if named is None else str(named))


@dataclass
class VectorFile:
    """An output file. What it holds stays until ``begin``.

    Args:
        made_of: what the vectors depend on; a run goes on only with the same.

    Attributes:
        done: how many texts' vectors it holds.

    Raises:
        UsageError: it exists, cannot be written, or was made of something else.
    """

    path: Path
    made_of: Sequence[Any]
    total: int
    resume: bool = False
    overwrite: bool = False
    done: int = 0
    width: int = 0
    _file: BinaryIO | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.array = self.path.suffix == ".npy"
        self._note = self.path.with_name(f".{self.path.name[:200]}.resume")
        digest = xxhash.xxh3_128_hexdigest(json.dumps(list(self.made_of)).encode())
        self._digest = f"{digest} {self.total}"
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"--output {self.path}: exists and is no file; name a file")
        there = self.path.exists() and self.path.stat().st_size > 0
        if there and not (self.resume or self.overwrite):
            raise UsageError(f"--output {self.path}: exists already; --resume continues it, --overwrite replaces it")
        if there and not self.overwrite:
            noted = self._note.read_text() if self._note.is_file() else ""
            if noted.strip() != self._digest:
                raise UsageError(
                    f"--output {self.path}: is not the unfinished output of these texts, this model and these flags; "
                    "--overwrite replaces it"
                )
            self._look()

    def _look(self) -> None:
        """Finds how far an unfinished file goes, and where its last whole vector ends."""
        self._end = 0
        with self.path.open("rb") as file:
            if self.array:
                with suppress(ValueError):
                    np.lib.format.read_magic(file)
                    (rows, self.width), _, _ = np.lib.format.read_array_header_1_0(file)
                    self.done = min(rows, (self.path.stat().st_size - HEADER) // (4 * self.width))
                    self._end = HEADER + self.done * 4 * self.width
                return
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.done, self._end = self.done + 1, self._end + len(line)

    def begin(self) -> None:
        """Opens the file behind what is done."""
        try:
            if not self.done:
                self.path.unlink(missing_ok=True)
            self._note.write_text(self._digest)
            self._file = self.path.open("r+b" if self.done else "w+b")
            if self.done:
                self._file.truncate(self._end)
            self._file.seek(0, os.SEEK_END)
        except OSError as e:
            raise UsageError(f"--output {self.path}: cannot be written: {e.strerror or e}") from e

    def write(self, records: Sequence[dict[str, Any]], vectors: Sequence[Any]) -> None:
        """Appends vectors and waits until they are on disk.

        Args:
            records: of a JSON line each, without its vector.

        Raises:
            OutputError: they cannot be written; earlier ones stay.
        """
        assert self._file is not None
        try:
            if self.array:
                self.width = self.width or vectors[0].shape[-1]
                if not self.done:
                    self._file.write(_header(0, self.width))
                self._file.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
                self._sync()
                self._file.seek(0)
                self._file.write(_header(self.done + len(vectors), self.width))
                self._file.seek(0, os.SEEK_END)
            else:
                self._file.write(b"".join(json_line(r, v) for r, v in zip(records, vectors, strict=True)))
            self._sync()
        except OSError as e:
            raise OutputError(
                f"{self.path}: cannot be written: {e.strerror or e}; its {self.done} vectors are kept: make room, and "
                "continue with --resume"
            ) from e
        self.done += len(vectors)

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Says that nothing is missing: the file cannot be resumed any more."""
        self._note.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> VectorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _header(rows: int, width: int) -> bytes:
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    return FIRST + (HEADER - 10).to_bytes(2, "little") + said.ljust(HEADER - 11).encode() + b"\n"


def json_line(record: dict[str, Any], vector: Any) -> bytes:
    """Returns a JSON line of a record and its vector, vectors or rating."""
    name = "relevance_score" if isinstance(vector, float) else "embedding" if vector.ndim == 1 else "embeddings"
    value = vector if isinstance(vector, float) else vector.tolist()
    return json.dumps(record | {name: value}, ensure_ascii=False).encode() + b"\n"
