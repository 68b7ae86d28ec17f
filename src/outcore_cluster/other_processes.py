"""Other processes of this machine: what they are doing, and what they have started."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]


def is_stopped(pid: int) -> bool:
    """Whether a process is, by a signal: it hears nothing, and only SIGKILL ends it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def below(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []
