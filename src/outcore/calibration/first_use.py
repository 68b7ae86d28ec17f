"""The first model that a machine loads: two checks, of milliseconds, that a wrong one would fail.

Bytes at odd offsets of the model's own file, read as its weights are, and a slot that is rewritten. A machine that
fails would answer nonsense without an error; so nothing is loaded. That it passed is kept in the cache folder.
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
    """Look at the machine, unless it was found to be well with this version of MLX, this device, disk and system.

    Args:
        files: of the model; the first is looked at.
        io: how they will be read.
        unchanged: raises what is to be said if somebody writes to the files.

    Raises:
        UnsupportedModelError: what is streamed would be wrong here.
        ReadError, UsageError: the file cannot be read, or not so.
    """
    if not files:
        return
    known = mark(files[0], io)
    with contextlib.suppress(OSError):
        if known is not None and known.exists():
            return
    if wrong := wrong_reads(files[0], io):
        # Two reads differ, too, if somebody writes in between: that is no fault of the machine's.
        unchanged()
        wrong = wrong_reads(files[0], io)
        unchanged()
    if wrong:
        offset, _, way = wrong[0]
        raise UnsupportedModelError(
            f"{files[0]}: bytes from {offset} on came wrong ({way} reads), and so would weights: nothing is loaded; "
            + ADVICE
        )
    if unseen := unseen_rewrites(REWRITES):
        raise UnsupportedModelError(
            f"this device does not see what is written into MLX's memory ({unseen} of {REWRITES} times), so weights "
            f"would be wrong: nothing is loaded; {ADVICE}"
        )
    keep_mark(known)


def mark(file: Path, io: str) -> Path | None:
    """The file that is there once a machine was found to be well; None where none can be kept."""
    try:
        # Hub folders hold links to files elsewhere.
        key = {**key_of(file.resolve().parent, 1), "system": platform.release(), "io": io, "check": VERSION}
        return cache_dir() / FOLDER / xxhash.xxh64_hexdigest(repr(sorted(key.items())).encode())
    except (OSError, StoreError):
        return None
