"""Outcore runs language models larger than memory on MLX, by streaming weights from the SSD while it computes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode.batch import batch_generate
    from .decode.generate import generate, stream_generate
    from .decode.loader import load, load_model
    from .decode.preparation import plan_model
    from .engine.session import Session
    from .errors import (
        BudgetError,
        BusyError,
        CalibrationError,
        CheckpointError,
        ClosedError,
        HeaderError,
        LinkError,
        MissingFileError,
        OutcoreError,
        OutputError,
        PromptError,
        ReadError,
        RequestError,
        StoreError,
        StoreSpaceError,
        UnsupportedModelError,
        UsageError,
    )
    from .options import LoadOptions
    from .plan.plan import Plan

from .version import __version__

__all__ = [
    "BudgetError",
    "BusyError",
    "CalibrationError",
    "CheckpointError",
    "ClosedError",
    "HeaderError",
    "LinkError",
    "LoadOptions",
    "MissingFileError",
    "OutcoreError",
    "OutputError",
    "Plan",
    "PromptError",
    "ReadError",
    "RequestError",
    "Session",
    "StoreError",
    "StoreSpaceError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "batch_generate",
    "generate",
    "load",
    "load_model",
    "plan_model",
    "stream_generate",
]

_HOMES = {
    "LoadOptions": "options",
    "Plan": "plan.plan",
    "Session": "engine.session",
    "batch_generate": "decode.batch",
    "generate": "decode.generate",
    "load": "decode.loader",
    "load_model": "decode.loader",
    "plan_model": "decode.preparation",
    "stream_generate": "decode.generate",
}


def __dir__() -> list[str]:
    return [*__all__]


def __getattr__(name: str) -> Any:
    # MLX, mlx-lm and transformers take a second to import: `outcore --help` should not wait for them, and Ctrl-C
    # should find our own handler in place.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    except ImportError as e:
        from .errors import no_mlx

        if (advice := no_mlx(e)) is None:
            raise
        raise ImportError(advice, name=e.name, path=e.path) from e
    globals()[name] = value
    return value
