"""What tells one model's files from another's of the same names, sizes and times: a digest of blocks all over them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CheckpointError
from ..machine.small_files import CONFIG_BYTES, read_small
from .checkpoint import ADAPTER, ADAPTER_CONFIG, Checkpoint, header_bytes, read_header, read_object

BLOCK = 4096
"""Bytes that are read of a place."""

MOST_BLOCKS = 2048
"""Places in all files of a model together, beside the begin and the end of each: at most 8 MiB."""

VERSION = b"outcore identity 2\n"
"""Goes into every identity. The first kind had names, sizes and times only; copies made under it are not used."""

Place = tuple[int, int]
"""A tensor's offset and its bytes."""


def identity_of(checkpoint: Checkpoint) -> str:
    """32 hex digits over config.json, the model's own code, and each weight file's name, size, time, header and a block
    of each tensor: as they were when it was opened. A packed copy, which has its original's, fits as long as this is
    equal. The folder's own name is not part of it.

    Raises:
        CheckpointError: a file cannot be read, or was written to since.
    """
    if "identity" not in checkpoint.notes:
        config, about = read_object(checkpoint.folder / "config.json", CONFIG_BYTES)
        places: dict[Path, list[Place]] = {file: [] for file in checkpoint.files}
        for tensor in checkpoint.tensors.values():
            places[tensor.file].append((tensor.offset, tensor.nbytes))
        found = _digest(config + code_print(checkpoint.folder, about), places)
        checkpoint.check()
        checkpoint.notes["identity"] = found
    return checkpoint.notes["identity"]


def _digest(config: bytes, files: Mapping[Path, Sequence[Place]]) -> str:
    """Over a model's configuration and, of each file, what is known of it and a block of each tensor.

    So another model is told apart if any one of its tensors differs as a whole, as after training; a few bytes that
    were changed in place while size and time were kept are not. Of more than ``MOST_BLOCKS`` tensors every n-th is
    looked at. With nothing in the page cache 4 ms for 291 tensors of 4.2 GB, 21 ms for 2,000 and 27 ms for 20,000 of
    4 GB (virtual NVMe disk); 1, 6 and 10 ms after that.

    Args:
        config: bytes of config.json, and what tells the model's own code apart: they decide what the weights mean.
        files: the places of each one's tensors.

    Raises:
        CheckpointError: a file cannot be read, or became shorter.
    """
    digest = xxhash.xxh3_128(VERSION)

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)

    add(config)
    every = max(1, -(-sum(map(len, files.values())) // MOST_BLOCKS))
    for path, places in files.items():
        raw, status = header_bytes(path)
        about = json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode()
        add(about + len(raw).to_bytes(8, "little") + raw)
        found = sorted((offset, nbytes) for offset, nbytes in places if nbytes)
        blocks = {block_of(offset, nbytes) for offset, nbytes in found[::every]}
        if found:  # the first and the last of all, too
            (first, size), (last, nbytes) = found[0], found[-1]
            blocks |= {(first, min(size, BLOCK)), (max(last, last + nbytes - BLOCK), min(nbytes, BLOCK))}
        for data in read_blocks(path, sorted(blocks)):
            add(data)
    return digest.hexdigest()


def block_of(offset: int, nbytes: int) -> Place:
    """One block of a tensor, at a place that only its own decides: begins and ends are often padding."""
    room = nbytes - BLOCK
    if room <= 0:
        return offset, nbytes
    at = offset + xxhash.xxh64_intdigest(f"{offset} {nbytes}".encode()) % (room + 1)
    return max(offset, at - at % BLOCK), BLOCK  # one page of the file instead of two


def read_blocks(path: Path, blocks: Sequence[Place]) -> Iterable[bytes]:
    """The bytes of these places of a file.

    Raises:
        CheckpointError: it cannot be read, or became shorter.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            if hasattr(os, "posix_fadvise"):
                # All at once, and nothing around them: a disk takes no longer for a hundred than for a few.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                for offset, nbytes in blocks:
                    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
            for offset, nbytes in blocks:
                data = os.pread(fd, nbytes, offset)
                if len(data) != nbytes:
                    raise OSError(errno.EIO, "it became shorter while it was read")
                yield data
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def code_print(folder: Path, config: Mapping[str, Any]) -> bytes:
    """Names and digests of all Python files of a folder whose model has code of its own (``model_file``), which may
    import any of them, from linked folders too; empty where it has none.

    Raises:
        CheckpointError: one cannot be read.
    """
    if config.get("model_file") is None:
        return b""
    digest, found, seen = xxhash.xxh3_128(), list[Path](), set[str]()
    for here, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # a link to what was looked through
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found += [path for name in files if name.endswith(".py") and (path := Path(here, name)).exists()]
    for path in sorted(found):
        try:
            code = read_small(path, CONFIG_BYTES)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        digest.update(json.dumps([path.relative_to(folder).as_posix(), code.hex()]).encode())
    return digest.hexdigest().encode()


def identity_of_adapter(folder: Path) -> str:
    """32 hex digits over an adapter's configuration and weights, as ``identity_of`` is over a model's.

    Raises:
        MissingFileError, HeaderError, CheckpointError: they are not there, or damaged.
    """
    config, _ = read_object(folder / ADAPTER_CONFIG, CONFIG_BYTES)
    path = folder / ADAPTER
    return _digest(config, {path: [(t.offset, t.nbytes) for t in read_header(path).values()]})
