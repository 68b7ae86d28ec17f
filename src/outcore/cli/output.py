"""What a command prints, and how it fails: answers go to standard output, everything else to standard error.

With ``--json``, standard output holds one line of JSON, with the error if there was one. With ``--quiet``, standard
error holds errors only. ``OUTCORE_DEBUG=1`` adds the traceback.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from ..checks import choice
from ..errors import OutcoreError, UsageError, no_mlx
from ..text import one_line, printable, unmoved
from .commands import LOG_LEVELS

DEBUG = "OUTCORE_DEBUG"

_STREAM_IS_GONE = {errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EBADF}


class Result:
    """The command's JSON document, written when the command ends, also when it ends with an error.

    Args:
        stream: standard output, before it was redirected.
        wanted: whether ``--json`` was given.
    """

    def __init__(self, stream: TextIO, wanted: bool) -> None:
        self.record: dict[str, Any] = {}
        self.wanted = wanted
        self._stream = stream

    def line(self, record: dict[str, Any]) -> None:
        """Writes one of several documents immediately; then none is written when the command ends."""
        self.wanted = False
        print(json.dumps(_finite(record), allow_nan=False), file=self._stream, flush=True)

    def write(self) -> None:
        if self.wanted:
            self.line(self.record)


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    return [_finite(inside) for inside in value] if isinstance(value, list | tuple) else value


def say(text: str, broken: Callable[[str], str] = lambda text: text) -> None:
    """Writes more of an answer to standard output; on a terminal escapes control characters, then calls ``broken``."""
    print(broken(unmoved(text)) if sys.stdout.isatty() else text, end="", flush=True)


def tell(line: str) -> None:
    """Writes one line to standard error, with control characters escaped."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except OSError:
        _lead_nowhere(sys.stderr)


def spinner(what: str) -> AbstractContextManager[object]:
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return nullcontext()
    from .console import PlainConsole

    return PlainConsole(stderr=True).status(what)


def failed(name: str, error: BaseException, result: Result) -> int:
    """Reports the error that ended a command, in the JSON document too, and returns the exit status.

    Args:
        name: the command as it was called, ``outcore chat``.
        result: the document, with what the command had found until then.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    if not interrupted and os.environ.get(DEBUG, "") not in ("", "0"):
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, OSError) and error.errno in _STREAM_IS_GONE and error.filename is None:
        # Errors of files have a name, so this is a standard stream. A closed pipe, as by `head`, needs no message.
        return _unwritten(name, error, quiet=isinstance(error, BrokenPipeError))
    message = "interrupted" if interrupted else _line(error)
    status = 130 if interrupted else 2 if isinstance(error, UsageError) else 1
    if interrupted:
        tell("")  # ends the line on which the terminal shows ^C
    tell(f"{name}: {message}")
    result.record |= {"error": message, "type": type(error).__name__, "exit_status": status}
    try:
        result.write()
    except OSError as e:
        _unwritten(name, e)
    return status


def _unwritten(name: str, error: OSError, quiet: bool = False) -> int:
    _lead_nowhere(sys.stdout)
    if not quiet:
        tell(f"{name}: cannot write the output: {error.strerror}")
    return 1


def _line(error: BaseException) -> str:
    if isinstance(error, OutcoreError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "out of memory; give a smaller --memory, or close other programs"
    if isinstance(error, ImportError) and (advice := no_mlx(error)) is not None:
        return advice
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or one_line(error)}"
    what = f"{type(error).__name__}: {one_line(error)}"
    return f"{what}; this is a bug: run again with {DEBUG}=1 and please report the traceback"


class Nowhere(io.TextIOBase):
    """A stream that discards what is written. Closing it does nothing, as loggers may still hold it."""

    def write(self, text: str) -> int:
        return len(text)

    def close(self) -> None:
        pass


def open_streams() -> None:
    """Opens standard streams that are closed on the null device; escapes characters that the encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # as long as it runs
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def streams(as_json: bool, quiet: bool, stderr: TextIO) -> Iterator[None]:
    target: Any = Nowhere() if quiet else stderr
    with redirect_stderr(target), redirect_stdout(target) if as_json else nullcontext():
        yield


def log_from(level: str | None) -> None:
    if level is None:
        return
    name = choice("--log-level", level.upper() if level.isascii() else level, LOG_LEVELS)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(name)
    logging.captureWarnings(True)
    # transformers sets up its logger when it is imported, in the child processes of outcore bench too. On INFO it
    # prints whole configurations.
    os.environ["TRANSFORMERS_VERBOSITY"] = "warning" if name == "INFO" else name.lower()


def _lead_nowhere(stream: TextIO) -> None:
    """Points a broken stream at the null device, as Python flushes it at exit and would report the error again."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
