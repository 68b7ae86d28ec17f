"""The prompt: what is given as a flag, and what is piped into standard input."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ..errors import UsageError
from .flags import text_of
from .output import tell

# Milliseconds that a pipe may stay silent before we ask who writes into it.
SILENT_MS = 500


def whole_prompt(given: str | None, *, alone: bool = True) -> str:
    """Joins a prompt that was given as a flag and text that is piped in; either is enough.

    Args:
        given: the flag's value; ``-`` reads standard input to its end, whatever it is.
        alone: no other rank, whose standard input may hold something else, needs the same prompt.

    Raises:
        UsageError: there is neither, or it is not text.
    """
    if given == "-":
        return prompt_text(given)
    told = None if given is None else text_of("--prompt", given.replace("\\n", "\n").replace("\\t", "\t"))
    piped = prompt_text("-") if alone and _holds_text(told is not None) else ""
    if told is None and not piped:
        raise UsageError("no prompt: give --prompt TEXT, or pipe text in; outcore chat asks for it")
    return f"{told}\n\n{piped}" if told and piped else told or piped


def prompt_text(given: str) -> str:
    try:
        if given == "-":
            given = sys.stdin.read() if isinstance(sys.stdin, io.StringIO) else sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"--prompt -: standard input is not UTF-8 at byte {e.start}; convert it") from e
    except OSError as e:
        raise UsageError(f"--prompt -: standard input cannot be read: {e.strerror or e}") from e
    return text_of("--prompt", given)


def _holds_text(prompted: bool) -> bool:
    """Returns whether standard input is text for this command, rather than what it inherited.

    A file that was read from before is a loop's (``while read line``), and a pipe that stays silent and into which no
    process of this pipeline writes is a parent's (ssh, a job runner). Those are left alone if there is a prompt.
    """
    if isinstance(sys.stdin, io.StringIO):
        return True
    try:
        fd = sys.stdin.fileno()
        kind = os.fstat(fd).st_mode
    except (AttributeError, OSError, ValueError):  # it is closed, or no file
        return False
    if stat.S_ISREG(kind):
        return not prompted or os.lseek(fd, 0, os.SEEK_CUR) == 0
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return False  # a terminal, or a device without an end
    waiting = select.poll()
    waiting.register(fd, select.POLLIN | select.POLLHUP)
    while not waiting.poll(SILENT_MS):
        if not _written_to(os.fstat(fd).st_ino):
            tell("standard input is open, but nobody writes to it: not waited for (--prompt - waits)")
            return False
    return True


def _written_to(pipe: int) -> bool:
    """Returns whether another process of this pipeline, which shares its process group, writes to a pipe.

    Args:
        pipe: the pipe's inode.
    """
    above = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for pid in set(psutil.pids()) - above:
        try:
            output = Path(f"/proc/{pid}/fd/1")  # where there is no /proc, any process of the group may be the one
            mine = os.getpgid(pid) == os.getpgrp()
            if mine and (not output.parent.exists() or output.stat().st_ino == pipe):
                return True
        except ProcessLookupError:
            continue
        except PermissionError:
            return True  # another user's, by sudo
        except OSError:
            continue  # its standard output is closed
    return False
