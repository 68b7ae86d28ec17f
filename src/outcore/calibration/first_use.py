"""Checks a machine once, before its first model: are reads at odd offsets of the model's file correct, and does the
device see new bytes in a slot?

A machine that fails would give wrong answers without an error, so nothing is loaded. The cache records a success.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from ..disk.disk_probe import unseen_rewrites, wrong_reads
from ..errors import StoreError, UnsupportedModelError
from ..machine.cache_folder import cache_dir, keep_mark
from .calibration_file import key_of

FOLDER, VERSION = "checked", 1
REWRITES = 10

ADVICE = "outcore doctor says more; please report what it prints"


def check_machine(files: Sequence[Path], io: str = "auto", unchanged: Callable[[], object] = lambda: None) -> None:
    """Checks the machine, unless it has passed with this version of MLX, device, disk and system.

    Args:
        files: the model's weight files; the first is read.
        io: how they will be read (``FileReader``).
        unchanged: raises an error if the files were modified.

    Raises:
        UnsupportedModelError: streamed weights would be wrong on this machine.
        ReadError, UsageError: the file cannot be read, or not with ``io``.
    """
    if not files:
        return
    known = mark(files[0], io)
    with contextlib.suppress(OSError):
        if known is not None and known.exists():
            return
    if wrong := wrong_reads(files[0], io):
        # The two reads also differ if another process writes between them; that is not the machine's fault.
        unchanged()
        wrong = wrong_reads(files[0], io)
        unchanged()
    if wrong:
        offset, _, way = wrong[0]
        raise UnsupportedModelError(
            f"{files[0]}: {way} reads return wrong bytes from byte {offset} on, so weights would be wrong: nothing is "
            f"loaded; {ADVICE}"
        )
    if unseen := unseen_rewrites(REWRITES):
        raise UnsupportedModelError(
            f"this device does not see what is written into MLX's memory ({unseen} of {REWRITES} times), so weights "
            f"would be wrong: nothing is loaded; {ADVICE}"
        )
    keep_mark(known)


def mark(file: Path, io: str) -> Path | None:
    """Returns the file whose existence records a passed check; None if none can be stored."""
    try:
        # The Hub's folders have links to files that may be on another disk.
        key = {**key_of(file.resolve().parent, 1), "system": platform.release(), "io": io, "check": VERSION}
        return cache_dir() / FOLDER / xxhash.xxh64_hexdigest(repr(sorted(key.items())).encode())
    except (OSError, StoreError):
        return None
