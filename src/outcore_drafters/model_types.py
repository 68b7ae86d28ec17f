"""Refuses a drafter's folder where a model is expected (the core's group ``model_types``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.errors import CheckpointError, UnsupportedModelError
from outcore.options import LoadOptions
from outcore.text import shortened

from .config import config_of, is_drafter


def classes_of(config: dict[str, Any]) -> None:
    """Returns None: a drafter is no model."""


def no_text(folder: Path) -> str:
    """Returns that the folder holds a drafter, and how to use it; empty if it holds none."""
    try:
        config = config_of(folder)
    except CheckpointError:
        return ""
    if not is_drafter(config):
        return ""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    said = verifier.get("model_type") if isinstance(verifier, dict) else None
    made_for = f"a model of type {shortened(said)}" if isinstance(said, str) else "a model"
    return f"is a drafter for {made_for}; give that model, with --draft {folder}"


def load_options(folder: Path, o: LoadOptions) -> LoadOptions:
    """Returns the options. Raises ``UnsupportedModelError`` for a drafter."""
    if why := no_text(folder):
        raise UnsupportedModelError(f"{folder}: {why}")
    return o
