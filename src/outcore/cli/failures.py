"""How a command that fails ends: one line on standard error, a status, and with ``--json`` what went wrong in
the JSON.

``OUTCORE_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import TextIO

from ..errors import OutcoreError, UsageError, no_mlx
from ..text import one_line, printable
from .output import Result

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


def failed(name: str, error: BaseException, result: Result) -> int:
    """Tell of an error that ended a command; its exit status.

    Args:
        name: of the command, as it was called.
        result: what it had found until then, which is told with the error.
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
    return told(name, result, _line(error), type(error).__name__, status)


def helped(name: str, result: Result) -> int:
    """The status of a command whose help argparse has printed, when it is written."""
    try:
        sys.stdout.flush()
    except OSError as e:
        return failed(name, e, result)
    return 0


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


def told(name: str, result: Result, error: str, kind: str, status: int) -> int:
    """Let programs that asked for JSON know what went wrong, too; the exit status."""
    result.record |= {"error": error, "type": kind, "exit_status": status}
    try:
        result.write()
    except OSError as e:
        _lead_nowhere(sys.stdout)
        tell(f"{name}: the output cannot be written: {e.strerror}")
    return status


def _lead_nowhere(stream: TextIO) -> None:
    """Python writes what it still holds when it ends, and would complain once more."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
