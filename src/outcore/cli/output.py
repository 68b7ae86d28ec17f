"""Where a command's words go: its answer to standard output, all else to standard error.

With ``--json`` one line of JSON is all that standard output holds, so that programs read it as it is. With ``--quiet``
nothing but the answer or the JSON is written, and what went wrong.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from ..options import choice
from ..text import unmoved
from .flag_table import LOG_LEVELS


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
        """One document of many, told at once. There is none at the end then.

        Raises:
            OSError: the stream takes nothing more.
        """
        self.wanted = False
        print(json.dumps(_finite(record), allow_nan=False), file=self._stream, flush=True)

    def write(self) -> None:
        """Write it, if it was asked for.

        Raises:
            OSError: the stream takes nothing more.
        """
        if self.wanted:
            self.wanted = False
            print(json.dumps(_finite(self.record), allow_nan=False), file=self._stream, flush=True)


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


class Nowhere(io.TextIOBase):
    """A stream that what is written to is gone. It cannot be closed by those who keep it: loggers do."""

    def write(self, text: str) -> int:
        return len(text)

    def close(self) -> None:
        pass


@contextmanager
def streams(as_json: bool, quiet: bool, stderr: TextIO) -> Iterator[None]:
    """What is printed meanwhile goes where it belongs; what mlx-lm and others print, too."""
    told: Any = Nowhere() if quiet else stderr
    with redirect_stderr(told):
        if as_json:
            with redirect_stdout(told):
                yield
        else:
            yield


def log_from(level: str | None) -> None:
    """``--log-level``; without it, warnings are told as they are.

    Raises:
        UsageError: there is no such level.
    """
    if level is None:
        return
    name = choice("--log-level", level.upper() if level.isascii() else level, LOG_LEVELS)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(name)
    logging.captureWarnings(True)
    # transformers sets its logger up by itself, when it is imported; in the processes of outcore bench, too.
    os.environ["TRANSFORMERS_VERBOSITY"] = name.lower()
