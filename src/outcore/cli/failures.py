"""How a command that fails ends: one line on standard error, a status, and with ``--json`` one line of JSON.

``OUTCORE_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..errors import OutcoreError, UsageError, no_mlx
from ..text import one_line, printable

DEBUG = "OUTCORE_DEBUG"

_STREAM_IS_GONE = {errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EBADF}


def open_streams() -> None:
    """Standard streams that anything can be written to: those that were closed lead nowhere, and what the others'
    encoding does not have is written as escapes."""
    # Python leaves out what was closed when it began.
    sys.stdin = sys.stdin or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115  # open for as long as it runs
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def tell(line: str) -> None:
    """One line on standard error, if it takes any. Names may hold what would move a terminal's cursor."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except OSError:
        _lead_nowhere(sys.stderr)


def failed(name: str, args: Sequence[str], error: BaseException) -> int:
    """Tell of an error that ended a command; its exit status.

    Args:
        name: of the command, as it was called.
    """
    if os.environ.get(DEBUG, "") not in ("", "0"):
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has seen enough.
        _lead_nowhere(sys.stdout)
        return 1
    if isinstance(error, OSError) and error.errno in _STREAM_IS_GONE and error.filename is None:
        # Files that are written to say so in words of their own; what is left are the standard streams.
        _lead_nowhere(sys.stdout)
        tell(f"{name}: the output cannot be written: {error.strerror}")
        return 1
    tell(f"{name}: {_line(error)}")
    status = 2 if isinstance(error, UsageError) else 1
    return _json(name, args, {"error": _line(error), "type": type(error).__name__, "exit_status": status}, status)


def ended(name: str, args: Sequence[str], stop: SystemExit) -> int:
    """The status of a command that argparse ended, when what it said is written."""
    status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    if isinstance(stop.code, str):
        tell(stop.code)
    if status:
        return _json(name, args, {"error": "wrong usage", "type": "UsageError", "exit_status": status}, status)
    try:
        sys.stdout.flush()
    except OSError as e:
        return failed(name, args, e)
    return status


def _line(error: BaseException) -> str:
    """What went wrong, and what to do."""
    if isinstance(error, OutcoreError):
        # Written by us; parts of it may be names that are not.
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "there is no memory left; give less --memory, or end other programs"
    if isinstance(error, ImportError) and (advice := no_mlx(error)) is not None:
        return advice
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or one_line(error)}"
    what = f"{type(error).__name__}: {one_line(error)}"
    return f"{what}; this was not foreseen: please report it with what {DEBUG}=1 adds"


def _json(name: str, args: Sequence[str], record: dict[str, object], status: int) -> int:
    """What a program reads that asked for JSON: the last line says what went wrong."""
    if "--json" not in args:
        return status
    try:
        print(json.dumps(record), flush=True)
    except OSError as e:
        _lead_nowhere(sys.stdout)
        tell(f"{name}: the output cannot be written: {e.strerror}")
        return status
    return status


def _lead_nowhere(stream: TextIO) -> None:
    """Python writes what it still holds when it ends, and would complain once more."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
