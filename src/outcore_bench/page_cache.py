"""The system's page cache, made cold for a measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.disk import disk_calls


def drop_page_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to forget what it has cached of these files; pages that are mapped or not yet written stay."""
    calls = disk_calls.system()
    for path in files:
        fd = calls.open(path)
        try:
            calls.fsync(fd)
            calls.forget(fd, 0, path.stat().st_size)
        finally:
            calls.close(fd)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that a model's weights are in, of a packed copy or one rank's folder too.

    Raises:
        CheckpointError, StoreError: they are not there, or damaged.
    """
    if is_packed(folder):
        return tuple(folder / name for name in sorted(read_manifest(folder / MANIFEST).files))
    return open_checkpoint(folder).files
