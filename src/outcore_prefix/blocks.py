"""Files of arrays, named by what the arrays were computed from. Written atomically; read only if every byte is intact.

A file has a magic number, the length and a checksum of its head, the head as JSON, the bytes of the arrays one after
the other, and a checksum of these bytes. There is no index: a file exists or it does not. A damaged, truncated or
misnamed file counts as missing and is removed.
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
from outcore.machine.written import wrote

MAGIC, SCHEMA = b"OUTCTX1\n", 1
# The longest head that is read.
HEAD_BYTES = 16_000_000

# Bytes that must be free on the disk for anything to be written.
LEAST_FREE = 10_000_000_000

# The most bytes of all files together; a tenth of the free disk space if that is less.
MOST = 20_000_000_000

# When files are dropped, this fraction of the limit remains, so that not every answer has to look for the oldest.
KEPT = 0.9

FOLDER, LOCK = "prefix", "lock"

_NAMES = {str(dtype): dtype for dtype in {*DTYPES.values(), mx.int64, mx.uint64, mx.bool_}}


@dataclass(frozen=True)
class Block:
    arrays: dict[str, mx.array]
    notes: dict[str, str]


class BlockFiles:
    """The files of one model, in their own folder in the cache.

    Args:
        name: of the folder.
        most: the most bytes of all models' files together; None: ``MOST``, or less if the disk has less room.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._all = make_cache() / FOLDER
        self.folder = self._all / name
        self._most = most
        self._partial = 0

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def write(self, name: str, arrays: Mapping[str, mx.array], notes: Mapping[str, str] | None = None) -> bool:
        """Stores arrays. Returns False if there is no room or they cannot be written."""
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
                            wrote("prompts", len(part))
                    out.write(digest.digest())
                partial.rename(self.folder / name)
            finally:
                partial.unlink(missing_ok=True)
        except (OSError, StoreError):
            # The disk is full, the folder is read-only, or memory is short: the prompt is not stored.
            return False
        return True

    def read(self, name: str) -> Block | None:
        """Returns the block of that name; None: there is none, or it is damaged."""
        path = self.folder / name
        try:
            return _read(path, name)
        except OSError:  # missing or unreadable
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.remove(name)
            return None

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes may be written once older files are dropped."""
        try:
            for folder in (self._all, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            return shutil.disk_usage(self._all).free >= LEAST_FREE and nbytes <= self._limit()
        except OSError:
            return False

    def touch(self, names: Sequence[str]) -> None:
        """Marks files as used, the last one most recently: ``drop`` removes the least recently used first."""
        now = time.time()
        for n, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self.folder / name, (now + n * 1e-6, now + n * 1e-6))

    def drop(self, room: int = 0) -> None:
        """Removes the least recently used files of all models until ``room`` more bytes fit into the limit. Returns at
        once if another process is doing this."""
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
        return min(MOST, shutil.disk_usage(self._all).free // 10) if self._most is None else self._most


def _files(folder: Path) -> Iterator[tuple[Path, float, int]]:
    """Yields each file that can be dropped: path, time of last use, bytes."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = (Path(parent) / name).lstat()
                if name != LOCK:
                    # Partial files, too: one that is being written is new; an interrupted one becomes old.
                    yield Path(parent, name), found.st_mtime, found.st_size


def _read(path: Path, name: str) -> Block:
    """Reads a block from a file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the file is damaged or has another name.
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
        text = file.read(length)
        if xxhash.xxh3_64_digest(text) != start[12:]:
            raise ValueError("the head is damaged")
        head = json.loads(text)
        places = [(a["name"], _NAMES[a["dtype"]], a["shape"]) for a in head["arrays"]]
        sizes = [math.prod(shape) * dtype.size for _, dtype, shape in places]
        whole = len(start) + length + sum(sizes) + 8
        if head["schema"] != SCHEMA or head["name"] != name or state.st_size != whole:
            raise ValueError("of another version, name or size")
        # One page-aligned buffer, never larger than the file.
        data = np.empty(sum(sizes), np.uint8)
        if file.readinto(data.data) != len(data) or file.read(9) != xxhash.xxh3_64_digest(data.data):
            raise ValueError("the arrays are damaged")
    arrays, at = {}, 0
    for (each, dtype, shape), size in zip(places, sizes, strict=True):
        # MLX cannot view zero bytes.
        arrays[each] = mx.array(data[at : at + size]).view(dtype).reshape(shape) if size else mx.zeros(shape, dtype)
        at += size
    mx.eval(arrays)
    return Block(arrays, head["notes"])
