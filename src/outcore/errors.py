"""Every error that Outcore raises on purpose.

A message is one line: what was wrong, where (file, tensor, unit, byte), and what to do about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager


class OutcoreError(Exception):
    """Base of all errors raised by Outcore. The command line prints its message and exits with 1."""


class UsageError(OutcoreError, ValueError):
    """An argument has the wrong type or value. The command line exits with 2."""


class BudgetError(OutcoreError, ValueError):
    """The memory budget is too small for the model, or larger than the machine.

    Attributes:
        smallest: the smallest budget in bytes that works; None where unknown.
    """

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class CheckpointError(OutcoreError):
    """A model folder is incomplete or damaged."""


class MissingFileError(CheckpointError):
    """A file that the model needs does not exist."""


class HeaderError(CheckpointError):
    """A safetensors file has a wrong header or length."""


class UnsupportedModelError(CheckpointError):
    """mlx-lm does not support the model type, or its remote code was not allowed to run."""


class StoreError(OutcoreError):
    """A packed checkpoint cannot be written, or no longer matches its source."""


class StoreSpaceError(StoreError):
    """The disk has no space for a packed checkpoint."""


class ReadError(OutcoreError):
    """Reading a unit's weights failed while the model was running."""


class LinkError(OutcoreError):
    """Another rank failed, fell silent or broke the protocol; all ranks stop.

    Attributes:
        rank: the rank at fault; None where unknown.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CalibrationError(OutcoreError):
    """This machine cannot be measured, or the measurements cannot be stored."""


class PromptError(OutcoreError, ValueError):
    """A prompt is empty, not text, or longer than the context."""


class RequestError(OutcoreError, ValueError):
    """One request of a batch or server is malformed or unsupported; others go on.

    Attributes:
        code: the kind of error, for programs.
        param: the request field at fault; None where it is not one field.
        status: HTTP status.
        retry_after: seconds after which a retry may succeed; None: do not retry.
        counts: named numbers that programs may act on.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_request",
        *,
        param: str | None = None,
        status: int = 400,
        retry_after: float | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.status, self.retry_after = code, param, status, retry_after
        self.counts = dict(counts or {})


class OutputError(OutcoreError):
    """Answers cannot be written; those written earlier remain."""


class BusyError(OutcoreError):
    """Another thread stalled while generating with this model, or a second thread used a generator."""


class ClosedError(OutcoreError):
    """A model was used after it was closed."""


FLAGS = {"prompt": "--prompt-tokens"}
"""Flags that are not named after their argument."""

_known: Collection[str] = ()


def flag_of(argument: str) -> str:
    """Returns an argument's flag on the command line."""
    return FLAGS.get(argument, "--" + argument.replace("_", "-"))


def called(argument: str) -> str:
    """Returns what the user calls an argument: the running command's flag, or the argument itself."""
    return flag if (flag := flag_of(argument)) in _known else argument


def offered(*arguments: str) -> list[str]:
    """Returns what the user calls those of the arguments that the running command has; outside of commands, all."""
    return [called(each) for each in arguments if not _known or flag_of(each) in _known]


@contextmanager
def by_flags(flags: Collection[str]) -> Iterator[None]:
    """Makes errors and notes within the block name these command-line flags instead of arguments."""
    global _known
    before, _known = _known, flags
    try:
        yield
    finally:
        _known = before


def no_mlx(error: ImportError) -> str | None:
    """Returns advice if an import failed because MLX is missing, otherwise None."""
    name = error.name or ""
    if name.partition(".")[0] != "mlx" and "libmlx" not in str(error):
        return None
    return (
        'MLX is not installed: pip install "outcore[cpu]" on Linux, or [cuda12] or [cuda13] with an NVIDIA GPU; '
        '"outcore" on a Mac'
    )
