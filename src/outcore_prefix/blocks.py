"""Arrays in files that are named by what they were computed from: written whole or not at all, and read only if every
byte is what was written.

A file: a magic number, the length of its head and a checksum of it; the head, as JSON; the arrays' bytes one after the
other, and a checksum of those. There is no index: a file is there or it is not. What is damaged, cut off or not of this
name counts as not there, and is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import xxhash

from outcore.checkpoint.lazy_model import DTYPES
from outcore.checkpoint.packed_bytes import array_bytes
from outcore.errors import StoreError
from outcore.machine.cache_folder import make_cache

MAGIC, SCHEMA = b"OUTCTX1\n", 1
HEAD_BYTES = 16_000_000
"""Of the longest head that is read."""

LEAST_FREE = 10_000_000_000
"""Bytes that have to be free on the disk for anything to be written."""

MOST = 20_000_000_000
"""Bytes that all files together take, or a tenth of what is free, if that is less."""

KEPT = 0.9
"""Of the limit, what is left after files were dropped: so not every answer looks for the oldest ones."""

FOLDER, LOCK = "prefix", "lock"

_NAMES = {str(dtype): dtype for dtype in {*DTYPES.values(), mx.int64, mx.uint64, mx.bool_}}


@dataclass(frozen=True)
class Block:
    """What a file holds; ``notes`` beside the arrays."""

    arrays: dict[str, mx.array]
    notes: dict[str, str]


class BlockFiles:
    """The files of one model, in a folder of their own below the cache's.

    Args:
        name: of the folder.
        most: bytes that all models' files together may take; None: ``MOST``, or what the disk has room for.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._all = make_cache() / FOLDER
        self.folder = self._all / name
        self._most = most
        self._partial = 0

    def has(self, name: str) -> bool:
        """Whether there is a file of that name, whatever it holds."""
        return (self.folder / name).is_file()

    def write(self, name: str, arrays: Mapping[str, mx.array], notes: Mapping[str, str] | None = None) -> bool:
        """Keep these; whether they are kept: not where there is no room for them, or they cannot be written."""
        held = [{"name": n, "dtype": str(a.dtype), "shape": list(a.shape)} for n, a in arrays.items()]
        head = json.dumps({"schema": SCHEMA, "name": name, "notes": dict(notes or {}), "arrays": held}).encode()
        if not self.has_room(sum(a.nbytes for a in arrays.values()) + len(head)):
            return False
        self._partial += 1
        partial = self.folder / f".{os.getpid()}.{id(self):x}.{self._partial}.partial"
        try:
            try:
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "wb") as out:
                    out.write(MAGIC + len(head).to_bytes(4, "little") + xxhash.xxh3_64_digest(head) + head)
                    digest = xxhash.xxh3_64()
                    for n, array in arrays.items():
                        for part in array_bytes(n, array):
                            digest.update(part)
                            out.write(part)
                    out.write(digest.digest())
                partial.rename(self.folder / name)
            finally:
                partial.unlink(missing_ok=True)
        except (OSError, StoreError):
            # A full disk, a folder that has become read-only, no memory: nothing is kept, and nothing else happens.
            return False
        return True

    def read(self, name: str) -> Block | None:
        """What was kept under that name; None: nothing, or it is not what was written."""
        path = self.folder / name
        try:
            return _read(path, name)
        except OSError:  # there is none, or nobody knows what is there
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.remove(name)
            return None

    def remove(self, name: str) -> None:
        """Nobody wants it any more."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may be written at all, whatever else has to go."""
        try:
            for folder in (self._all, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            return shutil.disk_usage(self._all).free >= LEAST_FREE and nbytes <= self._limit()
        except OSError:
            return False

    def touch(self, names: Sequence[str]) -> None:
        """These were used, the last one most: they are dropped later than others."""
        now = time.time()
        for n, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self.folder / name, (now + n * 1e-6, now + n * 1e-6))

    def drop(self, room: int = 0) -> None:
        """Remove the files that were not used for longest until there is room for so many bytes more within the limit,
        of all models. One process at a time; another one does nothing."""
        try:
            lock = os.open(self._all / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            limit = max(0, self._limit() - room)
            found = sorted(_files(self._all), key=lambda f: f[1])
            total = sum(size for _, _, size in found)
            if total <= limit:
                return
            for path, _, size in found:
                if total <= KEPT * limit:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
        except OSError:
            return
        finally:
            os.close(lock)

    def _limit(self) -> int:
        """Bytes that all files may take."""
        return min(MOST, shutil.disk_usage(self._all).free // 10) if self._most is None else self._most


def _files(folder: Path) -> Iterator[tuple[Path, float, int]]:
    """Each file that can be dropped: where, when it was last used, and bytes."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = (Path(parent) / name).lstat()
                if name != LOCK:
                    # Of one that is being written the time is now; of one that was broken off it is not.
                    yield Path(parent, name), found.st_mtime, found.st_size


def _read(path: Path, name: str) -> Block:
    """
    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not what was written under that name.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{path}: no file")
        start = file.read(len(MAGIC) + 12)
        length = int.from_bytes(start[8:12], "little")
        if len(start) < len(MAGIC) + 12 or start[:8] != MAGIC or length > HEAD_BYTES:
            raise ValueError("no head")
        said = file.read(length)
        if xxhash.xxh3_64_digest(said) != start[12:]:
            raise ValueError("the head is damaged")
        head = json.loads(said)
        places = [(a["name"], _NAMES[a["dtype"]], a["shape"]) for a in head["arrays"]]
        sizes = [math.prod(shape) * dtype.size for _, dtype, shape in places]
        whole = len(start) + length + sum(sizes) + 8
        if head["schema"] != SCHEMA or head["name"] != name or state.st_size != whole:
            raise ValueError("of another version, name or size")
        # Page-aligned, and never more than what the file has.
        data = np.empty(sum(sizes), np.uint8)
        if file.readinto(data.data) != len(data) or file.read(9) != xxhash.xxh3_64_digest(data.data):
            raise ValueError("the arrays are damaged")
    arrays, at = {}, 0
    for (each, dtype, shape), size in zip(places, sizes, strict=True):
        # MLX makes no view of no bytes.
        arrays[each] = mx.array(data[at : at + size]).view(dtype).reshape(shape) if size else mx.zeros(shape, dtype)
        at += size
    mx.eval(arrays)
    return Block(arrays, head["notes"])
