"""The folder of the model that a command names, on one machine or several."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checkpoint.find_model import resolve_model
from ..options import LoadOptions
from .arguments import engine_options
from .output import tell


def model_folder(args: argparse.Namespace) -> Path:
    """As ``resolve_model``; of several ranks each downloads what it needs alone.

    Raises:
        As ``resolve_model``.
    """
    ranks = getattr(args, "ranks", None)
    if ranks is None:
        return resolve_model(args.model, args.revision)
    options = LoadOptions(**engine_options(args), trust_remote_code=args.trust_remote_code)
    found: Path = ranks.model_folder(args.model, args.revision, options, tell)
    return found
