"""Every error that Outcore raises on purpose.

A message is one line: what was wrong, where (file, tensor, unit, byte), and what to do about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager


class OutcoreError(Exception):
    """Base of all errors raised by Outcore. The command line prints its message and exits with 1."""


class UsageError(OutcoreError, ValueError):
    """An argument that cannot be meant. The command line exits with 2."""


class BudgetError(OutcoreError, ValueError):
    """A memory budget that is too small for the model or larger than the machine.

    Attributes:
        smallest: the smallest budget in bytes that works, where it is known.
    """

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class CheckpointError(OutcoreError):
    """A model folder that cannot be trusted or is not whole."""


class MissingFileError(CheckpointError):
    """A file that the model needs is not there."""


class HeaderError(CheckpointError):
    """A safetensors file whose header or length is wrong."""


class UnsupportedModelError(CheckpointError):
    """A model type that mlx-lm does not know, or remote code that was not allowed to run."""


class StoreError(OutcoreError):
    """A packed copy that cannot be written or no longer fits."""


class StoreSpaceError(StoreError):
    """There is no room on the disk for a packed copy."""


class ReadError(OutcoreError):
    """Reading a unit's weights failed while the model was running."""


class LinkError(OutcoreError):
    """Another rank of a model that several machines share is gone, silent, or said what it should not: all of them end.

    Attributes:
        rank: the one at fault, where it is known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CalibrationError(OutcoreError):
    """This machine cannot be measured, or what was measured cannot be kept."""


class PromptError(OutcoreError, ValueError):
    """A prompt that is empty, no text, or longer than the context."""


class RequestError(OutcoreError, ValueError):
    """A request, of a batch or to the server, that is malformed, or asks for what is not supported. It fails alone.

    Attributes:
        code: its kind, for programs.
        param: the field that it is about, if it is about one.
        status: how HTTP tells it.
        retry_after: seconds after which it may be tried again; None: it need not be.
        counts: numbers that programs may act on, by their names.
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
    """Answers that cannot be written; those before are kept."""


class BusyError(OutcoreError):
    """A model that another thread generates with and does not go on with, or a text that changed threads."""


class ClosedError(OutcoreError):
    """A streamed model was used after it was closed."""


FLAGS = {"prompt": "--prompt-tokens"}
"""Flags whose names are not their arguments'."""

_known: Collection[str] = ()


def flag_of(argument: str) -> str:
    """The flag of an argument."""
    return FLAGS.get(argument, "--" + argument.replace("_", "-"))


def called(argument: str) -> str:
    """What the user calls an argument: in a command by its flag, if the command has it."""
    return flag if (flag := flag_of(argument)) in _known else argument


@contextmanager
def by_flags(flags: Collection[str]) -> Iterator[None]:
    """While this process is a command, errors and notes name these flags of it, not arguments."""
    global _known
    before, _known = _known, flags
    try:
        yield
    finally:
        _known = before


def no_mlx(error: ImportError) -> str | None:
    """What to do about an import that failed for want of MLX; None: it did not."""
    name = error.name or ""
    if name.partition(".")[0] != "mlx" and "libmlx" not in str(error):
        return None
    return (
        'MLX is not installed: pip install "outcore[cpu]" on Linux, or [cuda12] or [cuda13] with an NVIDIA GPU; '
        '"outcore" on a Mac'
    )
