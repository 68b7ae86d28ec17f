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

# Milliseconds that a pipe may stay silent before we look who writes into it.
SILENT_MS = 500


def whole_prompt(given: str | None, *, alone: bool = True) -> str:
    """Joins a prompt given as a flag and text that is piped in. Ranks (not ``alone``) have no common standard input.

    Raises:
        UsageError: there is neither, or it is not text.
    """
    if given == "-":
        return prompt_text(given)
    told = text_of("--prompt", (given or "").replace("\\n", "\n").replace("\\t", "\t"))
    piped = prompt_text("-") if alone and _holds_text(given is not None) else ""
    if given is None and not piped:
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
    """Returns whether standard input is text for this command, rather than inherited.

    Beside a prompt, a file that was read from before is a loop's (``while read line``). A silent pipe into which no
    process of this pipeline writes is a parent's (ssh, a job runner).
    """
    if isinstance(sys.stdin, io.StringIO):
        return True
    try:
        fd = sys.stdin.fileno()
        found = os.fstat(fd)
    except (AttributeError, OSError, ValueError):  # it is closed, or no file
        return False
    if stat.S_ISREG(found.st_mode):
        return not prompted or os.lseek(fd, 0, os.SEEK_CUR) == 0
    if not (stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        return False  # a terminal, or a device without an end
    waiting = select.poll()
    waiting.register(fd, select.POLLIN | select.POLLHUP)
    while not waiting.poll(SILENT_MS):
        above = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
        if not any(_writes(pid, found.st_ino) for pid in set(psutil.pids()) - above):
            tell("standard input is open, but nobody writes to it: not waited for (--prompt - waits)")
            return False
    return True


def _writes(pid: int, pipe: int) -> bool:
    """Returns whether a process of this pipeline, which shares its process group, writes to the pipe of that inode."""
    output = Path(f"/proc/{pid}/fd/1")  # where there is no /proc, any process of the group may be the one
    try:
        return os.getpgid(pid) == os.getpgrp() and (not output.parent.exists() or output.stat().st_ino == pipe)
    except PermissionError:
        return True  # another user's, by sudo
    except OSError:
        return False  # it has ended, or its standard output is closed
