"""Empties the system's page cache before a measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.disk import disk_calls


def drop_page_cache(files: Iterable[Path]) -> None:
    """Drops files from the page cache, except pages that are mapped."""
    calls = disk_calls.system()
    for path in files:
        fd = calls.open(path)
        try:
            calls.fsync(fd)
            calls.forget(fd, 0, path.stat().st_size)
        finally:
            calls.close(fd)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a model's weights, also of a packed copy."""
    if is_packed(folder):
        return tuple(folder / name for name in sorted(read_manifest(folder / MANIFEST).files))
    return open_checkpoint(folder).files
