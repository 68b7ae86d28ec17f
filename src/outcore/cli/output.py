"""Where a command's words go, and how it ends: its answer to standard output, all else to standard error.

With ``--json`` one line of JSON is all that standard output holds, so that programs read it as it is; what went wrong
is in it, too. With ``--quiet`` nothing but the answer or the JSON is written, and what went wrong. ``OUTCORE_DEBUG=1``
adds the traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from ..checks import choice
from ..errors import OutcoreError, UsageError, no_mlx
from ..text import one_line, printable, unmoved
from .parser import LOG_LEVELS

DEBUG = "OUTCORE_DEBUG"

_STREAM_IS_GONE = {errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EBADF}


class Result:
    """What a command found, for programs: one document, written when the command ends, however it does.

    Args:
        stream: standard output, as it was when the command began.
        wanted: whether JSON was asked for.
    """

    def __init__(self, stream: TextIO, wanted: bool) -> None:
        self.record: dict[str, Any] = {}
        self.wanted = wanted
        self._stream = stream

    def line(self, record: dict[str, Any]) -> None:
        """One document of many, told at once. There is none at the end then."""
        self.wanted = False
        print(json.dumps(_finite(record), allow_nan=False), file=self._stream, flush=True)

    def write(self) -> None:
        if self.wanted:
            self.line(self.record)


def _finite(value: Any) -> Any:
    """With null in place of numbers that JSON has no words for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    return [_finite(inside) for inside in value] if isinstance(value, list | tuple) else value


def say(text: str) -> None:
    """More of an answer, on standard output: as it is, but for a terminal, which is to show what a model says and obey
    none of it."""
    print(unmoved(text) if sys.stdout.isatty() else text, end="", flush=True)


def tell(line: str) -> None:
    """One line on standard error, if it takes any. Names may hold what would move a terminal's cursor."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except OSError:
        _lead_nowhere(sys.stderr)


def spinner(what: str) -> AbstractContextManager[object]:
    """Shows on standard error that something is being done, until the block ends; silent where that is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return nullcontext()
    from .console import PlainConsole

    return PlainConsole(stderr=True).status(what)


def failed(name: str, error: BaseException, result: Result) -> int:
    """Tell of what ended a command, programs that asked for JSON too; its exit status.

    Args:
        name: of the command, as it was called.
        result: what it had found until then, which is told with the error.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted and os.environ.get(DEBUG, "") not in ("", "0"):
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno in _STREAM_IS_GONE and error.filename is None:
        # Files that are written to say so in words of their own; what is left are the standard streams. Whoever read
        # a pipe has seen enough.
        return _unwritten(name, error, quiet=isinstance(error, BrokenPipeError))
    said = "interrupted" if interrupted else _line(error)
    status = 130 if interrupted else 2 if isinstance(error, UsageError) else 1
    if interrupted:
        tell("")  # a terminal shows ^C where the line stood
    tell(f"{name}: {said}")
    result.record |= {"error": said, "type": type(error).__name__, "exit_status": status}
    try:
        result.write()
    except OSError as e:
        _unwritten(name, e)
    return status


def _unwritten(name: str, error: OSError, quiet: bool = False) -> int:
    _lead_nowhere(sys.stdout)
    if not quiet:
        tell(f"{name}: the output cannot be written: {error.strerror}")
    return 1


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


class Nowhere(io.TextIOBase):
    """A stream that what is written to is gone. It cannot be closed by those who keep it: loggers do."""

    def write(self, text: str) -> int:
        return len(text)

    def close(self) -> None:
        pass


def open_streams() -> None:
    """Standard streams that anything can be written to: those that were closed lead nowhere, and what the others'
    encoding does not have is written as escapes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed when Python began
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # as long as it runs
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def streams(as_json: bool, quiet: bool, stderr: TextIO) -> Iterator[None]:
    """What is printed meanwhile goes where it belongs; what mlx-lm and others print, too."""
    told: Any = Nowhere() if quiet else stderr
    with redirect_stderr(told), redirect_stdout(told) if as_json else nullcontext():
        yield


def log_from(level: str | None) -> None:
    """``--log-level``; without it, warnings are told as they are."""
    if level is None:
        return
    name = choice("--log-level", level.upper() if level.isascii() else level, LOG_LEVELS)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(name)
    logging.captureWarnings(True)
    # transformers sets its logger up by itself, when it is imported; in the processes of outcore bench, too.
    os.environ["TRANSFORMERS_VERBOSITY"] = name.lower()


def _lead_nowhere(stream: TextIO) -> None:
    """Python writes what it still holds when it ends, and would complain once more."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
