"""The prompt: what is given as a flag, and what is piped into standard input."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from typing import AnyStr

from ..errors import UsageError
from .flags import text_of
from .output import tell

# Milliseconds after which a silent pipe is spoken of, and most bytes of a prompt: some 16 million tokens.
SILENT_MS, MOST = 3000, 64_000_000


def whole_prompt(given: str | None, *, alone: bool = True) -> str:
    """Joins a prompt given as a flag and text that is piped in. Ranks (not ``alone``) have no common standard input.

    Raises:
        UsageError: there is neither, or it is not text.
    """
    told = text_of("--prompt", (given or "").replace("\\n", "\n").replace("\\t", "\t")) if given != "-" else ""
    piped = prompt_text("-") if given == "-" or (alone and _holds_text(given is not None)) else ""
    if given in (None, "-") and not piped.strip():
        raise UsageError("no prompt: give --prompt TEXT, or pipe text in; outcore chat asks for it")
    return f"{told}\n\n{piped}" if told and piped else told or piped


def prompt_text(given: str) -> str:
    try:
        if given == "-":
            given = sys.stdin.read() if isinstance(sys.stdin, io.StringIO) else _read()
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input is not UTF-8 at byte {e.start}; convert it") from e
    except UsageError:
        raise
    except (AttributeError, OSError, ValueError) as e:
        raise UsageError(f"standard input cannot be read: {e}") from e
    return text_of("--prompt", given)


def _read() -> str:
    return _bounded(sys.stdin.buffer.read(MOST + 1)).decode("utf-8")


def read_line() -> str:
    """Returns the next line of a conversation; empty: there is none."""
    return _bounded(sys.stdin.readline(MOST + 1))


def _bounded(found: AnyStr) -> AnyStr:
    if len(found) > MOST:
        raise UsageError(f"standard input has more than {MOST // 1_000_000} MB, which no prompt has")
    return found


def _holds_text(prompted: bool) -> bool:
    """Returns whether standard input is a file or a pipe; a file that a loop reads from (``while read line``) is not
    this command's. A pipe is waited for, whoever may write to it."""
    if isinstance(sys.stdin, io.StringIO):
        return True
    try:
        fd = sys.stdin.fileno()
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind):
            return not prompted or os.lseek(fd, 0, os.SEEK_CUR) == 0
    except (AttributeError, OSError, ValueError):  # it is closed, or no file
        return False
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return False  # a terminal, or a device without an end
    waiting = select.poll()
    waiting.register(fd, select.POLLIN | select.POLLHUP)
    if not waiting.poll(SILENT_MS):
        tell("waiting for text on standard input; < /dev/null says that there is none")
    return True
