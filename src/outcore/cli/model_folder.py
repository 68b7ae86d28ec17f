"""The folder of the model that a command names, on one machine or several."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checkpoint.find_model import resolve_model


def model_folder(args: argparse.Namespace) -> Path:
    """As ``resolve_model``; several ranks wait for one another.

    Raises:
        As ``resolve_model``.
    """
    ranks = getattr(args, "ranks", None)
    if ranks is None:
        return resolve_model(args.model, args.revision)
    found: Path = ranks.model_folder(args.model, args.revision)
    return found
