"""What this package adds to ``outcore plan``."""

from __future__ import annotations

from outcore.cli.flag_table import flag
from outcore.cli.parser import ArgumentParser


def add_flags(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    flag(
        "--device",
        "Predict for a published device instead of this machine; without a model, how well the published system's own "
        "speeds are explained there.",
        metavar="NAME",
    ).add(parser)
    parser.run = "outcore_bench.commands.plan:run"
