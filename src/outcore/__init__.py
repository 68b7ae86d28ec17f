"""Outcore runs language models larger than memory on MLX, by streaming weights from the SSD while it computes."""

from .errors import (
    BudgetError,
    CheckpointError,
    ClosedError,
    HeaderError,
    MissingFileError,
    OutcoreError,
    PromptError,
    ReadError,
    StoreError,
    StoreSpaceError,
    UnsupportedModelError,
    UsageError,
)
from .generate import generate, stream_generate
from .loader import Session, load, load_model

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "HeaderError",
    "MissingFileError",
    "OutcoreError",
    "PromptError",
    "ReadError",
    "Session",
    "StoreError",
    "StoreSpaceError",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "generate",
    "load",
    "load_model",
    "stream_generate",
]
